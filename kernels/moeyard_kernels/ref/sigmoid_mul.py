"""What an output gate lets through, value by value."""

import torch


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [M, N] * sigmoid(gate [M, N]) in fp32, rounded once to x's dtype."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
