"""Decode attention of multi-head latent attention in its absorbed form, over a paged latent cache."""

import torch

from moeyard_kernels.decode_plan import BLOCK, DecodePlan
from moeyard_kernels.ref.attn_merge import attend_blocks


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """See `moeyard_kernels.ops.mla_decode`. Scores and sums are fp32 for bf16 caches too."""
    num_rows, num_heads, rank = q_latent.shape
    if num_rows == 0:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rope), -1).float().mul_(scale).index_select(0, plan.row_of_block)
    kv = latent_cache.index_select(0, plan.page_ids).float().view(1, -1, BLOCK, latent_cache.shape[-1])
    out = attend_blocks(q.unsqueeze(0), kv, kv[..., :rank], plan)
    return out.view(num_rows, num_heads, rank).to(q_latent.dtype)
