"""Causal attention of several prompt chunks, one after the other by the attention of one sequence."""

from collections.abc import Sequence

import torch

from moeyard_kernels.cpu.attn_prefill import attn_prefill_lse


def attn_prefill_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_rope: torch.Tensor | None,
    cu_q: Sequence[int],
    starts: Sequence[int],
    page_table: torch.Tensor | None,
    cu_kv: Sequence[int],
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [T, Hq, Dv], lse [T, Hq] fp32); see `moeyard_kernels.ops.attn_prefill_varlen`. cu_kv counts if no
    page_table does."""
    num_heads = q.shape[1]
    out = q.new_empty(q.shape[0], num_heads, v.shape[-1])
    lse = q.new_empty(q.shape[0], num_heads, dtype=torch.float32)
    for b, start in enumerate(starts):
        rows = slice(cu_q[b], cu_q[b + 1])
        end = start + cu_q[b + 1] - cu_q[b]
        if page_table is not None:
            keys, values = (_paged(x, page_table[b], end) for x in (k, v))
        else:
            here = slice(cu_kv[b], cu_kv[b] + end)
            keys, values = (x[here].transpose(0, 1) for x in (k, v))
            if k_rope is not None:
                keys = torch.cat((keys, k_rope[here].expand(keys.shape[0], -1, -1)), -1)
        out[rows], lse[rows] = attn_prefill_lse(q[rows], keys, values, start=start, scale=scale, window=window)
    return out, lse


def _paged(cache: torch.Tensor, pages: torch.Tensor, end: int) -> torch.Tensor:
    """Positions [0, end) of cache [Hkv, num_pages, page, D]: [Hkv, end, D]."""
    used = pages[: -(-end // cache.shape[2])].long()
    return cache.index_select(1, used).flatten(1, 2)[:, :end]
