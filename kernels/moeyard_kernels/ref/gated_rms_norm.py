"""The norm behind linear attention: each head by itself, times its activated gate."""

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ref.rms_norm import rms_norm
from moeyard_kernels.ref.rows_apart import rows_apart


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, sigmoid: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, H, D], gate [T, H D], weight [D] -> rms_norm(x) * silu(gate) (or sigmoid), [T, H D] in x's dtype.

    The gate is activated and multiplied in fp32; the product is rounded once. With a weight in fp32 so is all of it,
    as in Kimi-Linear. rows [T]: row t is that of x[rows[t]].
    """
    dtype = x.dtype
    if rows is not None:
        check_indices("gated_rms_norm", low=0, high=x.shape[0], rows=rows)
        x = x.index_select(0, rows)
    if weight.dtype == torch.float32:
        x = x.float()
    gate = rows_apart(gate)
    factor = gate.sigmoid() if sigmoid else F.silu(gate)
    return (rms_norm(x, weight, eps).flatten(1) * factor).to(dtype)
