"""Decode attention over device-side tables, split along the keys: softmax per split, then the merge in order."""

import torch

from moeyard_kernels.ref.attn_combine import attn_combine
from moeyard_kernels.types.decode_tables import GQA_SPLIT, DecodeTables


def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
    split: int = GQA_SPLIT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.gqa_decode`. On a CPU nothing is launched ahead, so static_tables says nothing."""
    check_tables("gqa_decode", tables, k_cache.shape[1])
    return attend(q, k_cache, v_cache, tables=tables, scale=scale, split=split)


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, tables: DecodeTables, scale: float, split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, Dk] over caches [Hkv, num_pages, page, D] -> ([B, Hq, Dv] in q's dtype, log-sum-exp [B, Hq] fp32)."""
    num_kv_heads, num_q = k_cache.shape[0], tables.num_queries
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[3]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for row, length in enumerate(tables.kv_lens.flatten().tolist()):
        if length == 0:
            continue
        pages = tables.page_table[row // num_q, : -(-length // tables.page_size)].long()
        low = max(0, length - tables.window) if tables.window else 0
        k = k_cache[:, pages].flatten(1, 2)[:, :length].float()
        v = v_cache[:, pages].flatten(1, 2)[:, :length].float()
        heads = q[row].float().view(num_kv_heads, -1, q.shape[2])
        partials, lses = [], []
        for start in range(low // split * split, length, split):
            span = slice(max(start, low), min(start + split, length))
            scores = heads @ k[:, span].transpose(1, 2) * scale
            lses.append(scores.logsumexp(-1).flatten())
            partials.append((scores.softmax(-1) @ v[:, span]).flatten(0, 1))
        merged = attn_combine(torch.stack(partials)[None], torch.stack(lses)[None], dtype=q.dtype)
        out[row], lse[row] = merged[0][0], merged[1][0]
    return out, lse


def check_tables(op: str, tables: DecodeTables, num_pages: int) -> None:
    """Raise ValueError for lengths that the table cannot hold, and for pages in use that the cache has not."""
    lens, table = tables.kv_lens.view(tables.num_sequences, tables.num_queries), tables.page_table
    longest = table.shape[1] * tables.page_size
    if lens.numel() and not 0 <= int(lens.min()) <= int(lens.max()) <= longest:
        raise ValueError(f"{op}: kv_lens holds {int(lens.min())} to {int(lens.max())}, outside 0 to {longest}")
    for row in range(tables.num_sequences):
        used = table[row, : -(-int(lens[row].max()) // tables.page_size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_pages:
            raise ValueError(
                f"{op}: page_table[{row}] holds {int(used.min())} to {int(used.max())}, outside 0 to {num_pages - 1}"
            )
