"""A step's rows for the CPU backend: everything that all layers share, made once per step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from moeyard_kernels.cpu.linear import padded_rows
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.plan_parts import Rotations, decode_table, entries_of, row_indices
from moeyard_kernels.types.step import ChunkRows, CompactionRows, StepRows, slot_behind, slot_left, slot_restored

# The absorbed products of latent attention use decode rows in multiples of this number. Fewer than four rows use
# another kernel of the CPU's library, with other bits.
DECODE_TILE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The flat list of n (row, block) pairs of one step: ascending rows, ascending blocks within a row.

    page_ids: [n * BLOCK / page_size] int64, the pages of each block in order; past a row's end its last page repeats.
    row_of_block: [n] int64.
    blocks_of_row: [num_rows * max_blocks] int64, indices of the n pairs; short rows repeat their first block.
    mask: [n, 1, BLOCK] fp32, 0 where the row sees the key and -inf elsewhere. Every block has a visible key.
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

    page_table: [B, max_pages] int64 (CPU); only pages with positions below kv_lens[b] are read. `page_size` divides 64.
    Raises ValueError naming the invalid argument.
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
        index, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, BLOCK)
        return DecodePlan(
            num_rows=0, page_size=page_size, page_ids=index, row_of_block=index, blocks_of_row=index, mask=empty
        )
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


class PromptSegment:
    """Rows [begin, end) are one prompt chunk; the first row is at position `start`.

    `pages` [n] int64 hold positions 0 to at least start + end - begin, in order and rounded up to whole attention
    blocks. The last page repeats; its extra keys are never seen. `kept`: the kept part of the prompt, None for all of
    it. `slot`: the slot of recurrent state after the last row, -1 if the model has none. `restored`: the slot of the
    state before the first row, -1 if that is `slot`, or there is none. `parts`: (end, slot) of the rows up to each
    state snapshot with its slot, then of the remaining rows with -1.
    """

    __slots__ = ("begin", "end", "kept", "pages", "parts", "restored", "slot", "start")

    def __init__(self, begin: int, chunk: ChunkRows, *, pages: torch.Tensor, kept: "SegmentCompaction | None") -> None:
        self.begin, self.end = begin, begin + len(chunk.token_ids)
        self.start, self.slot, self.restored = chunk.start, -1, -1
        if chunk.state_slot >= 0:
            self.slot, self.restored = slot_left(chunk), slot_restored(chunk)
        self.pages, self.kept = pages, kept
        self.parts = [(begin + position - chunk.start, slot) for position, slot in chunk.snapshots]
        if not self.parts or self.parts[-1][0] < self.end:
            self.parts.append((self.end, -1))


class SegmentCompaction:
    """The kept part of a prompt of `length` positions, chosen by the last `window`: `entries` [count] int64 are its
    target places, page * page_size + offset."""

    __slots__ = ("count", "entries", "length", "window")

    def __init__(self, length: int, compaction: CompactionRows, page_size: int) -> None:
        self.length, self.count, self.window = length, compaction.kept, compaction.window
        self.entries = torch.from_numpy(entries_of(compaction.pages, np.arange(self.count), page_size))


class CpuPlan:
    """The rows of one step: prompt rows, decode rows, padding. A `StepPlan`.

    num_tokens real rows T, of them num_prompt prompt rows, which come first. num_rows is T padded (`padded_rows`). It
    includes the decode rows padded to `DECODE_TILE`: rows num_prompt .. num_prompt + num_decode_rows.
    token_ids, positions: [num_rows] int64, zero in the padding.
    entries: [T] int64, page * page_size + offset of each row's place in the pages.
    decode: per sliding window, the pages that the T - num_prompt decode rows read.
    sample_rows: [num_sampled padded] int64, rows whose logits are wanted; the padding repeats row 0.
    table: [T - num_prompt, pages] int64, the pages of each decode row.
    waves: the decode rows in the order of their state updates, see `_waves`.
    """

    __slots__ = (
        *("decode", "entries", "num_decode", "num_decode_rows", "num_prompt", "num_rows", "num_sampled"),
        *("num_tokens", "page_size", "positions", "rotation", "sample_rows", "segments", "table", "token_ids", "waves"),
    )

    decode: dict[int | None, DecodePlan]

    def __init__(self, step: StepRows, *, page_size: int, windows: Iterable[int | None]) -> None:
        chunks = (*step.prefill, *step.decode)
        self.num_prompt = num_prompt = sum(len(c.token_ids) for c in step.prefill)
        self.num_decode = num_decode = sum(len(c.token_ids) for c in step.decode)
        self.num_tokens = num_tokens = num_prompt + num_decode
        self.num_decode_rows = num_decode + -num_decode % DECODE_TILE
        self.num_rows = padded_rows(num_prompt + self.num_decode_rows)
        rows = np.zeros((2, self.num_rows), dtype=np.int64)
        found = row_indices(chunks, page_size)
        rows[:, :num_tokens] = found[:2]
        self.segments: list[PromptSegment] = []
        begin = 0
        for chunk in step.prefill:
            pages, kept = torch.from_numpy(_block_pages(chunk, page_size)), None
            if chunk.compaction is not None:
                kept = SegmentCompaction(chunk.start + len(chunk.token_ids), chunk.compaction, page_size)
            self.segments.append(PromptSegment(begin, chunk, pages=pages, kept=kept))
            begin += len(chunk.token_ids)
        self.num_sampled = len(step.sample_rows)
        sample_rows = np.zeros(padded_rows(self.num_sampled), dtype=np.int64)
        sample_rows[: self.num_sampled] = step.sample_rows
        self.token_ids, self.positions = torch.from_numpy(rows)
        self.entries, self.sample_rows = torch.from_numpy(found[2]), torch.from_numpy(sample_rows)
        table, kv_lens = decode_table(step.decode, page_size)
        self.page_size, self.table = page_size, torch.from_numpy(table)
        self.decode = {w: plan_decode(self.table, kv_lens, page_size=page_size, window=w) for w in windows}
        self.rotation = Rotations(self.positions)
        self.waves = _waves(step.decode, num_prompt)


def pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return x [M, ...] followed by zero rows up to `num_rows`; x itself if nothing is missing."""
    return x if x.shape[0] == num_rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, num_rows - x.shape[0]))


