"""The residual: the stream of rows around the blocks, with the norm before each block. Pure.

A block (attention, MLP, experts) reads normalised rows and returns its result; it never sees the residual. A model has
one kind of residual (`Streams`), which creates a `Residual` in every step. A site is the place before a block and holds
the weights that the residual needs there. The last site is behind the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.gate import ExpertParts
from moeyard_kernels.types.layers import HyperLayer

if TYPE_CHECKING:
    import torch

    from moeyard_kernels.backend import HyperSite
    from moeyard_kernels.types.layers import HyperMix


class Residual(Protocol):
    """The residual of one step's rows."""

    def enter(self, site: Any) -> torch.Tensor:
        """Return the rows [num_rows, H] that the first block reads."""

    def leave(self, result: torch.Tensor | ExpertParts, site: Any) -> torch.Tensor:
        """Take a block's result, rows [num_rows, H] or unreduced parts; return the rows that `site` reads."""

    def mean(self) -> torch.Tensor:
        """Return the mean [num_rows, H] of the streams behind the latest block."""


# Maps hidden states [M, H] or [M, S H] to the rows [M, H] that the head reads.
Head = Callable[["torch.Tensor"], "torch.Tensor"]


class Streams(Protocol):
    """A model's kind of residual."""

    def site(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Return a site made of the weights that the model's spec names for it."""

    def last(self, weights: Mapping[str, torch.Tensor]) -> tuple[Any, Head]:
        """Return the site behind the last block, and the way from its rows to those that the head reads.

        The site's rows are the hidden states. They are all that a head and a layer of multi-token prediction need.
        """

    def begin(self, rows: torch.Tensor, plan: StepPlan) -> Residual:
        """Return the residual of a step, which begins as rows [num_rows, H] or streams [num_rows, S, H]."""


class AddNormStreams:
    """One stream: add a block's result, then apply an RMS norm. Both are one launch on a GPU."""

    def __init__(self, backend: Backend, eps: float) -> None:
        self._backend, self._eps = backend, eps

    def site(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight of the norm, [H]."""
        return weights["norm"]

    def last(self, weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Head]:
        """Hidden states are normalised, as the head reads them."""
        return weights["norm"], lambda rows: rows

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

    def mean(self) -> torch.Tensor:
        return self._stream


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Manifold-constrained hyper-connections (DeepSeek-V4): the number of streams, and settings of `HyperLayer`."""

    streams: int
    eps: float
    iterations: int


class HyperStreams:
    """Several streams. A block reads a weighted sum of them, and its result goes to all of them.

    The weights depend on the row. All streams begin as the embedding.
    """

    def __init__(self, backend: Backend, config: HyperConfig, eps: float) -> None:
        self._backend, self._config, self._eps = backend, config, eps

    def site(self, weights: Mapping[str, Any]) -> HyperSite:
        """Return a site with its norm, and weight, base and scale of the connections."""
        config = self._config
        return self._backend.hyper_site(
            HyperLayer(
                weight=weights["connections"],
                base=weights["base"],
                scale=weights["scale"],
                norm=weights["norm"],
                eps=config.eps,
                rms_eps=self._eps,
                iterations=config.iterations,
            )
        )

    def last(self, weights: Mapping[str, Any]) -> tuple[AllStreams, Head]:
        """Hidden states are all streams. The head reads a weighted sum of them, normalised."""
        return AllStreams(), StreamsHead(self.site(weights), self._config.streams)

    def begin(self, rows: torch.Tensor, plan: StepPlan) -> HyperResidual:
        if rows.dim() == 2:
            rows = rows.unsqueeze(1).repeat(1, self._config.streams, 1)
        return HyperResidual(self._backend, rows, plan)


class AllStreams:
    """The site behind the last block: its rows [num_rows, S H] are all streams."""

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, None]:
        return streams.flatten(1), None


class StreamsHead:
    """Maps streams [M, S H] to the rows [M, H] that the head reads."""

    def __init__(self, site: HyperSite, streams: int) -> None:
        self._site, self._streams = site, streams

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._site.enter(rows.view(rows.shape[0], self._streams, rows.shape[1] // self._streams))[0]


class HyperResidual:
    """The streams [num_rows, S, H] of one step."""

    __slots__ = ("_backend", "_mix", "_plan", "_streams")

    def __init__(self, backend: Backend, streams: torch.Tensor, plan: StepPlan) -> None:
        self._backend, self._streams, self._plan = backend, streams, plan
        self._mix: HyperMix | None = None

    def enter(self, site: HyperSite) -> torch.Tensor:
        rows, self._mix = site.enter(self._streams)
        return rows

    def leave(self, result: torch.Tensor | ExpertParts, site: HyperSite) -> torch.Tensor:
        assert self._mix is not None, "a block follows a site of its own"
        self._streams, rows, self._mix = self._backend.hyper_leave(result, self._streams, self._mix, site, self._plan)
        return rows

    def mean(self) -> torch.Tensor:
        return self._streams.mean(1)
