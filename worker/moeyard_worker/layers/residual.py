"""The residual: the stream of rows around the blocks, with the norm before each block. Pure.

A block (attention, MLP, experts) reads normalised rows and returns its result; it never sees the residual. A model has
one kind of residual (`Streams`), which creates a `Residual` in every step. A site is the place before a block and holds
the weights that the residual needs there. The last site is before the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.gate import ExpertParts

if TYPE_CHECKING:
    import torch


class Residual(Protocol):
    """The residual of one step's rows."""

    def enter(self, site: Any) -> torch.Tensor:
        """Return the rows [num_rows, H] that the first block reads."""

    def leave(self, result: torch.Tensor | ExpertParts, site: Any) -> torch.Tensor:
        """Take a block's result, rows [num_rows, H] or unreduced parts; return the rows that `site` reads."""


class Streams(Protocol):
    """A model's kind of residual."""

    def site(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Return a site made of the weights that the model's spec names for it."""

    def begin(self, rows: torch.Tensor, plan: StepPlan) -> Residual:
        """Return the residual of a step, which begins as rows [num_rows, H]."""


class AddNormStreams:
    """One stream: add a block's result, then apply an RMS norm. Both are one launch on a GPU."""

    def __init__(self, backend: Backend, eps: float) -> None:
        self._backend, self._eps = backend, eps

    def site(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight of the norm, [H]."""
        return weights["norm"]

    def begin(self, rows: torch.Tensor, plan: StepPlan) -> AddNormResidual:
        return AddNormResidual(self._backend, self._eps, rows, plan)


class AddNormResidual:
    """The stream [num_rows, H] of one step."""

    __slots__ = ("_backend", "_eps", "_plan", "_stream")

    def __init__(self, backend: Backend, eps: float, rows: torch.Tensor, plan: StepPlan) -> None:
        self._backend, self._eps, self._stream, self._plan = backend, eps, rows, plan

    def enter(self, site: torch.Tensor) -> torch.Tensor:
        return self._backend.rms_norm(self._stream, site, self._eps)

    def leave(self, result: torch.Tensor | ExpertParts, site: torch.Tensor) -> torch.Tensor:
        if isinstance(result, ExpertParts):
            rows, self._stream = self._backend.reduce_add_norm(result, self._stream, site, self._eps, self._plan)
        else:
            rows, self._stream = self._backend.add_rms_norm(result, self._stream, site, self._eps)
        return rows
