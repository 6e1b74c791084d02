"""Decode attention over a paged cache of keys and values, with grouped query heads."""

import torch

from moeyard_kernels.cpu.attn_merge import attend_blocks
from moeyard_kernels.cpu.decode_plan import DecodePlan


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Attention of q [B, Hq, Dk], each row over its own pages -> [B, Hq, Dv] in q's dtype.

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv] are finite everywhere; `plan` holds the
    step's lengths, pages and window. Scores and sums are fp32 for bf16 caches too.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dim_v = k_cache.shape[0], v_cache.shape[-1]
    if num_rows == 0:
        return q.new_empty(0, num_q_heads, dim_v)
    heads_first = (q.float() * scale).view(num_rows, num_kv_heads, -1, dim).transpose(0, 1)
    out = attend_blocks(heads_first, k_cache, v_cache, dim_v=dim_v, plan=plan)
    return out.transpose(0, 1).reshape(num_rows, num_q_heads, dim_v).to(q.dtype)
