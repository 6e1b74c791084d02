"""Experts of plain matrices, as slots and stores are told to take them."""

import torch

from moeyard_kernels.types.matrix import ExpertViews, Fill


def written(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Fill:
    """Return what writes an expert of gate [I, H], up [I, H] and down [H, I]."""

    def fill(out: ExpertViews) -> None:
        out.copy_(gate, up, down)

    return fill
