"""The token exchange between ranks: one interface for every transport.

A layer calls `dispatch` and `combine`. The engine's loop drives the life of each step (`Exchange.steps`). A constant
description (`Exchange.traits`) serves captured graphs and padding. The model alone fixes a step's chain of
collectives: one `dispatch` and one `combine` per MoE layer, on every rank, in layer order, also for a rank without a
token. All transports return the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moeyard_kernels.types.fetch_window import FetchWindow
from moeyard_kernels.types.gate import TokenChoice
from moeyard_kernels.types.peer_window import PeerWindow
from moeyard_worker.config.placement import Placement

if TYPE_CHECKING:
    from moeyard_worker.exchange.membership.mesh import Mesh


class ExchangeError(RuntimeError):
    """The step is poisoned; the message names rank, step, layer and phase. The fleet cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTraits:
    """Constant properties of an exchange, for captured graphs and padding.

    capturable: CUDA graphs can hold its launches, because no phase needs the host.
    local: rows stay on this rank, and expert ids are not read before the experts run.
    graphs_per_epoch: captured graphs hold the communicator of one epoch and end with it.
    row_sizes: with `graphs_per_epoch`, the padded numbers of rows per rank, ascending. Every rank pads a step without
        prompts to the first size that holds the largest rank. A larger step is not padded.
    """

    capturable: bool = False
    local: bool = False
    graphs_per_epoch: bool = False
    row_sizes: tuple[int, ...] = ()

    @property
    def pads_peers(self) -> bool:
        """Whether a rank has room for equally many rows of every peer (`PeerRows.most`)."""
        return self.capturable and not self.local


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """The rows that one layer's experts on this rank compute, on the device of the sent rows.

    rows: [R, H] token rows in any order, which changes no bit. Read-only, valid until the `combine` of the same layer.
        Rows that no local expert needs hold anything.
    experts: [R, K] local expert ids; -1 for an expert of another rank and in padding rows.
    prompt: [R] bool, prompt rows of their source. None if there are none, or the exchange does not know.
    handle: opaque argument of `combine`.
    num_owners: hint: about 1 / num_owners of the (row, k) pairs are local.
    expert_fetch: window through which ranks read missed experts for each other; None if every rank reads alone.
    deferred_choice: of a single row, the choice of experts that the expert kernels make and write into `experts`.
    result_window: window to which the expert kernels may write results directly; None if there is none.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    prompt: torch.Tensor | None
    handle: Any
    num_owners: int = 1
    expert_fetch: FetchWindow | None = None
    deferred_choice: TokenChoice | None = None
    result_window: PeerWindow | None = None


@dataclass(frozen=True, slots=True)
class PeerRows:
    """Rows that ranks bring to the exchanges of a step.

    most: rows of the largest rank, with padding.
    prompts: prompt rows of each rank; empty or all 0 if no rank has any.
    counts: rows of each rank, with padding, 0 for an absent rank; empty if unknown.
    """

    most: int
    prompts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(slots=True)
class ExchangeStats:
    """Running totals that the metrics read. `seconds[phase]` holds the wall time of each call since the last drain."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"dispatch": [], "combine": []})
    bytes_sent: int = 0
    bytes_received: int = 0


