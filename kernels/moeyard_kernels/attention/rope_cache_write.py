"""Triton: rotate a step's queries and keys and write its keys and values into the paged cache, in one launch.

Queries and keys of grouped attention may be normalised per head first, with the bits of `rms_norm`. Its sum over a head
is a tree, which depends on the assignment of a tile to threads: each thread has 16 adjacent bytes of a head. So a head
is summed in one order for any number of heads in the tile, if every thread gets 16 bytes and a head stays within one
warp. Other tiles are refused (`normed_configs`).
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.rope import CONFIGS as CONFIGS
from moeyard_kernels.attention.rope import (
    half_block,
    launch_plan,
    move_rest,
    rotate_block,
    rotated_heads,
    store_halves,
    stored_config,
    token_and_block,
)
from moeyard_kernels.attention.rope import shape_class as shape_class
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import check_indices, finish
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, normed, rms_norm, row_tile


def normed_configs(dim: int) -> tuple[RowConfig, ...]:
    """Return the configs whose tiles sum a head of `dim` values in the order of rms_norm."""
    return tuple(config for config in CONFIGS if sums_alike(config.BLOCK, config.num_warps, dim))


def sums_alike(num_heads: int, num_warps: int, dim: int) -> bool:
    """Whether a tile of `num_heads` heads sums each head in the order of rms_norm."""
    if dim % 16:
        return False
    rows, block = row_tile(dim)
    same_warps = num_warps == NUM_WARPS
    if same_warps and rows <= num_heads:
        return True
    # At least 8 values per thread, and at most 32 threads per head in fp32, where a thread has 4 values of it.
    return num_heads * block >= 256 * num_warps and (same_warps or block <= 128)


@triton.jit
def slot_of(p_slots, i_t, stride_page, stride_entry, PAGE: tl.constexpr):
    """Return (whether token i_t is written, offset of its cache entry). PAGE is a constant, which saves a division."""
    i_slot = tl.load(p_slots + i_t)
    i_page = i_slot // PAGE
    return i_slot >= 0, i_page * stride_page + (i_slot - i_page * PAGE) * stride_entry


@triton.jit
def _gqa_kernel(
    p_q, p_k, p_v, p_cos, p_sin, p_q_norm, p_k_norm, p_slots, p_out, p_k_cache, p_v_cache,
    NQ, NKV, HALF, num_q_blocks, eps,
    stride_qt, stride_qn, stride_kt, stride_kn, stride_vt, stride_vn, stride_cos, stride_sin,
    stride_ckn, stride_ckp, stride_cke, stride_cvn, stride_cvp, stride_cve,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, BN: tl.constexpr, BNKV: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr, REST: tl.constexpr, BREST: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Rotate query heads [i_n BN, i_n BN + BN) of one token, or write its keys and values.

    Grid: T (num_q_blocks + 1). BD > 0: normalise queries and keys first, in tiles of BD columns. The last REST values
    of a head are not rotated. BV covers a whole head.
    """
    let_next_begin()
    wait_for_previous()
    i_t, i_n = token_and_block(num_q_blocks + 1)
    if i_n < num_q_blocks:
        rotate_block(
            p_q, p_cos, p_sin, p_q_norm, p_out, i_t, i_n, NQ, stride_qt, stride_qn, stride_cos, stride_sin, eps, HALF,
            INTERLEAVED=INTERLEAVED, BN=BN, BH=BH, BD=BD, REST=REST, BREST=BREST
        )  # fmt: skip
    else:
        o_kv = tl.arange(0, BNKV)
        o_d = tl.arange(0, BV)
        is_written, o_k_entry = slot_of(p_slots, i_t, stride_ckp, stride_cke, PAGE)
        is_written, o_v_entry = slot_of(p_slots, i_t, stride_cvp, stride_cve, PAGE)
        m_kv = (o_kv < NKV) & is_written
        m_v = m_kv[:, None] & (o_d < 2 * HALF + REST)[None, :]
        o_v = o_kv.to(tl.int64)[:, None]
        b_v = tl.load(p_v + i_t * stride_vt + o_v * stride_vn + o_d[None, :], mask=m_v, other=0.0)
        b_k_first, b_k_second, b_scale = rotated_heads(
            p_k + i_t * stride_kt, stride_kn, o_kv, NKV, p_cos + i_t * stride_cos, p_sin + i_t * stride_sin,
            p_k_norm, eps, HALF, INTERLEAVED=INTERLEAVED, BN=BNKV, BH=BH, BD=BD, REST=REST
        )  # fmt: skip
        store_halves(p_k_cache + o_k_entry, stride_ckn, o_kv, m_kv, b_k_first, b_k_second, HALF, BH=BH)
        if REST > 0:
            move_rest(
                p_k + i_t * stride_kt, stride_kn, p_k_cache + o_k_entry, stride_ckn, o_kv, NKV, m_kv, p_k_norm,
                b_scale, 2 * HALF, BD=BD, REST=REST, BREST=BREST
            )  # fmt: skip
        tl.store(p_v_cache + o_v_entry + o_v * stride_cvn + o_d[None, :], b_v, mask=m_v)


