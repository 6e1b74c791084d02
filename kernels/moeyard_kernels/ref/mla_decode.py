"""Absorbed latent decode attention over device-side tables: one key head, its values the latent part of the keys."""

import torch

from moeyard_kernels.ref.gqa_decode import attend, check_tables
from moeyard_kernels.types.decode_tables import DecodeTables, mla_split


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
    static_keys: bool = False,
    split: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.mla_decode`. On a CPU nothing is launched ahead."""
    split = mla_split(q_latent.shape[1]) if split is None else split
    check_tables("mla_decode", tables, latent_cache.shape[0])
    keys = latent_cache.unsqueeze(0)
    values = keys[..., : q_latent.shape[2]]
    return attend(torch.cat((q_latent, q_rope), -1), keys, values, tables=tables, scale=scale, split=split)