class ExchangeSteps:
    """The life of steps in an exchange. This class serves exchanges whose device never waits for a peer.

    Order in an epoch: `Exchange.attach` opens it. Each step is `begin`, `set_rows`, the layers, `finish`; another step
    may begin before `finish`. `abort` ends the epoch. Any other order is an assertion. Before the first `attach` only
    `set_rows` and layers are legal; such launches move nothing, so that they can be captured or compiled.

    mesh: the mesh of the epoch, None before the first.
    rows: the last `set_rows` of this step.
    release_graphs: frees all captured graphs and raises nothing. With `ExchangeTraits.graphs_per_epoch`, their owner
        sets it, and `abort` calls it when no launch waits for a peer any more.
    """

    def __init__(self, on_rows: Callable[[PeerRows], None] = lambda rows: None) -> None:
        self.mesh: Mesh | None = None
        self.rows: PeerRows | None = None
        self.release_graphs: Callable[[], None] = lambda: None
        self._open_layer: int | None = None
        self._on_rows = on_rows
        self._first = self._last = self._finished = -1

    @property
    def step(self) -> int:
        """The step that began last in this epoch; -1 before the first."""
        return self._last

    def open_epoch(self, mesh: "Mesh") -> None:
        """Start over with the peers of a connected mesh; for `Exchange.attach`. Unfinished steps are dropped."""
        self.mesh, self.rows, self._open_layer = mesh, None, None
        self._first = self._last = self._finished = -1

    def begin(self, step: int) -> None:
        """Begin lockstep step `step`: on every rank the same number, one above the previous step of the epoch."""
        assert self.mesh is not None, f"step {step} begins before the exchange is attached to a mesh"
        assert self._last in (-1, step - 1), f"step {step} begins after step {self._last}"
        assert self._open_layer is None, f"step {step} begins before the combine of layer {self._open_layer}"
        self._first, self._last, self.rows = step if self._first < 0 else self._first, step, None
        self.mesh.step = step

    def set_rows(self, rows: PeerRows) -> None:
        """Set the rows that ranks bring to the exchanges launched from here on."""
        self.rows = rows
        self._on_rows(rows)

    def enter(self, layer: int) -> None:
        """Note a dispatch; for the exchange."""
        assert self._open_layer is None, f"dispatch of layer {layer} before the combine of layer {self._open_layer}"
        self._open_layer = layer

    def leave(self, layer: int) -> None:
        """Note the combine of the dispatch before it; for the exchange."""
        assert layer == self._open_layer, "combine takes the handle of the last dispatch, once"
        self._open_layer = None

    def finish(self, step: int, has_run: Callable[[], bool]) -> None:
        """Wait until the launches of a step have run, if its device may wait for peers.

        `has_run` answers without waiting. Steps are finished in order. Raises ExchangeError with the failure of this
        step or an earlier one that the device, or meanwhile the mesh, has found.
        """
        assert self._finished < step <= self._last, f"finish of step {step}: {self._finished} to {self._last} are open"
        self._finished = step

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """Wait before the host waits for its device in the middle of a step.

        Wait until `has_run`. Without it, wait until the device waits for no peer in the launches so far. Return at once
        if no device waits for peers. Raises ExchangeError as `finish`.
        """

    def abort(self, lost: Sequence[int] = ()) -> None:
        """End the epoch: every wait for peers on a device stops, until the next `attach`.

        Once the `lost` ranks are known, a second call gives back what this rank holds of them.
        """

    def before_capture(self) -> None:
        """Prepare to capture a graph while serving: wait for the device and tell peers that this host is busy.

        Raises ExchangeError as `drain`.
        """

    def replayed(self) -> None:
        """Note that a captured step, with the exchanges of all layers, was launched with the rows of `set_rows`."""


class Exchange(Protocol):
    """Moves token rows to the ranks that own their experts, and the experts' outputs back."""

    rank: int
    world_size: int
    stats: ExchangeStats

    @property
    def traits(self) -> ExchangeTraits: ...
    @property
    def steps(self) -> ExchangeSteps: ...

    def attach(self, mesh: "Mesh", placement: Placement) -> None:
        """Go on with the peers of another connected mesh and another placement; drop everything begun before.

        Raises ExchangeError naming an absent peer, ValueError for a placement that does not fit.
        """
        ...

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """Send the first T rows of x (contiguous, fp32 or bf16) to the owners of topk_ids [T, K] (global expert ids).

        T may be 0; an id of -1 goes nowhere. Rows [0, num_prompt) are prompt rows, the rest decode rows. A rank gets a
        token once, however many of the token's experts it owns. Raises ExchangeError on a lost, late or out-of-order
        peer.
        """
        ...

    def combine(self, expert_out: torch.Tensor | None, handle: Any) -> torch.Tensor:
        """Return expert_out [R, K, H] (rows of `Dispatched`, holes for experts elsewhere) to the tokens: [T, K, H].

        The result is unweighted, one row per (token, k), with a hole only for an id of -1. `expert_out` is None if the
        kernels wrote to `Dispatched.result_window`. The result may lie in memory that peers write to: it is valid until
        the next `dispatch` of this rank.
        """
        ...

    def close(self) -> None:
        """Release sockets and shared memory. Safe to call twice."""
        ...
