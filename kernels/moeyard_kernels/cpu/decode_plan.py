"""Which cache pages each decode row of one step reads on a CPU, and the mask, from lengths known to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import BLOCK


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
