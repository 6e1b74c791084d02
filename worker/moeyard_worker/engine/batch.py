"""A `Step` as tensors: everything about its rows that all layers share, computed once."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from moeyard_kernels.ops import BLOCK, DecodePlan, padded_rows, plan_decode
from moeyard_worker.scheduling.step import Chunk, Step

# The absorbed products of latent attention see decode rows in multiples of this many: fewer than four rows take another
# path of the CPU's matrix product, with other bits.
DECODE_TILE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSegment:
    """Rows [begin, end) are one prompt chunk; the first sits at position `start`.

    `pages` [n] int64 hold positions 0 to at least start + end - begin, in order and rounded up to whole attention
    blocks (the last page repeats: what it adds is never seen).
    """

    begin: int
    end: int
    start: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one step: prompt rows, decode rows, padding.

    num_tokens real rows T, of which num_prefill come first; num_rows is T padded (`padded_rows`) and holds the decode
    rows padded to `DECODE_TILE` too: rows num_prefill .. num_prefill + num_decode_rows.
    token_ids, positions: [num_rows] int64, zero in the padding.
    slots: [T] int64, page * page_size + offset of each row's cache entry.
    plan: which pages the T - num_prefill decode rows read.
    sample_rows: [num_sampled padded] int64, rows whose logits are wanted; the padding repeats row 0.
    """

    num_tokens: int
    num_prefill: int
    num_rows: int
    num_decode_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    segments: tuple[PromptSegment, ...]
    plan: DecodePlan
    num_sampled: int
    sample_rows: torch.Tensor

    @property
    def num_decode(self) -> int:
        """Decode rows without padding."""
        return self.num_tokens - self.num_prefill


def pad_heads(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [M, heads, D] with zero rows behind it up to `num_rows`; x itself when nothing is missing."""
    return x if x.shape[0] == num_rows else F.pad(x, (0, 0, 0, 0, 0, num_rows - x.shape[0]))


def build_batch(step: Step, *, page_size: int, window: int | None) -> Batch:
    """Lay out a step's rows; `window` is the attention's sliding window."""
    num_tokens, num_prefill = step.num_tokens, step.num_prefill_tokens
    num_decode = num_tokens - num_prefill
    num_decode_rows = num_decode + -num_decode % DECODE_TILE
    num_rows = padded_rows(num_prefill + num_decode_rows)
    token_ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    slots = np.empty(num_tokens, dtype=np.int64)
    segments: list[PromptSegment] = []
    begin = 0
    for chunk in step.chunks:
        end = begin + chunk.num_tokens
        if end == begin + 1:
            page, offset = divmod(chunk.start, page_size)
            token_ids[begin], positions[begin] = chunk.token_ids[0], chunk.start
            slots[begin] = chunk.pages[page] * page_size + offset
        else:
            token_ids[begin:end] = chunk.token_ids
            position = np.arange(chunk.start, chunk.end)
            positions[begin:end] = position
            slots[begin:end] = np.asarray(chunk.pages)[position // page_size] * page_size + position % page_size
        if chunk.prompt:
            pages = torch.from_numpy(_block_pages(chunk, page_size))
            segments.append(PromptSegment(begin=begin, end=end, start=chunk.start, pages=pages))
        begin = end
    samples = step.sample_rows
    sample_rows = np.zeros(padded_rows(len(samples)), dtype=np.int64)
    sample_rows[: len(samples)] = samples
    return Batch(
        num_tokens=num_tokens,
        num_prefill=num_prefill,
        num_rows=num_rows,
        num_decode_rows=num_decode_rows,
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        segments=tuple(segments),
        plan=_plan(step.decode, page_size, window),
        num_sampled=len(samples),
        sample_rows=torch.from_numpy(sample_rows),
    )


def _block_pages(chunk: Chunk, page_size: int) -> np.ndarray:
    """The pages of positions [0, end), then the last one again up to a whole attention block."""
    used = -(-chunk.end // page_size)
    total = -(-chunk.end // BLOCK) * (BLOCK // page_size)
    pages = np.full(total, chunk.pages[used - 1], dtype=np.int64)
    pages[:used] = chunk.pages[:used]
    return pages


def _plan(decode: tuple[Chunk, ...], page_size: int, window: int | None) -> DecodePlan:
    """One plan row per decode row; the rows of a chunk of several each see one position more than the one before."""
    kv_lens = list(chain.from_iterable(range(chunk.start + 1, chunk.end + 1) for chunk in decode))
    used = [-(-chunk.end // page_size) for chunk in decode]
    table = np.zeros((len(kv_lens), max(used, default=1)), dtype=np.int64)
    row = 0
    for chunk, count in zip(decode, used, strict=True):
        table[row : row + chunk.num_tokens, :count] = chunk.pages[:count]
        row += chunk.num_tokens
    return plan_decode(torch.from_numpy(table), kv_lens, page_size=page_size, window=window)
