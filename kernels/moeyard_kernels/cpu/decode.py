"""Decode attention over paged caches on a CPU: one query row against its blocks of keys, summed in ascending order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import BLOCK


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


# Blocks are gathered from the cache in pieces of about this many values. 2 MiB of fp32 stay in a core's cache, and
# malloc recycles them. Larger pieces would be mapped and zeroed by the kernel each time.
_PIECE = 512 * 1024


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Attention of q [B, Hq, Dk], each row over its own pages -> [B, Hq, Dv] in q's dtype.

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv] are finite everywhere; `plan` holds the
    step's lengths, pages and window. Scores and sums are fp32, also for bf16 caches.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dim_v = k_cache.shape[0], v_cache.shape[-1]
    if num_rows == 0:
        return q.new_empty(0, num_q_heads, dim_v)
    heads_first = (q.float() * scale).view(num_rows, num_kv_heads, -1, dim).transpose(0, 1)
    out = attend_blocks(heads_first, k_cache, v_cache, dim_v=dim_v, plan=plan)
    return out.transpose(0, 1).reshape(num_rows, num_q_heads, dim_v).to(q.dtype)


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Absorbed latent attention of q_latent [B, Hq, R], q_rope [B, Hq, Dr] -> [B, Hq, R] in q's dtype.

    latent_cache [num_pages, page, R + Dr] is finite everywhere. Every query head reads the one latent, whose first R
    values are also the values. Scores and sums are fp32, also for bf16 caches.
    """
    rank = q_latent.shape[2]
    if q_latent.shape[0] == 0:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rope), -1).float().mul_(scale)
    out = attend_blocks(q.unsqueeze(0), latent_cache.unsqueeze(0), None, dim_v=rank, plan=plan)
    return out.view(q_latent.shape).to(q_latent.dtype)


def attend_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None, *, dim_v: int, plan: DecodePlan
) -> torch.Tensor:
    """q [X, B, M, Dk] fp32, scaled; caches [X, num_pages, page, D] -> [X, B, M, dim_v] fp32.

    X counts key heads, M the query heads of each. Without `v_cache` the values are the first `dim_v` of the keys. Per
    row: out = sum_b exp(s_b - m) v_b / sum_b sum(exp(s_b - m)). m is the row's maximum over all its blocks, which is
    exact in any order. Both sums run over ascending blocks. Every product is M x 64 whatever the batch, and every
    exponential runs over a multiple of 64 values. So neither the batch nor the pieces affect the bits.
    """
    num_heads, num_rows, m, dim = q.shape
    num_blocks = plan.row_of_block.shape[0]
    step = max(1, _PIECE // (num_heads * BLOCK * dim))
    pieces = [slice(i, min(i + step, num_blocks)) for i in range(0, num_blocks, step)]
    scores = []
    for piece in pieces:
        k = _gather(k_cache, plan, piece)
        rows = q.index_select(1, plan.row_of_block[piece]).view(-1, m, dim)
        s = torch.bmm(rows, k.transpose(1, 2)).view(num_heads, -1, m, BLOCK)
        scores.append(s.add_(plan.mask[piece]))
    tops = [s.amax(-1) for s in scores]
    top = torch.cat(tops, 1) if len(tops) > 1 else tops[0]
    top = top.index_select(1, plan.blocks_of_row).view(num_heads, num_rows, -1, m).amax(2)
    out = q.new_zeros(num_heads, num_rows, m, dim_v)
    total = q.new_zeros(num_heads, num_rows, m)
    for piece, s in zip(pieces, scores, strict=True):
        row = plan.row_of_block[piece]
        p = s.sub_(top.index_select(1, row).unsqueeze(-1)).exp_()
        if v_cache is not None:
            v = _gather(v_cache, plan, piece)
        else:
            v = (k if len(pieces) == 1 else _gather(k_cache, plan, piece))[..., :dim_v]
        o = torch.bmm(p.view(-1, m, BLOCK), v)
        out.index_add_(1, row, o.view(num_heads, -1, m, dim_v))
        total.index_add_(1, row, p.sum(-1))
    return out.div_(total.unsqueeze(-1))


def _gather(cache: torch.Tensor, plan: DecodePlan, piece: slice) -> torch.Tensor:
    """Return the blocks of `piece` of each head, [X * blocks, 64, D] fp32."""
    per_block = BLOCK // plan.page_size
    pages = plan.page_ids[piece.start * per_block : piece.stop * per_block]
    return cache.index_select(1, pages).float().view(-1, BLOCK, cache.shape[-1])
