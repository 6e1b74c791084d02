"""The door to attention over paged caches. See `ops` for the rules."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_layout, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.door.rope import check_step_gqa
from moeyard_kernels.types.decode_tables import DecodeTables


def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, Hq, Dk], each row over its own pages -> ([B, Hq, Dv] in q's dtype, lse [B, Hq] fp32).

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv], contiguous; `tables` hold the step's
    lengths, pages and window, and positions that no query sees may hold anything. lse is ln(sum(exp(scores))). A row's
    bits depend on the row and the keys it sees. static_tables: the caller knows that the launch just ahead, and any
    other still at work, does not write the tables, as with those of a step between its layers; a GPU may then read them
    before that launch has ended. Tables that it writes would be read half old, half new.
    """
    _check_gqa("gqa_decode", q, k_cache, v_cache, tables=tables, scale=scale)
    check_layout("gqa_decode", q=q, k_cache=k_cache)
    return kernel("attention.gqa_decode", q).gqa_decode(
        q, k_cache, v_cache, tables=tables, scale=scale, static_tables=static_tables
    )


def rope_gqa_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    *, tables: DecodeTables, scale: float, interleaved: bool, q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None, eps: float = 0.0, static_tables: bool = False, lone_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`rope_cache_write_gqa`, and `gqa_decode` of what it returns: (out [T, Hq, D], lse [T, Hq] fp32), caches written.

    A row's own key is at position kv_lens - 1 of what it sees. lone_rows: no row sees what another one writes here, but
    for copies of a row, which are not written (-1), as padding is. A GPU may then do all of it in one launch, if a
    config says so. static_tables: as in `gqa_decode`; with lone_rows the keys of earlier steps and the norms' weights
    are as old as the tables. Bits: those of the two ops.
    """
    op = "rope_gqa_decode"
    check_step_gqa(op, q, k, v, cos, sin, slot_mapping, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm)
    _check_gqa(op, q, k_cache, v_cache, tables=tables, scale=scale)
    return kernel("attention.rope_gqa_decode", q).rope_gqa_decode(
        q, k, v, cos, sin, slot_mapping, k_cache, v_cache, tables=tables, scale=scale, interleaved=interleaved,
        q_norm=q_norm, k_norm=k_norm, eps=eps, static_tables=static_tables, lone_rows=lone_rows,
    )  # fmt: skip


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
    static_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed latent attention of q_latent [B, Hq, R], q_rope [B, Hq, Dr] -> ([B, Hq, R], lse [B, Hq] fp32).

    latent_cache is [num_pages, page, R + Dr]; every query head reads the one latent, whose first R values are also the
    values. `tables`, `static_tables` and what the cache may hold are as in `gqa_decode`. static_keys: likewise no
    launch at work writes what the cache holds of a sequence below its least length less one, its earlier steps' rows.
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
    _check_tables(
        "mla_decode", tables, q_latent.shape[0], latent_cache.shape[1], scale,
        q_latent=q_latent, q_rope=q_rope, latent_cache=latent_cache,
    )  # fmt: skip
    return kernel("attention.mla_decode", q_latent).mla_decode(
        q_latent, q_rope, latent_cache, tables=tables, scale=scale, static_tables=static_tables, static_keys=static_keys
    )


def attn_combine(
    partial: torch.Tensor, lse: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over S consecutive pieces of the keys: partial [B, S, H, D] -> [B, H, D] in `dtype`.

    partial fp32, lse [B, S, H] fp32 (natural logarithms; -inf for a piece that saw nothing, whose partial is finite).
    out = sum_s w_s partial_s / sum_s w_s, s ascending, w_s = exp(lse_s - max lse). Also returns the log-sum-exp of
    all, [B, H]. One piece comes back bit for bit; all of -inf gives zeros and -inf.
    """
    if partial.dim() != 4 or partial.dtype != torch.float32 or partial.shape[1] == 0:
        raise ValueError(f"attn_combine: partial must be fp32 [B, S, H, D], got {show(partial)}")
    if lse.shape != partial.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(f"attn_combine: lse {show(lse)}, expected fp32 {list(partial.shape[:3])}")
    if dtype not in FLOATS:
        raise ValueError(f"attn_combine: dtype {dtype} is neither fp32 nor bf16")
    check_layout("attn_combine", partial=partial, lse=lse)
    return kernel("attention.attn_combine", partial).attn_combine(partial, lse, dtype=dtype)


def _check_gqa(
    op: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, tables: DecodeTables, scale: float
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"{op}: q {show(q)}, k_cache {show(k_cache)}, v_cache {show(v_cache)} do not fit")
    if q.shape[2] != k_cache.shape[3] or k_cache.shape[0] == 0 or q.shape[1] % k_cache.shape[0]:
        raise ValueError(f"{op}: q {show(q)} does not fit k_cache {show(k_cache)}")
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(
            f"{op}: q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype} must share a dtype, fp32 or bf16"
        )
    _check_tables(op, tables, q.shape[0], k_cache.shape[2], scale, k_cache=k_cache, v_cache=v_cache)


def _check_tables(
    op: str, tables: DecodeTables, num_rows: int, page_size: int, scale: float, **tensors: torch.Tensor
) -> None:
    if tables.num_rows != num_rows or tables.page_size != page_size:
        raise ValueError(
            f"{op}: the tables are for {tables.num_rows} rows and pages of {tables.page_size}, got {num_rows} and "
            f"{page_size}"
        )
    if not scale > 0:
        raise ValueError(f"{op}: scale {scale} is not positive")
    check_layout(op, **tensors, page_table=tables.page_table)