def _waves(decode: Sequence[ChunkRows], first: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (rows, slots before them, slots after them) int64 of each wave: row i of every decode chunk that has one.
    The first decode row is row `first`.

    A row needs the state of the row before; rows of one wave belong to different sequences. Empty for a model without
    state per sequence.
    """
    chunks, begin = [], first
    for chunk in decode:
        if chunk.state_slot >= 0:
            chunks.append((begin, chunk))
        begin += len(chunk.token_ids)
    waves = []
    for i in range(max((len(chunk.token_ids) for _, chunk in chunks), default=0)):
        found = [
            (row + i, slot_behind(chunk, chunk.start + i - 1), slot_behind(chunk, chunk.start + i))
            for row, chunk in chunks
            if i < len(chunk.token_ids)
        ]
        rows, read, write = np.array(found, dtype=np.int64).T.copy()
        waves.append((torch.from_numpy(rows), torch.from_numpy(read), torch.from_numpy(write)))
    return waves


def _block_pages(chunk: ChunkRows, page_size: int) -> np.ndarray:
    """Return the pages of positions [0, end), then the last one again up to a whole attention block."""
    end = chunk.start + len(chunk.token_ids)
    used = -(-end // page_size)
    pages = np.full(-(-end // BLOCK) * (BLOCK // page_size), chunk.pages[used - 1], dtype=np.int64)
    pages[:used] = chunk.pages[:used]
    return pages
