"""The door to attention over paged caches. See `ops` for the rules."""

import torch

from moeyard_kernels.checks import FLOATS, check_plan, missing, show
from moeyard_kernels.decode_plan import DecodePlan
from moeyard_kernels.ref import gqa_decode as _gqa_decode
from moeyard_kernels.ref import mla_decode as _mla_decode


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
