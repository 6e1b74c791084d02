"""The weighted sum of a token's expert outputs, in top-k order, with the rounding of a chain of fused multiply-adds."""

import torch


def moe_weighted_reduce(
    partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.moe_weighted_reduce`."""
    acc = partial.new_zeros(partial.shape[0], partial.shape[2], dtype=torch.float64)
    for k in range(partial.shape[1]):
        acc = _fma(weights[:, k : k + 1].double(), partial[:, k].double(), acc).float().double()
    total = acc.float()
    if shared is not None:
        total += shared
    return total.to(partial.dtype)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32 values held in fp64, rounded to odd in fp64, so that a rounding to fp32 is the only one.

    The product of two fp32 values is exact in fp64; two-sum gives the error of the addition. Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd" (IEEE TC 57, 2008).
    """
    p = a * b
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(torch.int64)
    step = torch.where((error > 0) == (s > 0), 1, -1)
    bits += step * ((error != 0) & ((bits & 1) == 0))
    return s
