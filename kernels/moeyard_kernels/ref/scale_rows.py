"""A gate on whole rows, as its own rounded pass."""

import torch


def scale_rows_(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, H] becomes round(float(x) * float(scale[t])), in place; scale [T]."""
    factor = scale.float().unsqueeze(1)
    if x.dtype == torch.float32:
        return x.mul_(factor)
    return x.copy_(x.float() * factor)
