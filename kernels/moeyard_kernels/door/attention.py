"""The door to attention over whole prompts and over paged caches. See `ops` for the rules."""

import torch

from moeyard_kernels.checks import FLOATS, check_plan, missing, show
from moeyard_kernels.decode_plan import DecodePlan
from moeyard_kernels.ref import attn_prefill as _attn_prefill
from moeyard_kernels.ref import gqa_decode as _gqa_decode
from moeyard_kernels.ref import mla_decode as _mla_decode


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of q [T, Hq, Dk] at positions start..start+T-1 of one sequence -> [T, Hq, Dv] in q's dtype.

    k [Hkv, L, Dk] and v [Hkv, L, Dv] hold positions 0..L-1, L >= start + T (what lies behind is finite and unseen);
    query head h uses key head h // (Hq // Hkv). With `window` a query at p sees p - window + 1..p. A query's bits
    depend on its own row and the keys it sees, not on the chunk, L or the tile.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"attn_prefill: q {show(q)}, k {show(k)}, v {show(v)} do not fit")
    if k.shape[0] == 0 or q.shape[1] % k.shape[0]:
        raise ValueError(f"attn_prefill: {q.shape[1]} query heads over {k.shape[0]} key heads")
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"attn_prefill: q {q.dtype}, k {k.dtype}, v {v.dtype} must share a dtype, fp32 or bf16")
    if start < 0 or k.shape[1] < start + q.shape[0]:
        raise ValueError(f"attn_prefill: start {start} + {q.shape[0]} queries exceed {k.shape[1]} keys")
    if window is not None and window < 1:
        raise ValueError(f"attn_prefill: window {window} is not positive")
    if q.is_cuda:
        raise missing("attn_prefill")
    return _attn_prefill.attn_prefill(q, k, v, start=start, scale=scale, window=window)


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Attention of q [B, Hq, Dk], each row over its own pages -> [B, Hq, Dv] in q's dtype.

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv], finite everywhere; `plan` is the step's
    `plan_decode` (it holds lengths, pages and window). A row's bits depend on the row and the keys it sees.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"gqa_decode: q {show(q)}, k_cache {show(k_cache)}, v_cache {show(v_cache)} do not fit")
    if q.shape[2] != k_cache.shape[3] or k_cache.shape[0] == 0 or q.shape[1] % k_cache.shape[0]:
        raise ValueError(f"gqa_decode: q {show(q)} does not fit k_cache {show(k_cache)}")
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(
            f"gqa_decode: q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype} must share a dtype, "
            f"fp32 or bf16"
        )
    check_plan("gqa_decode", plan, q.shape[0], k_cache.shape[2])
    if q.is_cuda:
        raise missing("gqa_decode")
    return _gqa_decode.gqa_decode(q, k_cache, v_cache, plan=plan, scale=scale)


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Absorbed latent attention: q_latent [B, Hq, R], q_rope [B, Hq, Dr] over latent_cache -> [B, Hq, R] in q's dtype.

    latent_cache [num_pages, page, R + Dr] is finite everywhere; every query head reads the one latent, whose first R
    values are also the values. `plan` is the step's `plan_decode`.
    """
    if q_latent.dim() != 3 or q_rope.dim() != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(f"mla_decode: q_latent {show(q_latent)} does not fit q_rope {show(q_rope)}")
    if latent_cache.dim() != 3 or latent_cache.shape[2] != q_latent.shape[2] + q_rope.shape[2]:
        raise ValueError(
            f"mla_decode: latent_cache {show(latent_cache)} does not hold {q_latent.shape[2]} + {q_rope.shape[2]}"
        )
    if q_latent.dtype not in FLOATS or q_rope.dtype != q_latent.dtype or latent_cache.dtype != q_latent.dtype:
        raise ValueError(
            f"mla_decode: q_latent {q_latent.dtype}, q_rope {q_rope.dtype}, latent_cache {latent_cache.dtype} must "
            f"share a dtype, fp32 or bf16"
        )
    check_plan("mla_decode", plan, q_latent.shape[0], latent_cache.shape[1])
    if q_latent.is_cuda:
        raise missing("mla_decode")
    return _mla_decode.mla_decode(q_latent, q_rope, latent_cache, plan=plan, scale=scale)
