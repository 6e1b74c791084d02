"""Parts of all backends' plans: rotations of a step's rows, places in pages, and page tables."""

from collections.abc import Sequence

import numpy as np
import torch

from moeyard_kernels.types.step import ChunkRows


class Rotations:
    """Rows of rotation tables at `positions` [rows] int64, looked up once per step and table."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) [rows, D / 2] fp32 of a table [positions, D] that outlives the step."""
        found = self._found.get(id(table))
        if found is None:
            cos, sin = table.index_select(0, self._positions).chunk(2, 1)
            found = self._found[id(table)] = cos, sin
        return found


def entries_at(chunk: ChunkRows, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Return the cache entries, page * page_size + offset, of `positions` of a chunk's sequence."""
    return entries_of(chunk.pages, positions - chunk.dropped, page_size)


def entries_of(pages: Sequence[int] | np.ndarray, places: np.ndarray, page_size: int) -> np.ndarray:
    """Return the cache entries, page * page_size + offset, of `places` of a sequence."""
    return np.asarray(pages)[places // page_size] * page_size + places % page_size


def row_indices(chunks: Sequence[ChunkRows], page_size: int) -> np.ndarray:
    """Return int64 [3, T]: the token, the position and the place in the pages of each row of the chunks."""
    found = np.empty((3, sum(len(chunk.token_ids) for chunk in chunks)), dtype=np.int64)
    begin = 0
    for chunk in chunks:
        start, end = chunk.start, begin + len(chunk.token_ids)
        if end == begin + 1:
            # Scalars are faster than arrays of one element.
            page, offset = divmod(start - chunk.dropped, page_size)
            found[:, begin] = chunk.token_ids[0], start, chunk.pages[page] * page_size + offset
        else:
            positions = np.arange(start, start + end - begin)
            found[:, begin:end] = chunk.token_ids, positions, entries_at(chunk, positions, page_size)
        begin = end
    return found


def page_table(chunks: Sequence[ChunkRows], page_size: int) -> np.ndarray:
    """Return int64 [chunks, most pages, at least 1]: the pages that hold positions, then zeros."""
    used = [-(-(chunk.start - chunk.dropped + len(chunk.token_ids)) // page_size) for chunk in chunks]
    table = np.zeros((len(chunks), max(used, default=1)), dtype=np.int64)
    for row, chunk, count in zip(table, chunks, used, strict=True):
        row[:count] = chunk.pages[:count]
    return table


def decode_table(decode: Sequence[ChunkRows], page_size: int) -> tuple[np.ndarray, list[int]]:
    """Return one row of pages and one length per decode row. A chunk's rows each see one position more."""
    counts = [len(chunk.token_ids) for chunk in decode]
    firsts = [c.start - c.dropped + 1 for c in decode]
    kv_lens = [first + row for first, count in zip(firsts, counts, strict=True) for row in range(count)]
    return np.repeat(page_table(decode, page_size), counts, axis=0), kv_lens
