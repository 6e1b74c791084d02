"""Rows whose elementwise functions do not know how many they are."""

import torch


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """x [M, N] in fp32 (fp64 stays), with room between rows: torch then has a vector loop per row, not one over all.

    Its sigmoid, silu and softplus differ in the last bit between vectors and the scalar tail of a loop (torch 2.13,
    AVX2); so a value's path depends on its column alone.
    """
    out = torch.empty(x.shape[0], x.shape[1] + 1, dtype=torch.promote_types(x.dtype, torch.float32))[:, :-1]
    return out.copy_(x)
