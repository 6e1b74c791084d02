"""A step's rotation of queries and keys, and its keys and values written into the paged cache."""

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ref.rms_norm import rms_norm
from moeyard_kernels.ref.rope import rope


def rope_cache_write_gqa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, interleaved: bool,
    q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.rope_cache_write_gqa`."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    tokens, page, entry = _entries("rope_cache_write_gqa", slot_mapping, *k_cache.shape[1:3])
    rotated = _turned(k, cos, sin, interleaved=interleaved)
    k_cache[:, page, entry] = rotated[tokens].transpose(0, 1)
    v_cache[:, page, entry] = v[tokens].transpose(0, 1)
    return _turned(q, cos, sin, interleaved=interleaved)


def rope_cache_write_mla(
    q_rope: torch.Tensor, kv_a: torch.Tensor, k_rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slot_mapping: torch.Tensor, cache: torch.Tensor, *, interleaved: bool, kv_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.rope_cache_write_mla`."""
    if kv_norm is not None:
        kv_a = rms_norm(kv_a, kv_norm, eps)
    tokens, page, entry = _entries("rope_cache_write_mla", slot_mapping, *cache.shape[:2])
    rotated = rope(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    cache[page, entry] = torch.cat((kv_a, rotated), 1)[tokens]
    return rope(q_rope, cos, sin, interleaved=interleaved)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """`rope` of the first 2 cos.shape[1] values of each head of x [T, heads, D], the others as they are."""
    width = min(x.shape[2], 2 * cos.shape[1])
    rotated = rope(x[..., :width], cos, sin, interleaved=interleaved)
    return rotated if width == x.shape[2] else torch.cat((rotated, x[..., width:]), 2)


def _entries(
    op: str, slots: torch.Tensor, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Tokens that are written, their pages, their places in the page). Raises ValueError for a slot outside."""
    check_indices(op, low=-1, high=num_pages * page_size, slot_mapping=slots)
    tokens = (slots >= 0).nonzero().squeeze(1)
    kept = slots[tokens]
    return tokens, kept // page_size, kept % page_size
