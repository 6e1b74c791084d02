"""The token exchange between ranks: one interface for every transport.

A step's chain of collectives is fixed by the model alone: one `dispatch` and one `combine` per MoE layer, on every
rank, in layer order, also when a rank has no token. All transports return the same bits.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What a rank received for its experts in one layer.

    rows: [R, H] the distinct token rows, in order of source rank, then of the source's own row order. Read-only, valid
        until the `combine` of the same layer.
    row_of_pair: [P] int64, the row of each (token, k) pair, pairs grouped by local expert in ascending order and
        within an expert by source rank, token, k.
    num_tokens_per_expert: one count per local expert (length = experts this rank owns), sum = P.
    num_decode_per_expert: how many of those pairs belong to decode rows of their source.
    handle: opaque; `combine` consumes it.
    """

    rows: torch.Tensor
    row_of_pair: torch.Tensor
    num_tokens_per_expert: tuple[int, ...]
    num_decode_per_expert: tuple[int, ...]
    handle: Any


@dataclass(slots=True)
class ExchangeStats:
    """Running totals that the metrics read. `seconds[phase]` holds the wall time of each call since the last drain."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"dispatch": [], "combine": []})
    bytes_sent: int = 0
    bytes_received: int = 0


class ExchangeError(RuntimeError):
    """The step is poisoned; the message names rank, step, layer and phase. The fleet cannot go on."""


class Exchange(Protocol):
    """Moves token rows to the ranks that own their experts and the experts' outputs back."""

    rank: int
    world_size: int
    stats: ExchangeStats

    def begin_step(self, step: int) -> None:
        """Start lockstep step `step` (every rank calls it with the same number, one higher each time)."""
        ...

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prefill_tokens: int) -> Dispatched:
        """Send x [T, H] (contiguous, fp32 or bf16) to the owners of topk_ids [T, K] (int64, global expert ids).

        T may be 0. Rows [0, num_prefill_tokens) are prompt rows, the rest decode rows. A token goes to a rank once,
        however many of its experts live there. Raises ExchangeError on a lost, late or out-of-order peer.
        """
        ...

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Return expert_out [P, H] (pair order of `Dispatched`) home: [T, K, H], unweighted, one row per (token, k).

        The result may lie in memory that peers write to: it is valid until this rank's next `dispatch`.
        """
        ...

    def close(self) -> None:
        """Release sockets and shared memory. Safe to call twice."""
        ...
