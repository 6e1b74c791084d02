"""Decode attention of multi-head latent attention in its absorbed form, over a paged latent cache."""

import torch

from moeyard_kernels.cpu.attn_merge import attend_blocks
from moeyard_kernels.cpu.decode_plan import DecodePlan


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Absorbed latent attention of q_latent [B, Hq, R], q_rope [B, Hq, Dr] -> [B, Hq, R] in q's dtype.

    latent_cache [num_pages, page, R + Dr] is finite everywhere; every query head reads the one latent, whose first R
    values are also the values. Scores and sums are fp32 for bf16 caches too.
    """
    rank = q_latent.shape[2]
    if q_latent.shape[0] == 0:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rope), -1).float().mul_(scale)
    out = attend_blocks(q.unsqueeze(0), latent_cache.unsqueeze(0), None, dim_v=rank, plan=plan)
    return out.view(q_latent.shape).to(q_latent.dtype)
