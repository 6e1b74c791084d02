"""The routed experts: each expert's rows through its gated MLP."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moeyard_kernels.ref.linear import ROW_TILE
from moeyard_kernels.ref.silu_mul import silu_mul


def grouped_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.grouped_mlp`."""
    for start, count, slot in groups:
        if count == 0:
            continue
        x = rows.index_select(0, row_of_pair[start : start + count])
        pad = -count % ROW_TILE
        if pad:
            x = F.pad(x, (0, 0, 0, pad))
        y = F.linear(silu_mul(F.linear(x, gate_up[slot])), down[slot])
        out[start : start + count] = y[:count] if pad else y
    return out
