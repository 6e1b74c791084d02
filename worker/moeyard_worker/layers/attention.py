"""What an attention says of itself, one object per kind and layer. Pure: no file that plans or checks loads torch.

Everything that differs between kinds is asked of this object: a new kind is a file beside `gqa.py` and `mla.py`, an
attention of the backend, and nobody's `if`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        ...


class Attention(Protocol):
    """The description of one layer's attention."""

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def rope(self) -> RopeConfig | None:
        """Its rotation; None for none."""
        ...

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """Its weights under the argument names of `build`; `at` is the prefix of their names in the checkpoint."""
        ...

    def state(self) -> LayerState:
        """What it keeps of a sequence."""
        ...

    def footprint(self, footprints: Footprints) -> Footprint:
        """What a backend takes for it beside weights and state."""
        ...

    def build(
        self,
        backend: Backend,
        *,
        weights: Loaded,
        state: Mapping[str, torch.Tensor],
        rope: torch.Tensor | None,
    ) -> AttentionBlock:
        """The block on a backend; `rope` is its table [positions, dim], cos then sin."""
        ...
