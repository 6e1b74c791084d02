"""What a captured step of several rows per sequence reads anew in every replay, and the rows of drafts behind it.

Rows of one sequence are decode rows at following positions. Where they begin, and which tokens they hold, the host need
not know yet: the step before has left both on the device (`Tails`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moeyard_kernels.cuda.staging import Staging
from moeyard_kernels.cuda.state_rows import StateRows
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.plan_parts import Rotations
from moeyard_kernels.types.prefill_plan import PrefillPlan
from moeyard_kernels.types.state_slots import StateSlots
from moeyard_kernels.types.step import ChunkRows

# What is staged beside the rest where sequences have slots of state.
_STATE = ("slots", "rings")


class FedRows(ChunkRows, Protocol):
    """A decode chunk; of one that is `fed` the tokens are zeros and `start` is the least, see `Tails`."""

    @property
    def fed(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySize:
    """Up to `sequences` sequences of up to `width` pages, `queries` rows of each. `peers`: with peers, how many rows
    each rank may bring to this rank's experts, itself too.
    """

    sequences: int
    queries: int
    width: int
    peers: int = 0

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.sequences * self.queries

    def holds(self, size: "VerifySize") -> bool:
        """Whether a step of that size runs in this one."""
        return (
            size.sequences <= self.sequences and size.queries <= self.queries and size.width <= self.width
        )  # fmt: skip


class Tails:
    """Where the latest step has left its sequences, by their chunks' places: state [max_sequences, 2 + num_drafts].

    Column 0: how many tokens of the chunk were accepted; then the last of these, and the drafts behind it.
    """

    def __init__(self, *, max_sequences: int, num_drafts: int, device: torch.device) -> None:
        self.state = torch.zeros(max_sequences, 2 + num_drafts, dtype=torch.int64, device=device)
        self.state[:, 0] = 1


class DraftRows:
    """A row per sequence at `positions` [B], written where `stored`. A `StepPlan`; whose tokens nobody reads."""

    num_prompt = 0
    sample_rows = None
    flat: PrefillPlan | None = None
    # What rows of one sequence write, the others read.
    lone_rows = False

    def __init__(self, inputs: "VerifyInputs", positions: torch.Tensor, stored: torch.Tensor) -> None:
        self.num_tokens = self.num_rows = self.num_sampled = inputs.size.sequences
        self.positions = self.token_ids = positions
        self.entries = torch.where(stored, inputs.entries_at(positions[:, None])[:, 0], -1)
        self.decode = inputs.tables(positions + 1)
        self.paged: dict[int | None, PrefillPlan] = {}
        self.rotation = Rotations(positions)


class VerifyInputs:
    """The rows of a step of at most `size`, row b * queries + j being row j of sequence b. A `StepPlan`.

    Sequences that a step has not are copies of its first one, and rows that a sequence has not are copies of its last:
    they compute the same bits, choose the same experts and store nothing. No position reaches `limit`.

    tokens: [B, Q], what the rows read; start: [B], where they begin; read: [B, 1 + Q] both, for the host. state: how
    rows reach state per sequence, where `slots` was asked for; there copies compute nothing of their own, but take the
    results of those that they are of.
    """

    num_prompt = 0
    sample_rows = None
    flat: PrefillPlan | None = None
    # What rows of one sequence write, the others read.
    lone_rows = False

    def __init__(
        self, size: VerifySize, *, page_size: int, windows: Iterable[int | None], limit: int, device: torch.device,
        slots: bool = False,
    ) -> None:  # fmt: skip
        self.size, self._page_size, self._windows, self._limit = size, page_size, tuple(windows), limit
        self.num_tokens = self.num_rows = self.num_sampled = size.rows
        self.paged: dict[int | None, PrefillPlan] = {}
        self.state: StateRows | None = None
        self._slots = slots
        long = (torch.int64, (size.sequences,))
        self._staging = Staging(
            {"token_ids": (torch.int64, (size.sequences, size.queries)), "starts": long, "rows": long, "feed": long,
             "caps": long, "real": long, "dropped": long, "table": (torch.int32, (size.sequences, size.width)),
             **dict.fromkeys(_STATE if slots else (), long)},
            device,
        )  # fmt: skip
        self._on = self._staging.on_device
        self._numbers = torch.arange(size.queries, device=device)
        self._firsts = torch.arange(0, size.rows, size.queries, device=device)[:, None]
        # A step of nothing, until there is one: what is captured runs once for its kernels to be compiled.
        host = self._staging.begin()
        host["rows"][:] = host["caps"][:] = 1
        host["feed"][:] = -1
        if slots:
            host["rings"][:] = 1
        self._staging.send()

    def fill(self, chunks: Sequence[FedRows]) -> None:
        """Take decode chunks that fit, at least one."""
        host, count = self._staging.begin(), len(chunks)
        host["rows"][:count] = [len(chunk.token_ids) for chunk in chunks]
        host["starts"][:count] = [chunk.start for chunk in chunks]
        host["feed"][:count] = [-1 if chunk.fed is None else chunk.fed for chunk in chunks]
        host["dropped"][:count] = [chunk.dropped for chunk in chunks]
        host["caps"][:count] = [
            min(len(chunk.pages) * self._page_size + chunk.dropped, self._limit) for chunk in chunks
        ]  # fmt: skip
        for row, chunk in enumerate(chunks):
            host["token_ids"][row, : len(chunk.token_ids)] = chunk.token_ids
            host["table"][row, : len(chunk.pages)] = chunk.pages
        host["real"][:] = np.arange(self.size.sequences) < count
        if self._slots:
            host["slots"][:count] = [chunk.state_slot for chunk in chunks]
            host["rings"][:count] = [chunk.state_ring for chunk in chunks]
        of_state = _STATE if self._slots else ()
        for name in ("rows", "starts", "feed", "caps", "dropped", "token_ids", "table", *of_state):
            host[name][count:] = host[name][0]
        self._staging.send()

    def begin(self, tails: Tails) -> None:
        """The first launches of a step, to be captured with it: its tokens and places, nothing looked up yet."""
        on, fed = self._on, self._on["feed"] >= 0
        state = tails.state.index_select(0, on["feed"].clamp(min=0))
        self.start = on["starts"] + torch.where(fed, state[:, 0] - 1, 0)
        place = torch.minimum(self._numbers, on["rows"][:, None] - 1)
        self.tokens = torch.where(fed[:, None], state.gather(1, place + 1), on["token_ids"].gather(1, place))
        self.read = torch.cat((self.start[:, None], self.tokens), 1)
        positions = self.start[:, None] + place
        self.positions, self.token_ids = positions.flatten(), self.tokens.flatten()
        stored = (self._numbers < on["rows"][:, None]) & (on["real"][:, None] > 0)
        self.entries = torch.where(stored, self.entries_at(positions), -1).flatten()
        self.decode = self.tables(positions + 1)
        self.rotation = Rotations(self.positions)
        if self._slots:
            self.state = self._state_rows(place, stored)

    def _state_rows(self, place: torch.Tensor, stored: torch.Tensor) -> StateRows:
        """Of the rows at `place` [B, Q] of their sequences, which leave a state behind them where `stored`."""
        slots, rings, real = (self._on[name][:, None] for name in ("slots", "rings", "real"))
        # As `slot_behind` has them: ahead of row 0, and behind each row.
        start = self.start[:, None]
        read = torch.where(real > 0, slots + (start - 1) % rings, -1).flatten()
        write = torch.where(stored, slots + (start + self._numbers) % rings, -1)
        stand_in = place + torch.where(real > 0, self._firsts, 0)
        return StateRows(chunks=None, slots=StateSlots(read=read, write=write), stand_in=stand_in.flatten())

    def accept(self, ids: torch.Tensor, tails: Tails) -> torch.Tensor:
        """Of ids [rows], chosen for the rows, keep those whose rows read the right tokens. How many, [B]: 1 or more.

        Row 0 always did, row j did if the drafts up to it were what rows 0 to j - 1 yielded.
        """
        ids = ids.view(self.tokens.shape)
        right = (ids[:, :-1] == self.tokens[:, 1:]) & (self._numbers[1:] < self._on["rows"][:, None])
        count = 1 + right.long().cumprod(1).sum(1)
        state = tails.state[: self.size.sequences]
        state[:, 0] = count
        state[:, 1] = ids.gather(1, count[:, None] - 1)[:, 0]
        # A row that no draft is made for reads token 0, as the host takes it to.
        state[:, 2:] = 0
        return count

    def draft_rows(self, positions: torch.Tensor) -> DraftRows:
        """Rows at positions [B]; a position without a page is written nowhere."""
        stored = (positions < self._on["caps"]) & (self._on["real"] > 0)
        return DraftRows(self, torch.minimum(positions, self._on["caps"] - 1), stored)

    def entries_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Of positions [B, n]: page * page_size + offset, [B, n] int64."""
        places = positions - self._on["dropped"][:, None]
        pages = self._on["table"].gather(1, places // self._page_size).long()
        return pages * self._page_size + places % self._page_size

    def tables(self, ends: torch.Tensor) -> dict[int | None, DecodeTables]:
        """Per sliding window, the pages and lengths of what rows see that end before positions [B] or [B, Q]."""
        dropped = self._on["dropped"]
        kv_lens = (ends - (dropped if ends.dim() == 1 else dropped[:, None])).int()
        return {
            window: DecodeTables(
                page_table=self._on["table"], kv_lens=kv_lens, page_size=self._page_size, window=window
            )
            for window in self._windows
        }
