"""What an attention says of itself, one object per kind and layer. Pure: no file that plans or checks loads torch.

Everything that differs between kinds is asked of this object: a new kind is a file beside `gqa.py` and `mla.py`, an
attention of the backend, and nobody's `if`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Weight
from moeyard_worker.state.layout import LayerState

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What one layer's attention takes while it computes, in values.

    `per_row`: fp32 values for each row of a step. `per_position`, in the served dtype, and `copied_per_position`, in
    fp32 unless that is served: for each position of the longest prefix that a prompt chunk attends to.
    """

    per_row: int
    per_position: int
    copied_per_position: int


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

    def extra_values(self) -> int:
        """Values in the served dtype that the CPU backend keeps beside the weights."""
        ...

    def workspace(self) -> Workspace:
        """What it takes while it computes."""
        ...

    def build(
        self,
        backend: Backend,
        *,
        weights: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        rope: torch.Tensor | None,
    ) -> AttentionBlock:
        """The block on a backend; `rope` is its table [positions, dim], cos then sin."""
        ...
