"""Decode rows of a captured step whose tokens and positions are on the device: several rows per sequence.

Rows of one sequence have consecutive positions. The host need not know yet where they begin or which tokens they read:
the step before leaves both on the device (`Tails`).
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from moeyard_kernels.cuda.output_rows import OutputWave
from moeyard_kernels.cuda.state_rows import Fields, StateRows
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.plan_parts import Rotations
from moeyard_kernels.types.prefill_plan import PrefillPlan
from moeyard_kernels.types.state_slots import StateSlots
from moeyard_kernels.types.step import ChunkRows
from moeyard_kernels.types.step_size import StepSize

# Staged if sequences have slots of recurrent state; of rows by position, only the slots are.
_STATE = ("slots", "rings")


class Tails:
    """The end of the latest step's sequences, in the order of its chunks: state [sequences, 2 + num_drafts].

    Column 0 counts the accepted tokens of the chunk. The last of these follows, then the drafts. Every position is
    below `limit`.
    """

    def __init__(self, *, max_sequences: int, num_drafts: int, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.state = torch.zeros(max_sequences, 2 + num_drafts, dtype=torch.int64, device=device)
        self.state[:, 0] = 1


class DraftRows:
    """Rows for drafts at `positions` [B], one per sequence, or [B, n], written at `entries` [B n], -1 for none.

    A `StepPlan`. Without `token_ids` [B n] its tokens are never read.
    """

    num_prompt = 0
    compressed_prompts = None
    sample_rows = None
    flat: PrefillPlan | None = None
    # Rows of one sequence read each other's keys.
    lone_rows = False

    def __init__(
        self,
        rows: "VerifiedRows",
        positions: torch.Tensor,
        entries: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        self.num_tokens = self.num_rows = self.num_sampled = positions.numel()
        self.positions, self.entries = positions.flatten(), entries
        self.token_ids = self.positions if token_ids is None else token_ids
        self.decode = rows.tables(positions + 1)
        self.paged: dict[int | None, PrefillPlan] = {}
        self.rotation = Rotations(self.positions)
        self.outputs = rows.outputs(self.positions, self.entries)


class VerifiedRows:
    """Row b * queries + j is row j of sequence b.

    Missing sequences are copies of the first one, and missing rows of a sequence are copies of its last row. They
    compute the same bits, choose the same experts and store nothing. With state `slots`, copies take the results of
    their originals.

    tokens: [B, Q], the tokens that rows read. start: [B], their first positions. read: [B, 1 + Q], both, for the host.
    """

    def __init__(
        self,
        size: StepSize,
        tails: Tails,
        *,
        page_size: int,
        windows: Iterable[int | None],
        slots: bool,
        compressed: bool = False,
    ) -> None:
        self.size, self.tails = size, tails
        self._page_size, self._windows, self._slots, self._compressed = page_size, tuple(windows), slots, compressed
        self._state = _STATE if slots else _STATE[:1] if compressed else ()
        device = tails.state.device
        self._numbers = torch.arange(size.queries, device=device)
        self._firsts = torch.arange(0, size.decode, size.queries, device=device)[:, None]

    def fields(self) -> Fields:
        """Return the fields of the step's staging."""
        size, long = self.size, (torch.int64, (self.size.sequences,))
        return {
            "token_ids": (torch.int64, (size.sequences, size.queries)),
            "table": (torch.int32, (size.sequences, size.width)),
            **dict.fromkeys(("starts", "rows", "feed", "caps", "real", "dropped"), long),
            **dict.fromkeys(self._state, long),
        }

    def bind(self, on_device: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors of the fields."""
        self._on = on_device

    def fill(self, host: Mapping[str, np.ndarray], chunks: Sequence[ChunkRows]) -> None:
        """Take decode chunks that fit. Without chunks the rows are those of an empty step."""
        count, of_state = len(chunks), self._state
        if not count:
            host["rows"][:] = host["caps"][:] = 1
            host["feed"][:] = -1
            if self._slots:
                host["rings"][:] = 1
            return
        host["rows"][:count] = [len(chunk.token_ids) for chunk in chunks]
        host["starts"][:count] = [chunk.start for chunk in chunks]
        host["feed"][:count] = [-1 if chunk.fed is None else chunk.fed for chunk in chunks]
        host["dropped"][:count] = [chunk.dropped for chunk in chunks]
        host["caps"][:count] = [
            min(len(chunk.pages) * self._page_size + chunk.dropped, self.tails.limit) for chunk in chunks
        ]
        for row, chunk in enumerate(chunks):
            host["token_ids"][row, : len(chunk.token_ids)] = chunk.token_ids
            host["table"][row, : len(chunk.pages)] = chunk.pages
        host["real"][:] = np.arange(self.size.sequences) < count
        if of_state:
            host["slots"][:count] = [chunk.state_slot for chunk in chunks]
        if self._slots:
            host["rings"][:count] = [chunk.state_ring for chunk in chunks]
        for name in ("rows", "starts", "feed", "caps", "dropped", "token_ids", "table", *of_state):
            host[name][count:] = host[name][0]

    def begin(self) -> StateRows | None:
        """Launch the preparation of a step, to be captured with it: its tokens and positions. Return its state rows."""
        on, fed = self._on, self._on["feed"] >= 0
        state = self.tails.state.index_select(0, on["feed"].clamp(min=0))
        self.start = on["starts"] + torch.where(fed, state[:, 0] - 1, 0)
        place = torch.minimum(self._numbers, on["rows"][:, None] - 1)
        self.tokens = torch.where(fed[:, None], state.gather(1, place + 1), on["token_ids"].gather(1, place))
        self.read = torch.cat((self.start[:, None], self.tokens), 1)
        self.positions = self.start[:, None] + place
        stored = (self._numbers < on["rows"][:, None]) & (on["real"][:, None] > 0)
        self.entries = torch.where(stored, self.entries_at(self.positions), -1).flatten()
        return self._state_rows(place, stored) if self._slots else None

    def _state_rows(self, place: torch.Tensor, stored: torch.Tensor) -> StateRows:
        """Return the slots of the rows at `place` [B, Q] of their sequences; rows leave a state where `stored`."""
        slots, rings, real = (self._on[name][:, None] for name in ("slots", "rings", "real"))
        # The slots before row 0 and after each row, as in `slot_behind`.
        start = self.start[:, None]
        read = torch.where(real > 0, slots + (start - 1) % rings, -1).flatten()
        write = torch.where(stored, slots + (start + self._numbers) % rings, -1)
        stand_in = place + torch.where(real > 0, self._firsts, 0)
        return StateRows(chunks=None, slots=StateSlots(read=read, write=write), stand_in=stand_in.flatten())

    def accept(self, ids: torch.Tensor) -> torch.Tensor:
        """Keep the tokens of ids [rows] whose rows read the right tokens. Return how many, [B] >= 1. Row 0 always read
        the right one. Row j did if the drafts up to it were the tokens of rows 0 to j - 1."""
        ids = ids.view(self.tokens.shape)
        right = (ids[:, :-1] == self.tokens[:, 1:]) & (self._numbers[1:] < self._on["rows"][:, None])
        count = 1 + right.long().cumprod(1).sum(1)
        state = self.tails.state[: self.size.sequences]
        state[:, 0] = count
        state[:, 1] = ids.gather(1, count[:, None] - 1)[:, 0]
        # A row without a draft reads token 0, as the host assumes.
        state[:, 2:] = 0
        return count

    def draft_rows(self, positions: torch.Tensor) -> DraftRows:
        """Return rows at positions [B]; a position without a page is not stored."""
        stored = (positions < self._on["caps"]) & (self._on["real"] > 0)
        positions = torch.minimum(positions, self._on["caps"] - 1)
        return DraftRows(self, positions, torch.where(stored, self.entries_at(positions[:, None])[:, 0], -1))

    def block_rows(self, ends: torch.Tensor, *, size: int, noise_token: int) -> tuple[DraftRows, torch.Tensor]:
        """Return blocks of `size` rows from positions `ends` [B] on, and which of them end below the limit, bool [B].

        A block begins with the last accepted token. It has no pages, so its entries are 0, or -1 in a row that stores
        nothing. A block that does not fit stores nothing, and its results are undefined.
        """
        limit, count = self.tails.limit, ends.shape[0]
        fits = ends + size <= limit
        positions = torch.clamp(ends, max=limit - size)[:, None] + torch.arange(size, device=ends.device)
        tokens = torch.full_like(positions, noise_token)
        tokens[:, 0] = self.tails.state[:count, 1]
        stored = fits & (self._on["real"] > 0)
        entries = torch.where(stored[:, None].expand_as(positions), 0, -1)
        return DraftRows(self, positions, entries.flatten(), tokens.flatten()), fits

    def entries_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return page * page_size + offset of positions [B, n], as [B, n] int64."""
        places = positions - self._on["dropped"][:, None]
        pages = self._on["table"].gather(1, places // self._page_size).long()
        return pages * self._page_size + places % self._page_size

    def outputs(self, positions: torch.Tensor, places: torch.Tensor) -> tuple[OutputWave, ...]:
        """Return the rows of compressed attention at positions and places [B Q] or [B]; none without it."""
        if not self._compressed:
            return ()
        on = self._on
        rows = CompressedRows(
            positions=positions,
            places=places,
            slots=on["slots"],
            page_table=on["table"],
            page_size=self._page_size,
        )
        return (OutputWave(at=None, rows=rows),)

    def tables(self, ends: torch.Tensor) -> dict[int | None, DecodeTables]:
        """Return, per sliding window, the pages and lengths that rows see which end before positions [B] or [B, Q]."""
        dropped = self._on["dropped"]
        kv_lens = (ends - (dropped if ends.dim() == 1 else dropped[:, None])).int()
        table = self._on["table"]
        return {
            window: DecodeTables(page_table=table, kv_lens=kv_lens, page_size=self._page_size, window=window)
            for window in self._windows
        }
