"""Plan that all layers' prompt attention shares in a step: places of queries and keys, and tiles of work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.sending import to_device

# Queries of one sequence are assigned in tiles of this many rows, from the chunk's first row. A kernel's block of rows
# divides it. No result depends on it.
TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """B prompt chunks, consecutive in the rows of q. Index tensors are int32 on one device.

    cu_q: [B + 1], chunk b is rows cu_q[b] .. cu_q[b + 1] - 1 of q. starts: [B], the position of each chunk's first
    query. Keys and values of positions 0 .. starts[b] + length - 1 are available.
    page_table: [B, max_pages], position p is in page page_table[b, p // page_size]; entries past the last position are
    0. For contiguous keys page_size is 0 and cu_kv: [B + 1] replaces the table: position p is row cu_kv[b] + p.
    tiles: [N, 2], every tile of up to TILE queries as (chunk, first row in it), most keys first. A captured step has as
    many tiles as its chunks may need; unused tiles come last and belong to a chunk without rows.
    num_rows: queries of all chunks. num_keys: sum of their keys. Both are host copies of cu_q[B] and cu_kv[B].
    """

    num_rows: int
    num_keys: int
    page_size: int
    window: int | None
    cu_q: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    page_table: torch.Tensor | None
    cu_kv: torch.Tensor | None

    @property
    def num_full_tiles(self) -> int:
        """Tiles of all rows as one chunk: about the work of a captured step."""
        return -(-self.num_rows // TILE)


def plan_prefill(
    q_lens: Sequence[int],
    starts: Sequence[int],
    *,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> PrefillPlan:
    """Plan one step's prompt chunks: chunk b holds q_lens[b] queries (0 allowed) from position starts[b] on.

    With a `page_table` [B, max_pages] of integers on the CPU, keys lie in pages of `page_size`, a power of two. Only
    entries that hold known positions are read. Without a table the keys of chunk b are starts[b] + q_lens[b] rows,
    directly after those of chunk b - 1. A query at position p sees 0 .. p, or the last `window` of them. One copy moves
    the plan to `device`. Raises ValueError naming what does not fit.
    """
    num_seqs = len(q_lens)
    lens, begins = np.asarray(q_lens, dtype=np.int64), np.asarray(starts, dtype=np.int64)
    if len(starts) != num_seqs or (num_seqs and min(lens.min(), begins.min()) < 0):
        raise ValueError(f"plan_prefill: q_lens {list(q_lens)} and starts {list(starts)} do not fit")
    if window is not None and window < 1:
        raise ValueError(f"plan_prefill: window {window} is not positive")
    ends = begins + lens
    if ends.sum(initial=0) >= 2**31 or lens.sum(initial=0) >= 2**31:
        raise ValueError(f"plan_prefill: {lens.sum()} queries over {ends.sum()} keys exceed int32")
    parts = [_cumulative(lens), begins, tiles_of(lens, begins).ravel()]
    if page_table is None:
        if page_size != 0:
            raise ValueError(f"plan_prefill: page_size {page_size} without a page_table")
        parts.append(_cumulative(ends))
    else:
        parts.append(_pages(page_table, ends, page_size).ravel())
    # One copy. Compiled kernels rely on every part beginning at a multiple of 16 bytes.
    padded = [np.pad(part, (0, -part.size % 4)) for part in parts]
    flat = to_device(torch.from_numpy(np.concatenate(padded).astype(np.int32)), device)
    places = flat.split([part.size for part in padded])
    cu_q, at, tiles, keys = (place[: part.size] for place, part in zip(places, parts, strict=True))
    return PrefillPlan(
        num_rows=int(lens.sum()),
        num_keys=int(ends.sum()),
        page_size=page_size,
        window=window,
        cu_q=cu_q,
        starts=at,
        tiles=tiles.view(-1, 2),
        page_table=None if page_table is None else keys.view(num_seqs, -1),
        cu_kv=keys if page_table is None else None,
    )


def _cumulative(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts)))


def tiles_of(lens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return [N, 2] (chunk, first row). Tiles with the most keys come first, so that the last to finish are short."""
    counts = -(-lens // TILE)
    chunk = np.repeat(np.arange(lens.size), counts)
    row = (np.arange(chunk.size) - (np.cumsum(counts) - counts)[chunk]) * TILE
    order = np.argsort(-(starts[chunk] + row), kind="stable")
    return np.stack((chunk[order], row[order]), axis=1)


def _pages(page_table: torch.Tensor, ends: np.ndarray, page_size: int) -> np.ndarray:
    """Return the table with zeros in entries without known positions."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"plan_prefill: page_size {page_size} is no power of two")
    if page_table.dim() != 2 or page_table.shape[0] != ends.size or page_table.is_floating_point():
        raise ValueError(
            f"plan_prefill: page_table {page_table.dtype} {list(page_table.shape)}, expected integers [{ends.size}, n]"
        )
    used = -(-ends // page_size)
    if ends.size and used.max() > page_table.shape[1]:
        raise ValueError(
            f"plan_prefill: {ends.max()} positions exceed {page_table.shape[1]} pages of {page_size} (page_table)"
        )
    table: np.ndarray = np.where(np.arange(page_table.shape[1]) < used[:, None], page_table.numpy(), 0)
    if table.min(initial=0) < 0:
        raise ValueError(f"plan_prefill: page_table holds {table.min()} where positions are known")
    return table
