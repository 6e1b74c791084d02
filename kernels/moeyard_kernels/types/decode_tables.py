"""Which cache pages a step's decode rows read, as device tensors that a captured step reads anew in every replay."""

from dataclasses import dataclass, replace

import torch

from moeyard_kernels.types.footprint import CAPTURED, SplitSums, num_splits
from moeyard_kernels.types.footprint import GQA_SPLIT as GQA_SPLIT
from moeyard_kernels.types.footprint import mla_split as mla_split

# Keys are attended to in blocks of this many positions, counted from position 0, whatever the load: a block is the
# unit whose partial result is the same in every batch.
BLOCK = 64
# Queries of one sequence that may share a step (drafts to verify, positions to recompute).
MAX_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Pages and lengths of one step as tensors of the cache's device; their contents may change between replays.

    page_table: [B, max_pages] int32; row b lists the pages of sequence b in order, read as far as its lengths reach;
    entries past that name any page.
    kv_lens: [B] or [B, Q] int32, Q at most 16: query j of sequence b attends to positions [0, kv_lens[b, j]), or the
    last `window` of them. 0 is a padding row: its output is zeros and its log-sum-exp -inf. Lengths may not exceed
    max_pages * page_size. Row b Q + j of the attention's input is query j of sequence b. Raises ValueError naming what
    does not fit.

    On a GPU a call allocates fp32 partial results for as many splits as the table is wide (`SplitSums`), but no more
    than `most` bytes, or one sequence's: sequences take turns (`in_turn`), the same bits. Keep tables narrow, say by a
    few widths to capture graphs for.
    """

    page_table: torch.Tensor
    kv_lens: torch.Tensor
    page_size: int
    window: int | None = None
    most: int = CAPTURED
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.page_size < 1 or BLOCK % self.page_size:
            raise ValueError(f"page_size {self.page_size} does not divide {BLOCK}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} is not positive")
        table, lens = self.page_table, self.kv_lens
        if table.dim() != 2 or table.dtype != torch.int32 or not table.is_contiguous():
            raise ValueError(
                f"page_table: expected contiguous int32 [sequences, pages], got {table.dtype} {list(table.shape)}"
            )
        if lens.dim() not in (1, 2) or lens.shape[0] != table.shape[0] or lens.dtype != torch.int32:
            raise ValueError(
                f"kv_lens: expected int32 [{table.shape[0]}] or [{table.shape[0]}, queries], got {lens.dtype} "
                f"{list(lens.shape)}"
            )
        if not 1 <= self.num_queries <= MAX_QUERIES or not lens.is_contiguous():
            raise ValueError(f"kv_lens: {list(lens.shape)}, expected contiguous, 1 to {MAX_QUERIES} queries each")
        if lens.device != table.device:
            raise ValueError(f"kv_lens is on {lens.device}, page_table on {table.device}")

    @property
    def num_sequences(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_queries(self) -> int:
        """Queries per sequence."""
        return self.kv_lens.shape[1] if self.kv_lens.dim() == 2 else 1

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_queries

    @property
    def num_positions(self) -> int:
        """Of the longest sequence that the table can hold."""
        return self.page_table.shape[1] * self.page_size

    def max_splits(self, split: int) -> int:
        """How many splits of `split` positions the longest sequence that the table can hold has, at least 1."""
        return num_splits(self.num_positions, split)

    def turns(self, sums: SplitSums) -> list[tuple[slice, "DecodeTables"]]:
        """Which rows, and the tables of their sequences, take turns in what memory there is for `sums`."""
        count, queries = self.num_sequences, self.num_queries
        each = sums.together(count, queries, self.num_positions, self.most)
        if each >= count:
            return [(slice(0, count * queries), self)]
        parts = [slice(first, first + each) for first in range(0, count, each)]
        return [
            (
                slice(part.start * queries, part.stop * queries),
                replace(self, page_table=self.page_table[part], kv_lens=self.kv_lens[part], in_turn=True),
            )
            for part in parts
        ]
