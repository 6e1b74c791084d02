"""Projections: one product in fp32, one rounding."""

import torch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.linear`. On a CPU nothing is launched ahead, so static_weight says nothing."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype or x.dtype)


def linear_pair(
    x: torch.Tensor,
    weight_a: torch.Tensor,
    weight_b: torch.Tensor,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.linear_pair`."""
    return linear(x, weight_a, out_dtype=out_dtype), linear(x, weight_b, out_dtype=out_dtype)
