"""Page tables and lengths of a step's decode rows. A captured step reads them again in every replay."""

from dataclasses import dataclass, replace

import torch

from moeyard_kernels.types.footprint import CAPTURED, SplitSums, num_splits
from moeyard_kernels.types.footprint import GQA_SPLIT as GQA_SPLIT
from moeyard_kernels.types.footprint import mla_split as mla_split

# Attention reads keys in blocks of this many positions, counted from position 0. A block's partial result is the same
# in every batch.
BLOCK = 64
# Queries of one sequence that may share a step (drafts to verify, positions to recompute).
MAX_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Pages and lengths of one step, on the cache's device. The contents may change between replays.

    page_table: [B, max_pages] int32. Row b lists the pages of sequence b in order. Entries past its lengths may name
    any page. kv_lens: [B] or [B, Q] int32, Q at most 16, none above max_pages * page_size. Query j of sequence b is row
    b Q + j of the input and attends to positions [0, kv_lens[b, j]), or to the last `window` of them. A length of 0
    marks a padding row: its output is zeros and its log-sum-exp -inf. Raises ValueError naming what does not fit.

    On a GPU a call allocates fp32 partial results for the whole width of the table (`SplitSums`), so keep tables
    narrow: capture graphs for a few widths. `most` bounds them in bytes, but one sequence always fits. Above the bound,
    sequences run in turns (`in_turn`) with the same bits.
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
        """Positions of the longest sequence that the table can hold."""
        return self.page_table.shape[1] * self.page_size

    def max_splits(self, split: int) -> int:
        """Return the number of splits of `split` positions in the longest sequence of the table, at least 1."""
        return num_splits(self.num_positions, split)

    def turns(self, sums: SplitSums) -> list[tuple[slice, "DecodeTables"]]:
        """Return the rows of each turn and their tables, such that each turn fits the memory for `sums`."""
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
