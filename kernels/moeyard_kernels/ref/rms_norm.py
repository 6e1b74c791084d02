"""Root-mean-square normalisation, alone and fused with the residual addition."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> weight * cast(x32 * rsqrt(mean(x32^2) + eps)), x32 being x in fp32.

    The cast to x.dtype comes before the weight, as in the Hugging Face models; a weight in fp32 comes before the cast,
    as in those (Qwen3-Next) that store it less one.
    """
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype != x.dtype:
        return (x32 * scale).mul_(weight).to(x.dtype)
    return (x32 * scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r), r) with r = x + residual rounded to x.dtype; all [..., D] but weight [D]."""
    total = x + residual
    return rms_norm(total, weight, eps), total
