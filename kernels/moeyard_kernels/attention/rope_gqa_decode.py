"""Triton: head norms, rotation, cache write and attention of a decode step in one launch, for tables of one split.

The bits are those of the chain `rope_cache_write_gqa`, `gqa_decode`. A program has one sequence and key head, and
normalises and rotates their queries and the new key. Only this program writes the new key and value, and only it reads
them in this step. It inserts both into the last block of keys in registers. To read them back would add a latency, and
other programs may not see them before the launch ends. So two rows of a step must not belong to one sequence, except
for copies of a row, which store nothing.

If the caller says that tables are old (STATIC), the keys of earlier steps are read before the wait. The last TAIL
blocks go to registers and shared memory. The others, which a loop reads after the wait, are prefetched into the L2.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.attn_combine import combine_splits, new_partials
from moeyard_kernels.attention.decode_splits import (
    LOG2E,
    UNFUSED,
    attend_block,
    check_tables,
    softmax_under,
    split_result,
    sum_over_keys,
)
from moeyard_kernels.attention.gqa_decode import gqa_decode, prefetch, settle
from moeyard_kernels.attention.rope import rotated_heads
from moeyard_kernels.attention.rope_cache_write import rope_cache_write_gqa, slot_of, sums_alike
from moeyard_kernels.attention.rope_gqa_parts import join_halves, read_key, rotated_key, row_maxima
from moeyard_kernels.common import tuning
from moeyard_kernels.common.dependent import dependent
from moeyard_kernels.common.launch import check_indices, interpreted
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.decode_tables import BLOCK, GQA_SPLIT, DecodeTables
from moeyard_kernels.types.footprint import SplitSums


@triton.jit(do_not_specialize=("MAX_PAGES", "NUM_PAGES"))
def _rope_gqa_decode_kernel(
    p_q, p_k, p_v, p_cos, p_sin, p_q_norm, p_k_norm, p_slots, p_k_cache, p_v_cache, p_table, p_lens, p_out, p_lse,
    c, eps, MAX_PAGES, NUM_PAGES,
    stride_qt, stride_qn, stride_kt, stride_kn, stride_vt, stride_vn, stride_cos, stride_sin,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, WINDOW: tl.constexpr,
    BN: tl.constexpr, LOG2_BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr,
    NORMED: tl.constexpr, INTERLEAVED: tl.constexpr, UPCAST: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Compute one sequence and key head. p_out: [B, H, D], p_lse: [B, H]. Grid: B H / G.

    G <= BM heads share the key. PAGES: the page ids of a split, which are all loaded.
    """
    HEADS: tl.constexpr = H // G
    i_b, i_h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    if not STATIC:
        settle()
    # Position i_own is that of this step. Pages are blocks. Memory below i_bottom may hold anything.
    i_own = tl.load(p_lens + i_b) - 1
    i_last = tl.maximum(i_own, 0) // BN * BN
    i_bottom = tl.zeros_like(i_last)
    if WINDOW > 0:
        i_bottom = tl.maximum(i_own + 1 - WINDOW, 0)
    i_low = i_bottom // BN * BN
    b_pages = ()
    for u in tl.static_range(PAGES):
        i_entry = i_low // BN + u
        i_page = tl.load(p_table + i_b * MAX_PAGES + i_entry, mask=i_entry < MAX_PAGES, other=0)
        # Triton has no unpacking.
        b_pages = b_pages + (i_page,)  # type: ignore[assignment]  # noqa: RUF005
    i_head = i_h.to(tl.int64) * NUM_PAGES
    o_d, o_block = tl.arange(0, D), tl.arange(0, BN)
    b_ks = ()
    b_vs = ()
    for u in tl.static_range(TAIL):
        i_n = i_last - (TAIL - 1 - u) * BN
        i_page = b_pages[0]  # type: ignore[misc]
        for w in tl.static_range(1, PAGES):
            i_page = tl.where((i_n - i_low) // BN == w, b_pages[w], i_page)
        o_n = i_n + o_block
        m_old = (o_n >= i_bottom) & (o_n < i_own)
        o_row = ((i_head + i_page) * PAGE + o_block) * D
        b_old_v = tl.load(p_v_cache + o_row[:, None] + o_d[None, :], mask=m_old[:, None], other=0.0)
        if UPCAST:
            # The bits of numpy's products depend on the layout of an operand, so take that of the chain.
            b_old_k = tl.trans(tl.load(p_k_cache + o_row[:, None] + o_d[None, :], mask=m_old[:, None], other=0.0))
        else:
            # Transposed by the load instead of by its use, it goes to shared memory at once.
            b_old_k = tl.load(p_k_cache + o_row[None, :] + o_d[:, None], mask=m_old[None, :], other=0.0)
        b_ks = b_ks + (b_old_k,)  # type: ignore[assignment]  # noqa: RUF005
        b_vs = b_vs + (b_old_v,)  # type: ignore[assignment]  # noqa: RUF005
    i_tail = tl.maximum(i_last - (TAIL - 1) * BN, i_low)
    if STATIC:
        BYTES: tl.constexpr = p_k.dtype.element_ty.primitive_bitwidth // 8
        for u in tl.static_range(PAGES):
            if i_low + u * PAGE < i_tail:
                prefetch(p_k_cache, i_head + b_pages[u], PAGE * D * BYTES)
                prefetch(p_v_cache, i_head + b_pages[u], PAGE * D * BYTES)
        if NORMED:
            prefetch(p_q_norm, 0, D * p_q_norm.dtype.element_ty.primitive_bitwidth // 8)
            prefetch(p_k_norm, 0, D * p_k_norm.dtype.element_ty.primitive_bitwidth // 8)
        settle()

    DTYPE: tl.constexpr = p_q.dtype.element_ty
    o_m = tl.arange(0, BM)
    b_value = tl.load(p_v + i_b * stride_vt + i_h * stride_vn + o_d)
    is_written, o_entry = slot_of(p_slots, i_b, PAGE * D, D, PAGE)
    p_cos, p_sin = p_cos + i_b * stride_cos, p_sin + i_b * stride_sin
    b_read = read_key(
        p_k + i_b * stride_kt + i_h * stride_kn, p_cos, p_sin, p_k_norm,
        D=D, BK=BK, NORMED=NORMED, INTERLEAVED=INTERLEAVED
    )  # fmt: skip
    b_first, b_second, _ = rotated_heads(
        p_q + i_b * stride_qt + i_h * G * stride_qn, stride_qn, o_m, G, p_cos, p_sin, p_q_norm, eps, D // 2,
        INTERLEAVED=INTERLEAVED, BN=BM, BH=D // 2, BD=D if NORMED else 0, REST=0
    )  # fmt: skip
    b_q = join_halves(b_first, b_second, DTYPE)
    b_key = rotated_key(b_read, D, eps, NORMED).to(DTYPE)
    o_entry += i_head * (PAGE * D)
    tl.store(p_k_cache + o_entry + o_d, b_key, mask=is_written)
    tl.store(p_v_cache + o_entry + o_d, b_value, mask=is_written)
    if UPCAST:
        b_q = b_q.to(tl.float32)

    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM, BN], dtype=tl.float32)
    b_acc = tl.zeros([BM, D], dtype=tl.float32)
    for i_n in tl.range(i_low, i_tail, BN):
        o_n = i_n + o_block
        m_n = o_n < i_own
        if WINDOW > 0:
            m_n = m_n & (o_n >= i_bottom)
        i_page = b_pages[0]  # type: ignore[misc]
        for w in tl.static_range(1, PAGES):
            i_page = tl.where((i_n - i_low) // BN == w, b_pages[w], i_page)
        o_key = ((i_head + i_page) * PAGE + o_block)[:, None] * D + o_d[None, :]
        b_k = tl.load(p_k_cache + o_key, mask=m_n[:, None], other=0.0)
        b_v = tl.load(p_v_cache + o_key, mask=m_n[:, None], other=0.0)
        if UPCAST:
            b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
        b_m, b_l, b_acc = attend_block(
            b_q, b_k, b_v, m_n[None, :], b_m, b_l, b_acc, c, p_v.dtype.element_ty, SWAP=False, UPCAST=UPCAST
        )
    # First all scores and maxima of the tail, then its sums in order: the same sums with fewer consecutive waits.
    b_ss = ()
    for u in tl.static_range(TAIL):
        o_n = i_last - (TAIL - 1 - u) * BN + o_block
        b_k = b_ks[u]  # type: ignore[misc]
        if u == TAIL - 1:
            b_k = tl.where((o_n == i_own)[None, :], b_key[:, None], b_k)
        if UPCAST:
            b_k = tl.trans(tl.trans(b_k).to(tl.float32))
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
        b_s = tl.where(((o_n >= i_bottom) & (o_n <= i_own))[None, :], b_s * c, float("-inf"))
        b_ss = b_ss + (b_s,)  # type: ignore[assignment]  # noqa: RUF005
    b_tops = row_maxima(b_ss, TAIL)
    for u in tl.static_range(TAIL):
        b_new = tl.maximum(b_m, b_tops[u])  # type: ignore[misc]
        b_p, b_alpha, b_wide = softmax_under(b_ss[u], b_m, b_new, 1)  # type: ignore[misc]
        b_m = b_new
        b_l = tl.fma(b_l, b_wide, b_p)
        b_v = b_vs[u]  # type: ignore[misc]
        if u == TAIL - 1:
            b_v = tl.where((i_last + o_block == i_own)[:, None], b_value[None, :], b_v)
        if UPCAST:
            b_p, b_v = round_to(b_p, DTYPE), b_v.to(tl.float32)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")

    b_inv, b_lse = split_result(b_m, sum_over_keys(b_l, BM, BN, LOG2_BN, 1))
    b_acc = b_acc * b_inv[:, None]
    o_out = i_b * H + i_h * G + o_m
    p_o = p_out + o_out[:, None] * D + o_d[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=(o_m < G)[:, None])
    tl.store(p_lse + o_out, b_lse, mask=o_m < G)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig(Config):
    """kernel: the launches of the chain, which choose their own configs ("chain"), or one launch ("one").

    BM: rows per tile, at least the heads of a group. TAIL: see the module.
    """

    kernel: Literal["chain", "one"]
    BM: int = 16
    TAIL: int = 1


CHAIN = StepConfig(kernel="chain")
# Bytes of shared memory for keys and values. Queries and sums use the rest.
_STAGED = 200 << 10
CONFIGS = (
    CHAIN,
    StepConfig(kernel="one", TAIL=1, num_stages=4),
    StepConfig(kernel="one", TAIL=2, num_stages=4),
    StepConfig(kernel="one", TAIL=2, num_stages=4, num_warps=8),
    StepConfig(kernel="one", TAIL=4, num_stages=3, num_warps=8),
)


def shape_class(group: int, dim: int, sequences: int) -> str:
    """Return the shape class: heads that share a key head, their width, few or many sequences."""
    return f"M{group} D{dim} {'few' if sequences <= 8 else 'many'}"


def configs_for(group: int) -> tuple[StepConfig, ...]:
    """Return the configs whose tile suits `group` heads."""
    return tuple(config for config in CONFIGS if config == CHAIN or group <= config.BM)


def key_rows(num_warps: int, dim: int) -> int:
    """Return the least rows of a tile of heads of `dim` values that is summed in the order of rms_norm."""
    return max(1, 256 * num_warps // dim)


def in_one_launch(
    q: torch.Tensor,
    cos: torch.Tensor,
    tables: DecodeTables,
    config: StepConfig,
    *,
    group: int,
    normed: bool,
    split: int,
) -> bool:
    """Whether `config` can run this step in one launch."""
    dim = q.shape[2]
    one_split = tables.num_queries == 1 and tables.max_splits(split) == 1 and tables.page_size == BLOCK
    whole = 2 * cos.shape[1] >= dim >= 32 and dim == triton.next_power_of_2(dim)
    rows = key_rows(config.num_warps, dim)
    alike = not normed or (sums_alike(config.BM, config.num_warps, dim) and sums_alike(rows, config.num_warps, dim))
    # The tail must fit the registers and, with the loop's blocks in flight, the shared memory.
    block = 2 * BLOCK * dim * q.element_size()
    held = config.TAIL * block <= 512 * 32 * config.num_warps
    staged = (config.num_stages + config.TAIL - 2) * block <= _STAGED
    return one_split and whole and alike and group <= config.BM and (interpreted() or (held and staged))


def rope_gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    interleaved: bool,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    static_tables: bool = False,
    lone_rows: bool = False,
    split: int = GQA_SPLIT,
    config: StepConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.rope_gqa_decode`. Raises ValueError for a `config` of one launch that cannot run it."""
    op = "rope_gqa_decode"
    heads, dim = q.shape[1:]
    group, normed = heads // k.shape[1], q_norm is not None
    given = config
    if config is None:
        config = tuning.choose(op, shape_class(group, dim, q.shape[0]), q, (StepConfig,), lambda: CHAIN)
    one = config.kernel == "one" and lone_rows
    one = one and in_one_launch(q, cos, tables, config, group=group, normed=normed, split=split)
    if given is not None and given.kernel == "one" and not one:
        raise ValueError(f"{op}: {given} cannot run {heads} heads of {dim} with these tables in one launch")
    named: dict[str, Any] = {"interleaved": interleaved, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    if not one:
        q = rope_cache_write_gqa(q, k, v, cos, sin, slot_mapping, k_cache, v_cache, **named)
        return gqa_decode(q, k_cache, v_cache, tables=tables, scale=scale, static_tables=static_tables, split=split)
    check_rows(op, q=q, k=k, v=v, cos=cos, sin=sin, slot_mapping=slot_mapping, k_cache=k_cache, v_cache=v_cache)
    check_rows(op, q=q, q_norm=q_norm, k_norm=k_norm)
    num_pages, page = k_cache.shape[1:3]
    check_tables(op, tables, num_pages)
    check_indices(op, low=-1, high=num_pages * page, slot_mapping=slot_mapping)
    out, lse = new_partials(q, tables=tables, sums=SplitSums(heads=heads, dim=dim, split=split))
    if out.numel():
        norms = (q if q_norm is None else q_norm, k if k_norm is None else k_norm)
        inputs = (q, k, v, cos, sin, *norms, slot_mapping, k_cache, v_cache, tables.page_table, tables.kv_lens)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0))
        _rope_gqa_decode_kernel[(q.shape[0] * k.shape[1],)](
            *inputs,
            out,
            lse,
            scale * LOG2E,
            eps,
            tables.page_table.shape[1],
            num_pages,
            *strides,
            H=heads,
            G=group,
            D=dim,
            PAGE=page,
            PAGES=triton.cdiv(split, BLOCK),
            WINDOW=tables.window or 0,
            BN=BLOCK,
            LOG2_BN=BLOCK.bit_length() - 1,
            BM=config.BM,
            BK=key_rows(config.num_warps, dim) if normed else 1,
            TAIL=config.TAIL,
            NORMED=normed,
            INTERLEAVED=interleaved,
            UPCAST=interpreted(),
            STATIC=static_tables,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **UNFUSED,
            **dependent(q),
        )
    return combine_splits(out, lse, dtype=q.dtype, heads=heads, tables=tables, split=split)
