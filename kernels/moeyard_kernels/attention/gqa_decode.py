"""Triton: decode attention with grouped query heads over device-side tables, split along the keys.

The rows of a sequence and key head are its queries times the heads of the group. For each split of SPLIT positions, the
kernel takes blocks of BN positions in ascending order:

    s = q k^T;  s = c s;  m' = max(m, max s);  p = 2^(s - m');  a = 2^(m - m');  l = fma(l, a, p);  o = o a + bf16(p) v

The caches are [Hkv, num_pages, page, D], so a block of one head is a contiguous piece of a page.

With few programs, the time is a chain of latencies. So the launch may begin early (EARLY). If the caller says that the
tables are old (`static_tables`), it reads lengths and page ids before its wait, and prefetches the pages into the L2.
It lets the next launch begin at once: the merge, or the product after it, which then copies its weights meanwhile. A
launch of many programs does not, because its successor's programs would spread unevenly (docs/journal.md). If the table
holds one split (ONE), which is so up to 512 keys, no work has to be counted.

PAGES loads all page ids of a split at once. A page id that is read in the loop takes stages of the pipeline: it leaves
keys and values one buffer with num_stages=4, and two with 5. Without it they have three and four.
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
    attend_block,
    cache_rows,
    check_tables,
    find_work,
    fitting,
    keys_seen,
    num_programs,
    sees,
    split_result,
    sum_over_keys,
    work_ends,
)
from moeyard_kernels.common import tuning
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import interpreted
from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.decode_tables import BLOCK, GQA_SPLIT, DecodeTables
from moeyard_kernels.types.footprint import SplitSums

# Bytes of a line of the L2, and the instruction that prefetches one.
_LINE = tl.constexpr(128)
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# The most programs that leave multiprocessors free.
_FREE = 128
_FEW = tl.constexpr(_FREE)


@triton.jit
def settle():
    """Wait for the launches before this one. Let the next one begin if this launch has few programs."""
    wait_for_previous()
    if tl.num_programs(0) <= _FEW:
        let_next_begin()


@triton.jit
def prefetch(p_cache, i_page, BYTES: tl.constexpr):
    """Prefetch a page of BYTES, a power of two, into the L2."""
    if not INTERPRETED:
        LINES: tl.constexpr = BYTES // _LINE if BYTES > _LINE else 1
        o_line = tl.arange(0, LINES) * _LINE
        p_line = p_cache.to(tl.int64, bitcast=True) + i_page * BYTES + o_line
        tl.inline_asm_elementwise(_PREFETCH, "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=("B", "MAX_PAGES", "S", "NUM_PAGES"))
def _gqa_decode_kernel(
    p_q, p_k, p_v, p_table, p_lens, p_out, p_lse, c, B, MAX_PAGES, S, NUM_PAGES,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr, BB: tl.constexpr,
    BQ: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
    ONE: tl.constexpr, PAGES: tl.constexpr, EARLY: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Loop over (sequence, split, key head, tile of rows). p_out: [B, S, Q H, V], p_lse: [B, S, Q H].

    G query heads share a key head. Row m of the Q G rows is query m // G, head m % G of the group. ONE: S is 1. PAGES:
    the page ids of a split, all loaded before its loop (pages are blocks then), or 0 to load each in the loop.
    """
    TILES: tl.constexpr = (Q * G + BM - 1) // BM
    HEADS: tl.constexpr = H // G
    AXIS: tl.constexpr = 0 if SWAP else 1
    if EARLY and not STATIC:
        settle()
    num_pieces = B
    if not ONE:
        b_ends = work_ends(p_lens, B, Q, BB, BQ, WINDOW, SPLIT, 0)
        num_pieces = tl.max(b_ends, 0)
    o_d, o_v = tl.arange(0, BD), tl.arange(0, BV)
    for i_item in tl.range(tl.program_id(0), num_pieces * (HEADS * TILES), tl.num_programs(0)):
        if ONE:
            # The interpreter's range gives plain integers here.
            i_item = tl.cast(i_item, tl.int32)
            i_b, i_s = i_item // (HEADS * TILES), 0
        else:
            i_b, i_s = find_work(i_item // (HEADS * TILES), b_ends)
        i_h = i_item // TILES % HEADS
        o_m = (i_item % TILES) * BM + tl.arange(0, BM)
        m_m = o_m < Q * G
        b_len, b_low, i_low, i_bottom, i_high = keys_seen(
            p_lens, i_b, i_s, o_m // G, m_m, Q=Q, BQ=BQ, WINDOW=WINDOW, SPLIT=SPLIT, BN=BN
        )
        p_pages = p_table + i_b.to(tl.int64) * MAX_PAGES
        if PAGES > 0:
            # Scalars, because a choice among elements of a tensor goes through shared memory.
            b_pages = ()
            for u in tl.static_range(PAGES):
                i_entry = i_low // PAGE + u
                i_page = tl.load(p_pages + i_entry, mask=i_entry < MAX_PAGES, other=0)
                # Triton has no unpacking.
                b_pages = b_pages + (i_page,)  # type: ignore[assignment]  # noqa: RUF005
        if EARLY and STATIC:
            if PAGES > 0 and BD == D and BV == V:
                # Earlier steps wrote these pages, except for this step's row of the last page.
                i_first = i_h.to(tl.int64) * NUM_PAGES
                for u in tl.static_range(PAGES):
                    if i_low + u * PAGE < i_high:
                        prefetch(p_k, i_first + b_pages[u], PAGE * D * p_k.dtype.element_ty.primitive_bitwidth // 8)
                        prefetch(p_v, i_first + b_pages[u], PAGE * V * p_v.dtype.element_ty.primitive_bitwidth // 8)
            settle()

        # Rows of q and of the results: (query, head).
        o_row = o_m // G * H + i_h * G + o_m % G
        i_row = i_b.to(tl.int64) * (Q * H)
        b_q = tl.load(
            p_q + (i_row + o_row)[:, None] * D + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0
        )
        if UPCAST:
            b_q = b_q.to(tl.float32)
        if SWAP:
            b_q = tl.trans(b_q)
            b_acc = tl.zeros([BV, BM], dtype=tl.float32)
            b_l = tl.zeros([BN, BM], dtype=tl.float32)
        else:
            b_acc = tl.zeros([BM, BV], dtype=tl.float32)
            b_l = tl.zeros([BM, BN], dtype=tl.float32)
        b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
        i_head = i_h.to(tl.int64) * NUM_PAGES
        for i_n in tl.range(i_low, i_high, BN):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < i_high
            if WINDOW > 0:
                m_n = m_n & (o_n >= i_bottom)
            if PAGES > 0:
                i_page = b_pages[0]  # type: ignore[misc]
                for u in tl.static_range(1, PAGES):
                    i_page = tl.where((i_n - i_low) // BN == u, b_pages[u], i_page)
                o_key = (i_head + i_page) * PAGE + tl.arange(0, BN)
            else:
                o_key = cache_rows(p_pages, i_n, o_n, m_n, i_head, PAGE=PAGE, BN=BN)
            m_k, m_v = m_n[:, None], m_n[:, None]
            if BD != D:
                m_k = m_k & (o_d < D)[None, :]
            if BV != V:
                m_v = m_v & (o_v < V)[None, :]
            b_k = tl.load(p_k + o_key[:, None] * D + o_d[None, :], mask=m_k, other=0.0)
            b_v = tl.load(p_v + o_key[:, None] * V + o_v[None, :], mask=m_v, other=0.0)
            if UPCAST:
                b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
            b_m, b_l, b_acc = attend_block(
                b_q, b_k, b_v, sees(o_n, b_len, b_low, AXIS), b_m, b_l, b_acc, c, p_v.dtype.element_ty,
                SWAP=SWAP, UPCAST=UPCAST
            )  # fmt: skip

        b_inv, b_lse = split_result(b_m, sum_over_keys(b_l, BM, BN, LOG2_BN, AXIS))
        b_acc = b_acc * tl.expand_dims(b_inv, AXIS)
        if SWAP:
            b_acc = tl.trans(b_acc)
        o_out = (i_b.to(tl.int64) * S + i_s) * (Q * H) + o_row
        m_out = m_m[:, None] & (o_v < V)[None, :]
        tl.store(p_out + o_out[:, None] * V + o_v[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_out)
        tl.store(p_lse + o_out, b_lse, mask=m_m)
    if EARLY and STATIC:
        # Programs without work wait too, so that launches complete in order.
        wait_for_previous()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig(Config):
    """BM: rows (queries times heads of a group) per tile. PER_SM: programs per multiprocessor.

    SWAP: keys are the rows of the products, which suits few rows. PAGES_AHEAD, EARLY: see the module.
    """

    kernel: Literal["triton"] = "triton"
    BM: int
    SWAP: bool
    PER_SM: int
    PAGES_AHEAD: bool = False
    EARLY: bool = False


# The table has one split; several, but the programs leave multiprocessors free; more.
Spread = Literal["short", "free", "full"]

_LONG = (
    GroupedConfig(BM=16, SWAP=False, PER_SM=4, num_warps=2, num_stages=4),
    GroupedConfig(BM=16, SWAP=False, PER_SM=2, num_warps=4, num_stages=5),
    GroupedConfig(BM=16, SWAP=True, PER_SM=3, num_warps=4, num_stages=4),
    GroupedConfig(BM=16, SWAP=True, PER_SM=2, num_warps=4, num_stages=5),
    GroupedConfig(BM=32, SWAP=False, PER_SM=2, num_warps=4, num_stages=4),
    GroupedConfig(BM=64, SWAP=False, PER_SM=2, num_warps=4, num_stages=3),
    GroupedConfig(BM=16, SWAP=False, PER_SM=2, num_warps=2, num_stages=4, PAGES_AHEAD=True),
    GroupedConfig(BM=16, SWAP=False, PER_SM=3, num_warps=2, num_stages=3, PAGES_AHEAD=True),
    GroupedConfig(BM=16, SWAP=False, PER_SM=2, num_warps=4, num_stages=4, PAGES_AHEAD=True),
    GroupedConfig(BM=16, SWAP=False, PER_SM=1, num_warps=4, num_stages=6, PAGES_AHEAD=True),
    GroupedConfig(BM=32, SWAP=False, PER_SM=2, num_warps=4, num_stages=4, PAGES_AHEAD=True),
)


def _short(num_stages: int, num_warps: int, *, SWAP: bool = False, PER_SM: int = 1, BM: int = 16) -> GroupedConfig:
    return GroupedConfig(
        BM=BM, SWAP=SWAP, PER_SM=PER_SM, num_warps=num_warps, num_stages=num_stages, PAGES_AHEAD=True, EARLY=True
    )


# For tables of one split and for few programs: deeper pipelines, and more warps for the work between blocks.
_SHORT = (
    _short(4, 2, PER_SM=2),
    _short(4, 4, PER_SM=2),
    _short(6, 4),
    _short(6, 8),
    _short(6, 4, SWAP=True),
    _short(4, 4, BM=32, PER_SM=2),
    _short(3, 4, BM=64, PER_SM=2),
)
CONFIGS = (*_LONG, *_SHORT)
# For blocks so large that a multiprocessor holds one program.
_HUGE = tuple(GroupedConfig(BM=rows, SWAP=False, PER_SM=1, num_warps=8, num_stages=4) for rows in (16, 32, 64))
# Bytes of shared memory that a program may use, and of a block of 64 keys and values of 128 in bf16.
_SHARED, _USUAL_BLOCK = 220 << 10, 32 << 10


def spread_of(rows: int, sequences: int, splits: int, kv_heads: int) -> Spread:
    """Return how a launch fills the multiprocessors, by the size of its tables: for a graph, that of its widest step.

    rows: per sequence and key head. Several splits of more than one small tile were not timed.
    """
    if splits == 1:
        return "short"
    return "free" if rows <= 16 and sequences * splits * kv_heads <= _FREE else "full"


def shape_class(rows: int, dim: int, sequences: int, spread: Spread) -> str:
    """Return the shape class: rows per sequence and key head, width of a key, few or many sequences, spread."""
    return f"M{rows} D{dim} {'few' if sequences <= 8 else 'many'}{'' if spread == 'full' else f' {spread}'}"


def configs_for(rows: int) -> tuple[GroupedConfig, ...]:
    """Return the configs whose tile suits `rows` rows."""
    return fitting(CONFIGS, rows)


def default_config(rows: int, spread: Spread, *, block_bytes: int = 0) -> GroupedConfig:
    """Return the config of untuned shapes.

    block_bytes: keys and values of a block. Short configs have three blocks in flight, which fit for heads of 256 in
    bf16 but not in fp32.
    """
    size = 0 if rows <= 16 else 1 if rows <= 32 else 2
    if 3 * block_bytes > _SHARED:
        return _HUGE[size]
    wide = block_bytes > _USUAL_BLOCK
    if spread == "full":
        # With two warps, each would hold too much of a wide row.
        return (_LONG[1] if wide else _LONG[0], _LONG[4], _LONG[5])[size]
    return (_SHORT[2] if spread == "free" and not wide else _SHORT[1], _SHORT[5], _SHORT[6])[size]


def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
    split: int = GQA_SPLIT,
    config: GroupedConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.gqa_decode`. Returns (out [rows, Hq, Dv], lse [rows, Hq] fp32)."""
    heads, dim = q.shape[1:]
    sequences, queries, splits = tables.num_sequences, tables.num_queries, tables.max_splits(split)
    kv_heads, num_pages, _, dim_v = v_cache.shape
    group = heads // kv_heads
    rows = queries * group
    check_tables("gqa_decode", tables, num_pages)
    sums = SplitSums(heads=heads, dim=dim_v, split=split)
    if len(turns := tables.turns(sums)) > 1:
        named: dict[str, Any] = {"scale": scale, "static_tables": static_tables, "split": split, "config": config}
        return concatenate(gqa_decode(q[part], k_cache, v_cache, tables=some, **named) for part, some in turns)
    if config is None:
        spread = spread_of(rows, sequences, splits, kv_heads)
        config = tuning.choose(
            "gqa_decode",
            shape_class(rows, dim, sequences, spread),
            q,
            (GroupedConfig,),
            lambda: default_config(rows, spread, block_bytes=BLOCK * (dim + dim_v) * k_cache.element_size()),
        )
    partial, lse = new_partials(q, tables=tables, sums=sums)
    if partial.numel():
        work = sequences * splits * kv_heads * triton.cdiv(rows, config.BM)
        pages = triton.cdiv(split, BLOCK) if config.PAGES_AHEAD and tables.page_size == BLOCK else 0
        tensors = (q, k_cache, v_cache, tables.page_table, tables.kv_lens, partial, lse)
        sizes = (sequences, tables.page_table.shape[1], splits, num_pages)
        _gqa_decode_kernel[(num_programs(work, q, config.PER_SM),)](
            *tensors,
            scale * LOG2E,
            *sizes,
            Q=queries,
            H=heads,
            G=group,
            D=dim,
            V=dim_v,
            PAGE=tables.page_size,
            WINDOW=tables.window or 0,
            SPLIT=split,
            BN=BLOCK,
            LOG2_BN=BLOCK.bit_length() - 1,
            BB=triton.next_power_of_2(sequences),
            BQ=triton.next_power_of_2(queries),
            BD=max(16, triton.next_power_of_2(dim)),
            BV=max(16, triton.next_power_of_2(dim_v)),
            BM=config.BM,
            SWAP=config.SWAP,
            UPCAST=interpreted(),
            ONE=splits == 1,
            PAGES=pages,
            EARLY=config.EARLY,
            STATIC=static_tables,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **UNFUSED,
            **(dependent(q) if config.EARLY else {}),
        )
    return combine_splits(
        partial, lse, dtype=q.dtype, heads=heads, tables=tables, split=split, static_tables=static_tables
    )
