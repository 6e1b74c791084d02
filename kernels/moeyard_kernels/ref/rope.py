"""Rotary position embedding in the two layouts that checkpoints use."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by cos, sin [T, D/2] (or [T, D], of which the first half is used) -> [T, heads, D].

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are (i, i + D/2), or (2i, 2i + 1) when `interleaved`;
    the result is always in the first form, the rotated firsts before the rotated seconds. (Queries and keys are
    permuted alike, so scores do not see it.) Products and sums are each rounded to the wider dtype of x and cos: fp32
    cos and sin with bf16 x round once at the end.
    """
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out
