"""The door to rotary embedding and to what a step writes into the paged cache. See `ops` for the rules."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, check_norm, show
from moeyard_kernels.door.load import kernel


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos, sin [T, D/2] (or [T, D]: the first half counts) -> [T, heads, D].

    A pair (a, b) becomes (a cos - b sin, b cos + a sin); pairs are (i, i + D/2), or (2i, 2i + 1) if `interleaved`. The
    result is in the first form either way, as deepseek_v3 leaves it in transformers 5.17; deepseek_v2 leaves the pairs
    in place, which permutes queries and keys alike. Rounding points are those of the wider dtype of x and cos: pass cos
    and sin in x's dtype for mixtral, qwen3_moe and deepseek_v3, in fp32 for deepseek_v2 (complex fp32, one rounding).
    """
    _check_rope("rope", "x", x, cos, sin)
    check_devices("rope", x=x, cos=cos, sin=sin)
    return kernel("attention.rope", x).rope(x, cos, sin, interleaved=interleaved)


def rope_cache_write_gqa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    interleaved: bool,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`rope` of q [T, Hq, D] -> the same shape; `rope` of k [T, Hkv, D], and v as it is, go into the caches.

    cos and sin [T, Dr/2] rotate the first Dr <= D values of each head, the others stay ([T, D]: all D, the first half
    counts). With q_norm and k_norm [D] it is `rope` of `rms_norm(q, q_norm, eps)` and `rms_norm(k, k_norm, eps)`.
    k_cache, v_cache [Hkv, num_pages, page, D] of any strides whose last is one; slot_mapping [T] int64 is page number *
    page + place in the page, all different, or -1 for a token that is not written. Bits: those of the
    norms, of `rope` and a copy.
    """
    check_step_gqa(
        "rope_cache_write_gqa", q, k, v, cos, sin, slot_mapping, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm
    )
    return kernel("attention.rope_cache_write", q).rope_cache_write_gqa(
        q, k, v, cos, sin, slot_mapping, k_cache, v_cache,
        interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps,
    )  # fmt: skip


def rope_cache_write_mla(
    q_rope: torch.Tensor,
    kv_a: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool,
    kv_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`rope` of q_rope [T, Hq, Dr] -> the same shape; kv_a [T, R] and `rope` of k_rope [T, Dr] go into the cache.

    With kv_norm [R] it is `rms_norm(kv_a, kv_norm, eps)` that goes there. cache [num_pages, page, R + Dr] of any
    strides whose last is one; slot_mapping [T] int64 as in `rope_cache_write_gqa`. Bits: those of the norm, of `rope`
    and a copy.
    """
    op = "rope_cache_write_mla"
    _check_rope(op, "q_rope", q_rope, cos, sin)
    num_tokens, dim = q_rope.shape[0], q_rope.shape[2]
    if k_rope.shape != (num_tokens, dim) or k_rope.dtype != q_rope.dtype:
        raise ValueError(f"{op}: k_rope {show(k_rope)} does not fit q_rope {show(q_rope)}")
    if kv_a.dim() != 2 or kv_a.shape[0] != num_tokens or kv_a.dtype != q_rope.dtype:
        raise ValueError(f"{op}: kv_a {show(kv_a)} does not fit q_rope {show(q_rope)}")
    _check_slots(op, q_rope, slot_mapping)
    if cache.dim() != 3 or cache.shape[2] != kv_a.shape[1] + dim or cache.dtype != q_rope.dtype:
        raise ValueError(f"{op}: cache {show(cache)} does not fit kv_a {show(kv_a)} and k_rope {show(k_rope)}")
    if kv_norm is not None:
        check_norm(op, kv_a, kv_norm)
    moved = {"kv_a": kv_a, "k_rope": k_rope, "cos": cos, "sin": sin, "slot_mapping": slot_mapping, "cache": cache}
    check_devices(op, q_rope=q_rope, kv_norm=kv_norm, **moved)
    return kernel("attention.rope_cache_write", q_rope).rope_cache_write_mla(
        q_rope, kv_a, k_rope, cos, sin, slot_mapping, cache, interleaved=interleaved, kv_norm=kv_norm, eps=eps
    )


def check_step_gqa(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    *, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
) -> None:  # fmt: skip
    """What `rope_cache_write_gqa` asks of its arguments, for all ops that begin like it. Raises ValueError."""
    _check_rope(op, "q", q, cos, sin, partly=True)
    _check_rope(op, "k", k, cos, sin, partly=True)
    if k.shape[2] != q.shape[2] or k.dtype != q.dtype:
        raise ValueError(f"{op}: k {show(k)} does not fit q {show(q)}")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"{op}: v {show(v)} is not like k {show(k)}")
    _check_slots(op, q, slot_mapping)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or (cache.shape[0], cache.shape[3]) != k.shape[1:] or cache.dtype != k.dtype:
            raise ValueError(f"{op}: {name} {show(cache)} does not fit k {show(k)}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"{op}: v_cache {show(v_cache)} is not like k_cache {show(k_cache)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: q_norm and k_norm come together, or neither")
    if q_norm is not None and k_norm is not None:
        check_norm(op, q, q_norm)
        check_norm(op, k, k_norm)
    check_devices(op, q=q, k=k, v=v, cos=cos, sin=sin, slot_mapping=slot_mapping, k_cache=k_cache, v_cache=v_cache)
    check_devices(op, q=q, q_norm=q_norm, k_norm=k_norm)


def _check_rope(
    op: str, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, partly: bool = False
) -> None:
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"{op}: {name} must be [T, heads, even D], got {show(x)}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"{op}: cos {show(cos)} and sin {show(sin)} differ")
    fits = cos.dim() == 2 and cos.shape[0] == x.shape[0]
    widths = range(1, x.shape[2] // 2) if partly else ()
    if not fits or cos.shape[1] not in (x.shape[2], x.shape[2] // 2, *widths):
        raise ValueError(f"{op}: cos {show(cos)} does not fit {name} {show(x)}")
    if x.dtype not in FLOATS or cos.dtype not in FLOATS:
        raise ValueError(f"{op}: {name} {show(x)} and cos {show(cos)} must be fp32 or bf16")


def _check_slots(op: str, q: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if slot_mapping.shape != q.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(f"{op}: slot_mapping {show(slot_mapping)}, expected int64 [{q.shape[0]}]")
