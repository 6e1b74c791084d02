"""The weighted sum of a token's expert outputs, the residual and the next layer's norm."""

import torch

from moeyard_kernels.ref.moe_weighted_reduce import moe_weighted_reduce
from moeyard_kernels.ref.rms_norm import add_rms_norm
from moeyard_kernels.ref.scale_rows import scale_rows_


def moe_reduce_add_norm(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    shared_gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.moe_reduce_add_norm`."""
    if shared is not None and shared_gate is not None:
        shared = scale_rows_(shared.clone(), shared_gate, sigmoid=True)
    return add_rms_norm(moe_weighted_reduce(partial, weights, shared), residual, norm, eps)