@triton.jit
def _mla_kernel(
    p_q, p_latent, p_k, p_cos, p_sin, p_norm, p_slots, p_out, p_cache,
    NQ, R, HALF, num_q_blocks, eps, stride_qt, stride_qn, stride_lt, stride_kt, stride_cos, stride_sin,
    stride_page, stride_entry,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate query heads [i_n BN, i_n BN + BN) of one token, or write its latent and shared key.

    Grid: T (num_q_blocks + 1). ROWS > 0: normalise the latent first, as a tile of ROWS equal rows like rms_norm's.
    """
    let_next_begin()
    wait_for_previous()
    i_t, i_n = token_and_block(num_q_blocks + 1)
    if i_n < num_q_blocks:
        rotate_block(
            p_q, p_cos, p_sin, p_q, p_out, i_t, i_n, NQ, stride_qt, stride_qn, stride_cos, stride_sin, 0.0, HALF,
            INTERLEAVED=INTERLEAVED, BN=BN, BH=BH, BD=0, REST=0, BREST=1
        )  # fmt: skip
    else:
        is_written, o_entry = slot_of(p_slots, i_t, stride_page, stride_entry, PAGE)
        o_r = tl.arange(0, BR)
        m_r = (o_r < R) & is_written
        if ROWS > 0:
            o_row = tl.arange(0, ROWS)[:, None]
            m_row = (o_r < R)[None, :]
            b_rows = tl.load(p_latent + i_t * stride_lt + (o_row * 0 + o_r[None, :]), mask=m_row, other=0.0)
            b_weight = tl.load(p_norm + o_r, mask=o_r < R, other=0.0)
        else:
            b_latent = tl.load(p_latent + i_t * stride_lt + o_r, mask=m_r, other=0.0)
        o_k = tl.arange(0, 1)
        b_k_first, b_k_second, _ = rotated_heads(
            p_k + i_t * stride_kt, 0, o_k, 1, p_cos + i_t * stride_cos, p_sin + i_t * stride_sin, p_k, 0.0, HALF,
            INTERLEAVED=INTERLEAVED, BN=1, BH=BH, BD=0, REST=0
        )  # fmt: skip
        if ROWS > 0:
            b_rows = normed(b_rows.to(tl.float32), b_weight.to(tl.float32), R, eps, p_norm.dtype.element_ty)
            b_rows = round_to(b_rows, p_q.dtype.element_ty).to(p_cache.dtype.element_ty)
            p_rows = p_cache + o_entry + (o_row * 0 + o_r[None, :])
            tl.store(p_rows, b_rows, mask=m_row & (o_row == 0) & is_written)
        else:
            tl.store(p_cache + o_entry + o_r, b_latent, mask=m_r)
        store_halves(p_cache + o_entry + R, 0, o_k, (o_k < 1) & is_written, b_k_first, b_k_second, HALF, BH=BH)


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
    config: RowConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.rope_cache_write_gqa`. Each head and each cache entry is contiguous.

    Raises ValueError for a `config` that sums a head in another order than rms_norm. All do if 16 does not divide D.
    """
    op = "rope_cache_write_gqa"
    num_tokens, num_heads, dim = q.shape
    rotated = min(dim, 2 * cos.shape[1])
    check_rows(op, q=q, k=k, v=v, cos=cos, sin=sin, slot_mapping=slot_mapping, k_cache=k_cache, v_cache=v_cache)
    check_rows(op, q=q, q_norm=q_norm, k_norm=k_norm)
    normed = q_norm is not None
    num_pages, page = k_cache.shape[1], k_cache.shape[2]
    check_indices(op, low=-1, high=num_pages * page, slot_mapping=slot_mapping)
    config, q_blocks, out = launch_plan(op, q, config, more_blocks=1, normed=normed)
    kv_block = triton.next_power_of_2(k.shape[1])
    rows, block = row_tile(dim)
    if normed:
        if not sums_alike(config.BLOCK, config.num_warps, dim):
            raise ValueError(f"{op}: {config} does not sum heads of {dim} as rms_norm does")
        kv_block = max(kv_block, min(config.BLOCK, rows))
    if num_tokens:
        norms = (q if q_norm is None else q_norm, k if k_norm is None else k_norm)
        inputs = (q, k, v, cos, sin, *norms, slot_mapping)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0))
        sizes = (num_heads, k.shape[1], rotated // 2, q_blocks, eps)
        _gqa_kernel[(num_tokens * (q_blocks + 1),)](
            *inputs,
            out,
            k_cache,
            v_cache,
            *sizes,
            *strides,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            PAGE=page,
            INTERLEAVED=interleaved,
            BNKV=kv_block,
            BH=half_block(rotated),
            BD=block if normed else 0,
            REST=dim - rotated,
            BREST=triton.next_power_of_2(max(1, dim - rotated)),
            BV=max(2 * half_block(rotated), triton.next_power_of_2(dim)),
            BN=config.BLOCK,
            enable_fp_fusion=False,
            **config.options,
            **dependent(q),
        )
    return finish(out, q.dtype)


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
    config: RowConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.rope_cache_write_mla`. Each head, row and cache entry is contiguous.

    The norm is a separate launch unless a config for normed shapes is stored, or `config` is given. Raises ValueError
    for a config that sums a latent in another order than rms_norm.
    """
    op = "rope_cache_write_mla"
    num_tokens, num_heads, dim = q_rope.shape
    check_rows(op, q_rope=q_rope, kv_a=kv_a, k_rope=k_rope, cos=cos, sin=sin, slot_mapping=slot_mapping, cache=cache)
    check_rows(op, q_rope=q_rope, kv_norm=kv_norm)
    num_pages, page = cache.shape[:2]
    check_indices(op, low=-1, high=num_pages * page, slot_mapping=slot_mapping)
    if kv_norm is not None:
        config = config or stored_config(op, q_rope, normed=True)
        if config is None:
            kv_a, kv_norm = rms_norm(kv_a, kv_norm, eps), None
        elif config.num_warps != NUM_WARPS:
            raise ValueError(f"{op}: {config} does not sum latents as rms_norm does, with {NUM_WARPS} warps")
    config, q_blocks, out = launch_plan(op, q_rope, config, more_blocks=1)
    rows, block = row_tile(kv_a.shape[1])
    if num_tokens:
        inputs = (q_rope, kv_a, k_rope, cos, sin, kv_a if kv_norm is None else kv_norm, slot_mapping)
        sizes = (num_heads, kv_a.shape[1], dim // 2, q_blocks, eps)
        strides = (*q_rope.stride()[:2], *(x.stride(0) for x in (kv_a, k_rope, cos, sin)), *cache.stride()[:2])
        _mla_kernel[(num_tokens * (q_blocks + 1),)](
            *inputs,
            out,
            cache,
            *sizes,
            *strides,
            PAGE=page,
            INTERLEAVED=interleaved,
            ROWS=0 if kv_norm is None else rows,
            BR=triton.next_power_of_2(kv_a.shape[1]) if kv_norm is None else block,
            BH=half_block(dim),
            enable_fp_fusion=False,
            BN=config.BLOCK,
            **config.options,
            **dependent(q_rope),
        )
    return finish(out, q_rope.dtype)
