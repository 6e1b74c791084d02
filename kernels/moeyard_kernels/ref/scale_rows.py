"""A gate on whole rows, as its own rounded pass."""

import torch

from moeyard_kernels.ref.rows_apart import rows_apart


def scale_rows_(x: torch.Tensor, scale: torch.Tensor, *, sigmoid: bool = False) -> torch.Tensor:
    """x [T, H] becomes round(float(x) * float(scale[t])), in place; scale [T], or its sigmoid in fp32."""
    factor = rows_apart(scale.unsqueeze(1))
    if sigmoid:
        factor = factor.sigmoid()
    if x.dtype == torch.float32:
        return x.mul_(factor)
    return x.copy_(x.float() * factor)
