"""Decode attention over a paged cache of keys and values, with grouped query heads."""

import torch

from moeyard_kernels.decode_plan import BLOCK, DecodePlan
from moeyard_kernels.ref.attn_merge import attend_blocks


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gqa_decode`. Scores and sums are fp32 for bf16 caches too."""
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dim_v = k_cache.shape[0], v_cache.shape[-1]
    if num_rows == 0:
        return q.new_empty(0, num_q_heads, dim_v)
    group = num_q_heads // num_kv_heads
    q = (q.float() * scale).view(num_rows, num_kv_heads, group, dim).transpose(0, 1).index_select(1, plan.row_of_block)
    k = k_cache.index_select(1, plan.page_ids).float().view(num_kv_heads, -1, BLOCK, dim)
    v = v_cache.index_select(1, plan.page_ids).float().view(num_kv_heads, -1, BLOCK, dim_v)
    out = attend_blocks(q, k, v, plan)
    return out.transpose(0, 1).reshape(num_rows, num_q_heads, dim_v).to(v_cache.dtype)
