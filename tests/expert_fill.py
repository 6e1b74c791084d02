"""Experts from plain matrices, in the format that slots and stores accept."""

import torch

from moeyard_kernels.types.matrix import ExpertViews, Fill


def expert_fill(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Fill:
    """Return a function that writes an expert of gate [I, H], up [I, H] and down [H, I]."""

    def fill(out: ExpertViews) -> None:
        copy_expert(out, gate, up, down)

    return fill


def copy_expert(out: ExpertViews, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """Copy plain matrices into the views of a plain expert."""
    for target, source in ((out.gate, gate), (out.up, up), (out.down, down)):
        assert target.shape == source.shape, f"an expert's matrix is {list(source.shape)}, not {target.shape}"
        target.data.copy_(source)
