"""The weighted sum of a token's expert outputs, the residual and the next layer's norm."""

import torch

from moeyard_kernels.ref.moe_weighted_reduce import moe_weighted_reduce
from moeyard_kernels.ref.rms_norm import add_rms_norm


def moe_reduce_add_norm(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    joined: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.moe_reduce_add_norm`."""
    return add_rms_norm(moe_weighted_reduce(partial, weights, shared, joined=joined), residual, norm, eps)
