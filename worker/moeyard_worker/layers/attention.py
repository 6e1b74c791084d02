"""The description of an attention, one object per kind and layer. Pure: planning and checking never load torch.

This object answers all questions that differ between kinds. So a new kind needs a file like `gqa.py` and an attention
of each backend, and no `if` elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Loaded, Weight
from moeyard_worker.state.layout import LayerState

if TYPE_CHECKING:
    import torch


class AttentionBlock(Protocol):
    """A layer's attention with its weights and state."""

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Normalised rows x [num_rows, H] -> [num_rows, H]."""


class Attention(Protocol):
    """The description of one layer's attention."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def rope(self) -> RopeConfig | None:
        """Its rotation, None without one."""

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """Return its weights under the argument names of `build`; `at` is the prefix of their checkpoint names."""

    def state(self) -> LayerState:
        """Return the layout of its state of a sequence."""

    def footprint(self, footprints: Footprints) -> Footprint:
        """Return the memory that a backend needs for it besides weights and state."""

    def build(self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None) -> AttentionBlock:
        """Return the block on a backend; `rope` is its table [positions, dim], cos then sin."""
