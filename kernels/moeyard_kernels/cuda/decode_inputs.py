"""What a captured decode step reads anew in every replay, in one block of memory that one copy fills."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.plan_parts import Rotations
from moeyard_kernels.types.step import ChunkRows

# Staging blocks on the host: while one is still being copied the next is filled.
_STAGES = 2


class DecodeInputs:
    """`rows` decode rows over tables of `width` pages. A `StepPlan` for chunks of one row, each of which is sampled.

    Rows that a step has not are copies of its first one that store nothing: they compute the same bits, choose the same
    experts and so read no weights of their own. token_ids: those of the host, or of `last_ids` (what the step before
    chose, by sampled row) where the host does not know them yet.
    """

    num_prompt = 0
    sample_rows = None

    def __init__(
        self, *, rows: int, width: int, page_size: int, windows: Iterable[int | None], last_ids: torch.Tensor
    ) -> None:
        device = last_ids.device
        self.num_tokens = self.num_rows = self.num_sampled = rows
        self._page_size, self._last_ids = page_size, last_ids
        # Four int64 and one int32 per row, then the table; two int32 to a word.
        words = 4 * rows + -(-rows // 2) + -(-rows * width // 2)
        self._block = torch.zeros(words, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._stages = [torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(_STAGES)]
        self._host = [_Views(stage.numpy(), rows, width) for stage in self._stages]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES)] if pinned else None
        self._turn = 0
        self._host_ids, self.positions, self.entries, self._feed = self._block[: 4 * rows].split(rows)
        halves = self._block[4 * rows :].view(torch.int32)
        lens, table = halves[:rows], halves[2 * -(-rows // 2) :][: rows * width].view(rows, width)
        self.decode = {
            window: DecodeTables(page_table=table, kv_lens=lens, page_size=page_size, window=window)
            for window in windows
        }
        # A sequence of one position, until a step fills them.
        lens.fill_(1)
        self.token_ids = self._host_ids
        self.rotation = Rotations(self.positions)

    def begin(self) -> None:
        """The first launches of a step, to be captured with it: its tokens, and nothing looked up yet."""
        before = self._last_ids.index_select(0, self._feed.clamp(min=0))
        self.token_ids = torch.where(self._feed < 0, self._host_ids, before)
        self.rotation = Rotations(self.positions)

    def fill(self, chunks: Sequence[ChunkRows], feed: Sequence[int]) -> None:
        """Take a step's chunks, 1 to `rows` of them; feed[i] is a row of `last_ids`, or -1 where the token is known."""
        self._turn = (self._turn + 1) % _STAGES
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        self._host[self._turn].fill(chunks, feed, self._page_size)
        self._block.copy_(self._stages[self._turn], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


class _Views:
    """The fields of one staging block."""

    def __init__(self, block: np.ndarray, rows: int, width: int) -> None:
        self._ids, self._positions, self._entries, self._feed = np.split(block[: 4 * rows], 4)
        halves = block[4 * rows :].view(np.int32)
        self._lens, self._table = halves[:rows], halves[2 * -(-rows // 2) :][: rows * width].reshape(rows, width)

    def fill(self, chunks: Sequence[ChunkRows], feed: Sequence[int], page_size: int) -> None:
        count = len(chunks)
        for row, chunk in enumerate(chunks):
            self._table[row, : len(chunk.pages)] = chunk.pages
        starts = np.array([chunk.start for chunk in chunks])
        self._ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        self._positions[:count], self._lens[:count], self._feed[:count] = starts, starts + 1, feed
        pages = self._table[np.arange(count), starts // page_size]
        self._entries[:count] = pages * page_size + starts % page_size
        for field in (self._ids, self._positions, self._lens, self._feed, self._table):
            field[count:] = field[0]
        self._entries[count:] = -1
