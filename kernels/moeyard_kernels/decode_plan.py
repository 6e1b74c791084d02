"""What the decode attentions of all layers of one step share: which cache pages each row reads, and the mask.

On a CPU that is a `DecodePlan`, made from lengths known to the host. On a GPU it is `DecodeTables`, device tensors that
a captured step reads anew in every replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Keys are attended to in blocks of this many positions, counted from position 0, whatever the load: a block is the
# unit whose partial result is the same in every batch.
BLOCK = 64
# Over DecodeTables the keys are cut into splits at multiples of so many positions, by latent and by grouped attention.
MLA_SPLIT = 1024
GQA_SPLIT = 512
# Queries of one sequence that may share a step (drafts to verify, positions to recompute).
MAX_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The flat list of n (row, block) pairs of one step, rows ascending and blocks ascending within a row.

    page_ids: [n * BLOCK / page_size] int64, the pages of each block in order; past a row's end its last page repeats.
    row_of_block: [n] int64.
    blocks_of_row: [num_rows * max_blocks] int64 into the n pairs; short rows repeat their first block.
    mask: [n, 1, BLOCK] fp32, 0 where the row sees the key and -inf elsewhere. Every block has a key that is seen.
    """

    num_rows: int
    page_size: int
    page_ids: torch.Tensor
    row_of_block: torch.Tensor
    blocks_of_row: torch.Tensor
    mask: torch.Tensor


def plan_decode(
    page_table: torch.Tensor, kv_lens: Sequence[int], *, page_size: int, window: int | None = None
) -> DecodePlan:
    """Plan one step's decode rows; row b attends to positions [0, kv_lens[b]), or the last `window` of them.

    page_table: [B, max_pages] int64 (CPU); only the pages that hold positions below kv_lens[b] are read. `page_size`
    divides 64. Raises ValueError naming what does not fit.
    """
    if page_size < 1 or BLOCK % page_size:
        raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is not positive")
    num_rows = len(kv_lens)
    if page_table.dim() != 2 or page_table.shape[0] != num_rows or page_table.dtype != torch.int64:
        raise ValueError(
            f"page_table: expected int64 [{num_rows}, pages], got {page_table.dtype} {tuple(page_table.shape)}"
        )
    if num_rows == 0:
        index = torch.zeros(0, dtype=torch.int64)
        return DecodePlan(
            num_rows=0, page_size=page_size, page_ids=index, row_of_block=index, blocks_of_row=index,
            mask=torch.zeros(0, 1, BLOCK),
        )  # fmt: skip
    lens = np.asarray(kv_lens, dtype=np.int64)
    if lens.min() < 1 or lens.max() > page_table.shape[1] * page_size:
        raise ValueError(f"kv_lens: {min(kv_lens)} to {max(kv_lens)}, outside 1 to {page_table.shape[1] * page_size}")
    lows = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
    first = lows // BLOCK
    counts = (lens + (BLOCK - 1)) // BLOCK - first
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(num_rows), counts)
    block = np.arange(row.size) - (starts - first)[row]

    pages_per_block = BLOCK // page_size
    page = block[:, None] * pages_per_block + np.arange(pages_per_block)
    page = np.minimum(page, ((lens - 1) // page_size)[row][:, None])
    position = block[:, None] * BLOCK + np.arange(BLOCK)
    seen = position < lens[row][:, None]
    if window is not None:
        seen &= position >= lows[row][:, None]
    mask = np.where(seen, np.float32(0), np.float32("-inf"))
    nth = np.arange(counts.max())
    blocks_of_row = starts[:, None] + np.where(nth < counts[:, None], nth, 0)
    return DecodePlan(
        num_rows=num_rows,
        page_size=page_size,
        page_ids=torch.from_numpy(page_table.numpy()[row[:, None], page].ravel()),
        row_of_block=torch.from_numpy(row),
        blocks_of_row=torch.from_numpy(blocks_of_row.ravel()),
        mask=torch.from_numpy(mask[:, None, :]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Pages and lengths of one step as tensors of the cache's device; their contents may change between replays.

    page_table: [B, max_pages] int32; row b lists the pages of sequence b in order, read as far as its lengths reach;
    entries past that name any page.
    kv_lens: [B] or [B, Q] int32, Q at most 16: query j of sequence b attends to positions [0, kv_lens[b, j]), or the
    last `window` of them. 0 is a padding row: its output is zeros and its log-sum-exp -inf. Lengths may not exceed
    max_pages * page_size. Row b Q + j of the attention's input is query j of sequence b. Raises ValueError naming what
    does not fit.

    On a GPU a call allocates fp32 partial results for as many splits as the table is wide: [B, max_pages * page_size /
    split, Q heads, Dv]. Keep tables narrow, say by a few widths to capture graphs for.
    """

    page_table: torch.Tensor
    kv_lens: torch.Tensor
    page_size: int
    window: int | None = None

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

    def max_splits(self, split: int) -> int:
        """How many splits of `split` positions the longest sequence that the table can hold has, at least 1."""
        return max(1, -(-self.page_table.shape[1] * self.page_size // split))
