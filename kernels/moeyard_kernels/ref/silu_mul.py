"""The gated activation of an MLP whose gate and up projections are one matrix."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2 I] -> silu(gate_up[:, :I]) * gate_up[:, I:], each rounded to the dtype.

    The gate half stays a view on purpose: its rows are strided, so each row is one vector loop of I elements and a
    position's path (vector or scalar tail) depends on its column only.
    """
    half = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
