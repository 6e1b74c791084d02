"""Contracts of the expert cache: where expert weights come from and what a residency policy decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Phase = Literal["decode", "prefill"]
Segment = Literal["probation", "protected"]


class ExpertSource(Protocol):
    """The checkpoint's side of the expert store: zero-copy views of one expert's weights (memory-mapped on a CPU)."""

    def tensors(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) of global expert `expert` of layer `layer`, in the checkpoint's dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One expert of a wave: the slot it computes from.

    `hit` is None for a miss, else the segment it was found in. `evicted` is the (layer, expert) whose slot a miss took.
    """

    expert: int
    slot: int
    hit: Segment | None = None
    evicted: tuple[int, int] | None = None


class ResidencyPolicy(Protocol):
    """Decides which experts sit in which slots. Pure: no torch, no clock, no I/O. One instance per rank, all layers."""

    num_slots: int

    def access(
        self, layer: int, decode: Sequence[int], prefill: Sequence[int]
    ) -> list[list[Placed]]:
        """Make the needed experts of one layer resident, in waves that each fit the slots.

        `decode` and `prefill` are disjoint ascending expert ids: those that a decode row needs, and those that only
        prompt rows need. Every expert appears in exactly one wave; the first wave starts with all hits. A slot is never
        reassigned inside the wave that uses it, and no hit is evicted before its wave.
        """
        ...

    def validate(self) -> None:
        """Assert every invariant of the data structure."""
        ...
