"""The token exchange between ranks: one interface for every transport.

A step's chain of collectives is fixed by the model alone: one `dispatch` and one `combine` per MoE layer, on every
rank, in layer order, also when a rank has no token. All transports return the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from moeyard_kernels.types.fetch_window import FetchWindow
from moeyard_kernels.types.gate import TokenChoice
from moeyard_kernels.types.peer_window import PeerWindow
from moeyard_worker.config.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What a rank received for its experts in one layer, on the device of the rows.

    rows: [R, H] token rows, in an order that the exchange chooses and that changes no bit. Read-only, valid until the
        `combine` of the same layer. Those of which no expert is here hold anything.
    experts: [R, K] the local id of each (row, k)'s expert, -1 where it is elsewhere or the row is padding.
    prompt: [R] bool, which rows are prompt rows of their source; None when none is, or it is not told.
    handle: opaque; `combine` consumes it.
    one_in: of so many (row, k) at best one has its expert here.
    fetch: where ranks read for each other what they miss of their experts, for whoever computes here; else None.
    choice: of one row, where whoever computes is to choose its experts; they are written into `experts` then.
    home: where whoever computes may put the results itself; else None.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    prompt: torch.Tensor | None
    handle: Any
    one_in: int = 1
    fetch: FetchWindow | None = None
    choice: TokenChoice | None = None
    home: PeerWindow | None = None


@dataclass(frozen=True, slots=True)
class PeerRows:
    """What ranks bring to the exchanges of a step: `most`, with padding, of the rank that brings most, and the prompt
    rows of each (none: of no rank). `counts`: the rows of each, with padding, 0 of one that is away (none: not told).
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


class ExchangeError(RuntimeError):
    """The step is poisoned; the message names rank, step, layer and phase. The fleet cannot go on."""


class OfEpoch(Protocol):
    """What captured steps are to an exchange that makes what they hold of it anew in every epoch.

    rooms: how many rows of each rank one of them has room for, ascending. A step without prompts has the first that is
        large enough for the rank with most, on all ranks, captured or not; where none is, exactly what ranks bring.
    forget: set by whoever captures; called when the epoch has ended, and the device waits for peers no more unless it
        hangs. It lets them all go, and raises nothing.
    """

    rooms: tuple[int, ...]
    forget: Callable[[], None]

    def capturing(self) -> None:
        """A step is about to be captured: wait, where peers are watched, until the device waits for none of them, and
        tell them that this host is busy. Raises ExchangeError as `Exchange.drain`."""
        ...

    def replayed(self) -> None:
        """A captured step was launched, with the exchanges of all layers."""
        ...


class Exchange(Protocol):
    """Moves token rows to the ranks that own their experts and the experts' outputs back."""

    rank: int
    world_size: int
    stats: ExchangeStats
    # Whether a CUDA graph can hold it: it moves rows without the host.
    captures: bool
    # Whether what is launched before the first `attach` takes no part: so its kernels are compiled ahead.
    warms: bool
    # Whether a rank has room for so many rows of each, whoever brings fewer: `expect` says how many.
    places_rows: bool
    # Whether rows stay where they are and ids are not read: so these may be written by who computes the experts.
    stays: bool

    @property
    def of_epoch(self) -> OfEpoch | None:
        """Where captured steps are one epoch's, what they are to it; None where they outlive it, or there are none."""
        ...

    def attach(self, mesh: Any, placement: Placement) -> None:
        """Go on over another connected `Mesh` by another placement; what was begun over the one before is given up."""
        ...

    def begin_step(self, step: int) -> None:
        """Start lockstep step `step` (every rank calls it with the same number, one higher each time)."""
        ...

    def expect(self, rows: PeerRows) -> None:
        """What ranks bring to the exchanges that are launched from here on; who learns it in time needs no word."""
        ...

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        """Wait until what was launched of a step has run, where it may wait for peers on its device.

        `has_run` says so without waiting. Raises ExchangeError with what the device, or the mesh meanwhile, found of
        this step or one before it. Steps are finished in order.
        """
        ...

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """Before the host waits for its device in the midst of a step: wait until `has_run`, or, without it, until the
        device waits for no peer in what was launched so far.

        Where no device waits for peers nothing is waited for. Raises ExchangeError as `finish_step`.
        """
        ...

    def abort(self, lost: Sequence[int] = ()) -> None:
        """The epoch has ended: whatever waits for peers on a device stops waiting, until `attach`. Once it is known who
        is `lost`, what is held of these is given back, as others take their place."""
        ...

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """Send the first T rows of x (contiguous, fp32 or bf16) to the owners of topk_ids [T, K] (global expert ids).

        T may be 0; an id of -1 goes nowhere. Rows [0, num_prompt) are prompt rows, the rest decode rows. A token goes
        to a rank once, however many of its experts live there. Raises ExchangeError on a lost, late or out-of-order
        peer.
        """
        ...

    def combine(self, expert_out: torch.Tensor | None, handle: Any) -> torch.Tensor:
        """Return expert_out [R, K, H] (rows of `Dispatched`, holes where the expert is elsewhere) home: [T, K, H].

        Unweighted, one row per (token, k); a hole only where the id was -1. None where they have been put there
        (`Dispatched.home`). What is returned may lie in memory that peers write to: it is valid until this rank's next
        `dispatch`.
        """
        ...

    def close(self) -> None:
        """Release sockets and shared memory. Safe to call twice."""
        ...
