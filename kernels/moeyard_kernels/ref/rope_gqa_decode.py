"""A decode step of grouped attention: rotation, cache write and attention, one behind the other."""

import torch

from moeyard_kernels.ref.gqa_decode import gqa_decode
from moeyard_kernels.ref.rope_cache_write import rope_cache_write_gqa
from moeyard_kernels.types.decode_tables import DecodeTables


def rope_gqa_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    *, tables: DecodeTables, scale: float, interleaved: bool, q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None, eps: float = 0.0, static_tables: bool = False, lone_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `moeyard_kernels.ops.rope_gqa_decode`. Of what is launched when a CPU need not know."""
    q = rope_cache_write_gqa(
        q, k, v, cos, sin, slot_mapping, k_cache, v_cache,
        interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps,
    )  # fmt: skip
    return gqa_decode(q, k_cache, v_cache, tables=tables, scale=scale)
