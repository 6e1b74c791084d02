"""Experts from plain matrices, in the format that slots and stores accept."""

import torch

from moeyard_kernels.types.matrix import ExpertViews, Fill


def expert_fill(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Fill:
    """Return a function that writes an expert of gate [I, H], up [I, H] and down [H, I]."""

    def fill(out: ExpertViews) -> None:
        out.copy_(gate, up, down)

    return fill
