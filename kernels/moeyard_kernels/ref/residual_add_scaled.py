"""Residual, shared expert and scaled routed experts in one sum."""

import torch


def residual_add_scaled(hidden: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor, scale: float) -> torch.Tensor:
    """hidden + round(fma(routed, scale, shared)), all [T, H]: two sums, each rounded to the dtype."""
    factor = torch.tensor(scale, dtype=torch.float32).double()
    return hidden + _product_sum(routed.double(), factor, shared.double()).to(hidden.dtype)


def _product_sum(x: torch.Tensor, factor: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """fma(x, factor, y) in fp32 of fp32 values held in fp64, where the product is exact.

    The fp64 sum is rounded to odd, then to fp32, so that the second rounding is the only one that shows (Boldo and
    Melquiond, 2008; see moe_weighted_reduce).
    """
    p = x * factor
    s = p + y
    t = s - p
    error = (p - (s - t)) + (y - t)
    away = torch.where(s > 0, error > 0, error < 0)
    toward = torch.where(s > 0, error < 0, error > 0)
    bits = s.view(torch.int64)
    bits += (away.long() - toward.long()) * (1 - (bits & 1))
    return s.float()
