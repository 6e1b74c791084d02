"""Triton: absorbed latent decode attention (MLA) over device-side tables, split along the keys.

The rows of a sequence are its queries times its heads. For each split of SPLIT positions, the kernel takes blocks of BN
positions in ascending order:

    s = q_latent k_latent^T + q_rope k_rope^T;  s = c s;  m' = max(m, max s);  p = 2^(s - m');  a = 2^(m - m')
    l = fma(l, a, p), l2 = l2 a per key of a block, then l and l2 swap;  o = o a + bf16(p) k_latent

with c = scale log2(e) and sums in fp32. A split gives o / (sum(l) + sum(l2)) and its log-sum-exp, which `attn_combine`
merges. The bits depend on SPLIT and BN. They do not depend on the rows of a tile, nor on the side of the keys in the
products (SWAP). Even and odd blocks have separate sums, so that different warps may take them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.attn_combine import combine_splits, concatenate, new_partials
from moeyard_kernels.attention.decode_splits import (
    LOG2E,
    UNFUSED,
    cache_rows,
    check_tables,
    find_work,
    fitting,
    keys_seen,
    num_programs,
    sees,
    softmax_step,
    split_result,
    sum_over_keys,
    work_ends,
)
from moeyard_kernels.attention.mla_decode_hopper import mla_decode_hopper_kernel
from moeyard_kernels.attention.mla_decode_pairs import descriptors, mla_decode_pairs_kernel
from moeyard_kernels.common import tuning
from moeyard_kernels.common.dependent import dependent
from moeyard_kernels.common.launch import interpreted, on_hopper
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.decode_tables import BLOCK, DecodeTables, mla_split
from moeyard_kernels.types.footprint import SplitSums


@triton.jit(do_not_specialize=("B", "MAX_PAGES", "S"))
def _mla_decode_kernel(
    p_q, p_r, p_kv, p_table, p_lens, p_out, p_lse, c, B, MAX_PAGES, S,
    Q: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr, BB: tl.constexpr, BQ: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Loop over (sequence, split, tile of rows). p_out: [B, S, Q H, R], p_lse: [B, S, Q H]."""
    M: tl.constexpr = Q * H
    TILES: tl.constexpr = (M + BM - 1) // BM
    AXIS: tl.constexpr = 0 if SWAP else 1
    b_ends = work_ends(p_lens, B, Q, BB, BQ, WINDOW, SPLIT, S == 1)
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    for i_item in tl.range(tl.program_id(0), tl.max(b_ends, 0) * TILES, tl.num_programs(0)):
        i_b, i_s = find_work(i_item // TILES, b_ends)
        o_m = (i_item % TILES) * BM + tl.arange(0, BM)
        m_m = o_m < M
        b_len, b_low, i_low, i_bottom, i_high = keys_seen(
            p_lens, i_b, i_s, o_m // H, m_m, Q=Q, BQ=BQ, WINDOW=WINDOW, SPLIT=SPLIT, BN=BN
        )
        p_pages = p_table + i_b.to(tl.int64) * MAX_PAGES

        i_row = (i_b * M).to(tl.int64)
        b_q = tl.load(
            p_q + (i_row + o_m)[:, None] * R + o_r[None, :], mask=m_m[:, None] & (o_r < R)[None, :], other=0.0
        )
        b_r = tl.load(
            p_r + (i_row + o_m)[:, None] * D + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0
        )
        if UPCAST:
            b_q, b_r = b_q.to(tl.float32), b_r.to(tl.float32)
        if SWAP:
            b_q, b_r = tl.trans(b_q), tl.trans(b_r)
            b_acc = tl.zeros([BR, BM], dtype=tl.float32)
            b_l = tl.zeros([BN, BM], dtype=tl.float32)
        else:
            b_acc = tl.zeros([BM, BR], dtype=tl.float32)
            b_l = tl.zeros([BM, BN], dtype=tl.float32)
        b_l2 = b_l
        b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
        for i_n in tl.range(i_low, i_high, BN):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < i_high
            if WINDOW > 0:
                m_n = m_n & (o_n >= i_bottom)
            o_row = cache_rows(p_pages, i_n, o_n, m_n, 0, PAGE=PAGE, BN=BN)
            p_row = p_kv + o_row[:, None] * (R + D)
            m_latent = m_n[:, None]
            m_rope = m_n[:, None]
            if BR != R:
                m_latent = m_latent & (o_r < R)[None, :]
            if BD != D:
                m_rope = m_rope & (o_d < D)[None, :]
            b_kv = tl.load(p_row + o_r[None, :], mask=m_latent, other=0.0)
            b_k = tl.load(p_row + R + o_d[None, :], mask=m_rope, other=0.0)
            if UPCAST:
                b_kv, b_k = b_kv.to(tl.float32), b_k.to(tl.float32)
            if SWAP:
                b_s = tl.dot(b_kv, b_q, input_precision="ieee")
                b_s = tl.dot(b_k, b_r, b_s, input_precision="ieee")
            else:
                b_s = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee")
                b_s = tl.dot(b_r, tl.trans(b_k), b_s, input_precision="ieee")
            b_p, b_alpha, b_wide, b_m = softmax_step(b_s, sees(o_n, b_len, b_low, AXIS), b_m, c, AXIS)
            b_l, b_l2 = b_l2 * b_wide, tl.fma(b_l, b_wide, b_p)
            if UPCAST:
                b_p = round_to(b_p, p_kv.dtype.element_ty)
            b_acc = b_acc * tl.expand_dims(b_alpha, AXIS)
            if SWAP:
                b_acc = tl.dot(tl.trans(b_kv), b_p.to(b_kv.dtype), b_acc, input_precision="ieee")
            else:
                b_acc = tl.dot(b_p.to(b_kv.dtype), b_kv, b_acc, input_precision="ieee")

        b_sum = sum_over_keys(b_l, BM, BN, LOG2_BN, AXIS) + sum_over_keys(b_l2, BM, BN, LOG2_BN, AXIS)
        b_inv, b_lse = split_result(b_m, b_sum)
        b_acc = b_acc * tl.expand_dims(b_inv, AXIS)
        if SWAP:
            b_acc = tl.trans(b_acc)
        i_out = (i_b.to(tl.int64) * S + i_s) * M
        m_out = m_m[:, None] & (o_r < R)[None, :]
        tl.store(p_out + (i_out + o_m)[:, None] * R + o_r[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_out)
        tl.store(p_lse + i_out + o_m, b_lse, mask=m_m)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(Config):
    """BM: rows (queries times heads) per tile. PER_SM: programs per multiprocessor.

    kernel: the Triton kernel, or `mla_decode_hopper` or `mla_decode_pairs` where these can run. SWAP: keys are the rows
    of the products, which suits few heads. AHEAD: see `mla_decode_hopper`; the other kernels ignore it.
    """

    kernel: Literal["triton", "hopper", "pairs"]
    BM: int
    SWAP: bool
    PER_SM: int
    AHEAD: int = 0


CONFIGS = (
    LatentConfig(kernel="triton", BM=16, SWAP=False, PER_SM=2, num_warps=4, num_stages=2),
    LatentConfig(kernel="triton", BM=16, SWAP=True, PER_SM=1, num_warps=4, num_stages=2),
    LatentConfig(kernel="triton", BM=64, SWAP=False, PER_SM=1, num_warps=8, num_stages=2),
    LatentConfig(kernel="hopper", BM=16, SWAP=True, PER_SM=1, num_warps=4, num_stages=2),
    LatentConfig(kernel="hopper", BM=16, SWAP=True, PER_SM=1, num_warps=8, num_stages=2),
    LatentConfig(kernel="hopper", BM=32, SWAP=True, PER_SM=1, num_warps=8, num_stages=2),
    LatentConfig(kernel="hopper", BM=64, SWAP=False, PER_SM=1, num_warps=8, num_stages=2),
    LatentConfig(kernel="pairs", BM=64, SWAP=False, PER_SM=1, num_warps=4, num_stages=2),
    # With reads before the wait. Only those of 16 rows are timed (docs/journal.md).
    LatentConfig(kernel="hopper", BM=16, SWAP=True, PER_SM=1, num_warps=4, num_stages=2, AHEAD=1),
    LatentConfig(kernel="hopper", BM=16, SWAP=True, PER_SM=1, num_warps=4, num_stages=2, AHEAD=2),
    LatentConfig(kernel="hopper", BM=16, SWAP=True, PER_SM=1, num_warps=8, num_stages=2, AHEAD=2),
    LatentConfig(kernel="hopper", BM=64, SWAP=False, PER_SM=1, num_warps=8, num_stages=2, AHEAD=2),
    LatentConfig(kernel="hopper", BM=32, SWAP=True, PER_SM=1, num_warps=8, num_stages=2, AHEAD=2),
)

# Fits a tile of fp32, whose products do not run on tensor cores.
_FP32 = LatentConfig(kernel="triton", BM=16, SWAP=False, PER_SM=1, num_warps=8, num_stages=1)


def shape_class(rows: int, sequences: int) -> str:
    """Return the shape class: rows per sequence (queries times heads), few or many sequences."""
    return f"M{rows} {'few' if sequences <= 8 else 'many'}"


def configs_for(rows: int) -> tuple[LatentConfig, ...]:
    """Return the configs whose tile suits `rows` rows."""
    return fitting(CONFIGS, rows)


def default_config(rows: int) -> LatentConfig:
    """Return the config of untuned shapes."""
    return CONFIGS[3 if rows <= 16 else 5 if rows <= 32 else 7]


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
    config: LatentConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.mla_decode`. Returns (out [rows, Hq, R], lse [rows, Hq] fp32)."""
    heads, rank = q_latent.shape[1:]
    split = mla_split(heads) if split is None else split
    sequences, queries, splits = tables.num_sequences, tables.num_queries, tables.max_splits(split)
    rows = queries * heads
    check_tables("mla_decode", tables, latent_cache.shape[0])
    sums = SplitSums(heads=heads, dim=rank, split=split)
    if len(turns := tables.turns(sums)) > 1:
        named: dict[str, Any] = {"scale": scale, "static_tables": static_tables, "static_keys": static_keys}
        named |= {"split": split, "config": config}
        return concatenate(
            mla_decode(q_latent[part], q_rope[part], latent_cache, tables=some, **named) for part, some in turns
        )
    if config is None and q_latent.dtype == torch.float32 and q_latent.is_cuda:
        config = _FP32
    if config is None:
        config = tuning.choose(
            "mla_decode", shape_class(rows, sequences), q_latent, (LatentConfig,), lambda: default_config(rows)
        )
    partial, lse = new_partials(q_latent, tables=tables, sums=sums)
    if q_latent.numel():
        work = sequences * splits * triton.cdiv(rows, config.BM)
        grid = (num_programs(work, q_latent, config.PER_SM),)
        sizes = (sequences, tables.page_table.shape[1], splits)
        tail = (tables.page_table, tables.kv_lens, partial, lse, scale * LOG2E, *sizes)
        shape = {
            "Q": queries,
            "H": heads,
            "SPLIT": split,
            "BB": triton.next_power_of_2(sequences),
            "BQ": triton.next_power_of_2(queries),
            "num_warps": config.num_warps,
            **UNFUSED,
        }
        tile = {
            "R": rank,
            "D": q_rope.shape[2],
            "PAGE": tables.page_size,
            "BN": BLOCK,
            "LOG2_BN": BLOCK.bit_length() - 1,
            "BM": config.BM,
            "SWAP": config.SWAP,
        }
        # The Hopper kernels have no window, because no model with latent attention uses one.
        suits = tables.window is None and _suits_hopper(q_latent, q_rope, latent_cache)
        kind = config.kernel if suits else "triton"
        if config.kernel == "pairs" and (kind == "triton" or tables.page_size != BLOCK):
            # The other kernels spread a tile of 64 rows over twice as many warps.
            kind, shape["num_warps"] = "hopper" if suits else "triton", 8
        if kind == "pairs":
            mla_decode_pairs_kernel[grid](*descriptors(q_latent, q_rope, latent_cache), latent_cache, *tail, **shape)
        elif kind == "hopper":
            early = {
                "ONE": splits == 1 and config.AHEAD > 0,
                "AHEAD": config.AHEAD,
                "STATIC": static_tables,
                "KEYS": static_keys,
            }
            mla_decode_hopper_kernel[grid](
                q_latent, q_rope, latent_cache, *tail, **shape, **tile, **early, **dependent(q_latent)
            )
        else:
            _mla_decode_kernel[grid](
                q_latent,
                q_rope,
                latent_cache,
                *tail,
                **shape,
                **tile,
                BR=max(16, triton.next_power_of_2(rank)),
                BD=max(16, triton.next_power_of_2(q_rope.shape[2])),
                WINDOW=tables.window or 0,
                UPCAST=interpreted(),
                num_stages=config.num_stages,
            )
    return combine_splits(
        partial, lse, dtype=q_latent.dtype, heads=heads, tables=tables, split=split, static_tables=static_tables
    )


def _suits_hopper(q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor) -> bool:
    """Whether the Hopper kernels can run: on Hopper, in bf16, with aligned rows and the widths of DeepSeek's models."""
    if not on_hopper(q_latent) or (q_latent.shape[2], q_rope.shape[2]) != (512, 64):
        return False
    return all(x.data_ptr() % 16 == 0 for x in (q_latent, q_rope, latent_cache))
