"""Triton: compressed attention at output positions, over a window in a slot and entries in pages.

The keys of a row have one order: the window by position, then its entries, ascending. The window is one split. Entries
are split at multiples of 128, or of the least multiple of 128 that gives at most 16 splits. A split takes blocks of 64
keys in ascending order:

    s = c q k^T;  m' = max(m, max s);  p = 2^(s - m');  a = 2^(m - m');  l = fma(l, a, p);  o = o a + bf16(p) k

with c = D^-0.5 log2(e) and sums in fp32. It leaves o / sum(l) and its log-sum-exp. The merge begins with the sink and
takes splits in ascending order, as `attn_combine` does, then undoes the rotation. Splits depend on the row's position
alone. The heads of a tile, and the side of the keys in the products (SWAP), change no bit.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.compressed_rotate import turned_back
from moeyard_kernels.attention.decode_splits import LOG2E, UNFUSED, attend_block, split_result, sum_over_keys
from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.attention.rope import half_block
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, interpreted
from moeyard_kernels.common.rounding import round_to, stored_as
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.footprint import COMPRESSED_SPLIT, COMPRESSED_SPLITS

# Up to this many rows, tiles have 16 heads, so that more programs share the work.
_FEW = 16
# Heads per program of the merge, and splits that it reads at once.
_HEADS, _AHEAD = 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig(Config):
    """BM heads per program. SWAP: keys are the rows of the products, which suits few heads."""

    kernel: Literal["triton"] = "triton"
    BM: int
    SWAP: bool


CONFIGS = (
    OutputConfig(BM=16, SWAP=True, num_warps=4, num_stages=2),
    OutputConfig(BM=16, SWAP=False, num_warps=4, num_stages=2),
    OutputConfig(BM=32, SWAP=True, num_warps=8, num_stages=2),
    OutputConfig(BM=64, SWAP=False, num_warps=8, num_stages=2),
)
# Fits a tile of fp32, whose products do not run on tensor cores.
_FP32 = OutputConfig(BM=16, SWAP=False, num_warps=8, num_stages=1)


def default_config(rows: int, heads: int) -> OutputConfig:
    """Return the config of bf16 rows."""
    return CONFIGS[0 if rows <= _FEW or heads <= 16 else 3]


@triton.jit
def _block_rows(
    p_window, p_pages, p_chosen, i_n, i_high, i_p, WINDOW: tl.constexpr, RING: tl.constexpr, RATIO: tl.constexpr,
    GRANULE: tl.constexpr, PAGE: tl.constexpr, CHOOSES: tl.constexpr, ENTRIES: tl.constexpr, chooses, BN: tl.constexpr
):  # fmt: skip
    """Return (rows, mask) of keys i_n to i_n + BN: of the row's slot, or of its entries in the pages if ENTRIES."""
    o_n = i_n + tl.arange(0, BN)
    if ENTRIES:
        m_n = o_n < i_high
        o_e = o_n
        if CHOOSES:
            o_e = tl.where(chooses, tl.load(p_chosen + o_n, mask=m_n & chooses, other=0), o_n)
        o_row = entry_places(p_pages, o_e, m_n, RATIO, GRANULE, PAGE)
    else:
        o_at = i_p - (WINDOW - 1) + o_n
        m_n = (o_n < WINDOW) & (o_at >= 0)
        o_row = tl.maximum(o_at, 0) % RING
    return o_row, m_n


@triton.jit
def _attend_split(
    p_q, p_keys, p_pages, p_chosen, p_out, p_lse, o_m, m_m, i_low, i_high, i_p, chooses, c,
    D: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RATIO: tl.constexpr, GRANULE: tl.constexpr,
    PAGE: tl.constexpr, CHOOSES: tl.constexpr, ENTRIES: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend from heads o_m over keys [i_low, i_high) of one kind; store the normalised sum and its log-sum-exp."""
    AXIS: tl.constexpr = 0 if SWAP else 1
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    b_q = tl.load(p_q + o_m[:, None] * D + o_d[None, :], mask=m_m[:, None] & m_d, other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    if SWAP:
        b_q = tl.trans(b_q)
        b_acc, b_l = tl.zeros([BD, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    else:
        b_acc, b_l = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BN], tl.float32)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    for i_n in tl.range(i_low, i_high, BN):
        o_row, m_n = _block_rows(
            p_keys, p_pages, p_chosen, i_n, i_high, i_p, WINDOW, RING, RATIO, GRANULE, PAGE, CHOOSES, ENTRIES, chooses,
            BN
        )  # fmt: skip
        m_x = m_n[:, None]
        if BD != D:
            m_x = m_x & m_d
        b_k = tl.load(p_keys + o_row.to(tl.int64)[:, None] * D + o_d[None, :], mask=m_x, other=0.0)
        if UPCAST:
            b_k = b_k.to(tl.float32)
        m_seen = tl.broadcast_to(tl.expand_dims(m_n, 1 - AXIS), b_l.shape)
        b_m, b_l, b_acc = attend_block(
            b_q, b_k, b_k, m_seen, b_m, b_l, b_acc, c, DTYPE=p_keys.dtype.element_ty, SWAP=SWAP, UPCAST=UPCAST
        )
    # The merge starts beside the last results.
    let_next_begin()
    b_inv, b_lse = split_result(b_m, sum_over_keys(b_l, BM, BN, LOG2_BN, AXIS))
    b_acc = b_acc * tl.expand_dims(b_inv, AXIS)
    if SWAP:
        b_acc = tl.trans(b_acc)
    tl.store(p_out + o_m[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None] & m_d)
    tl.store(p_lse + o_m, b_lse, mask=m_m)


@triton.jit
def _entries_seen(i_p, RATIO: tl.constexpr, TOP_K: tl.constexpr):
    """Return (entries that end at or before i_p, how many of them the row attends to), int32 like i_p."""
    i_count = (i_p + 1) // RATIO
    i_seen = i_count
    if TOP_K > 0:
        i_seen = tl.minimum(i_count, TOP_K)
    return i_count, i_seen


@triton.jit
def _split_of(i_seen, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Return the entries per split of a row that attends to i_seen of them."""
    return SPLIT * tl.cdiv(i_seen, SPLIT * MOST)


@triton.jit(do_not_specialize=("MAX_PAGES", "S"))
def _compressed_decode_kernel(
    p_q, p_recent, p_entries, p_chosen, p_positions, p_slots, p_table, p_out, p_lse, c, MAX_PAGES, S, Q,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RATIO: tl.constexpr,
    GRANULE: tl.constexpr, PAGE: tl.constexpr, TOP_K: tl.constexpr, CHOOSES: tl.constexpr, SPLIT: tl.constexpr,
    MOST: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: rows S TILES, tiles fastest. p_out: [rows, S, H, D], p_lse: [rows, S, H]. CHOOSES: p_chosen exists."""
    wait_for_previous()
    TILES: tl.constexpr = (H + BM - 1) // BM
    i_work = tl.program_id(0)
    i_s, i_r = i_work // TILES % S, (i_work // TILES // S).to(tl.int64)
    o_m = i_work % TILES * BM + tl.arange(0, BM)
    m_m = o_m < H
    i_p, i_b = tl.load(p_positions + i_r).to(tl.int32), i_r // Q
    p_q += i_r * (H * D)
    p_out += (i_r * S + i_s) * (H * D)
    p_lse += (i_r * S + i_s) * H
    if i_s == 0:
        p_keys = p_recent + tl.load(p_slots + i_b) * (RING * D)
        _attend_split(
            p_q, p_keys, p_table, p_table, p_out, p_lse, o_m, m_m, 0, WINDOW, i_p, False, c, D=D, WINDOW=WINDOW,
            RING=RING, RATIO=RATIO, GRANULE=GRANULE, PAGE=PAGE, CHOOSES=CHOOSES, ENTRIES=False, BN=BN, LOG2_BN=LOG2_BN,
            BD=BD, BM=BM, SWAP=SWAP, UPCAST=UPCAST
        )  # fmt: skip
    else:
        if RATIO > 0:
            i_count, i_seen = _entries_seen(i_p, RATIO, TOP_K)
            i_split = _split_of(i_seen, SPLIT, MOST)
            i_low = (i_s - 1) * i_split
            if i_low < i_seen:
                _attend_split(
                    p_q, p_entries, p_table + i_b * MAX_PAGES, p_chosen + i_r * TOP_K, p_out, p_lse, o_m, m_m, i_low,
                    tl.minimum(i_low + i_split, i_seen), i_p, i_count > i_seen, c, D=D, WINDOW=WINDOW, RING=RING,
                    RATIO=RATIO, GRANULE=GRANULE, PAGE=PAGE, CHOOSES=CHOOSES, ENTRIES=True, BN=BN, LOG2_BN=LOG2_BN,
                    BD=BD, BM=BM, SWAP=SWAP, UPCAST=UPCAST
                )  # fmt: skip


@triton.jit(do_not_specialize=("S",))
def _merge_kernel(
    p_part, p_lse, p_sink, p_positions, p_cos, p_sin, p_out, S, s_cos,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
    BS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge the splits of heads of one row and undo the rotation. Grid: (rows, ceil(H / BX))."""
    let_next_begin()
    wait_for_previous()
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_r = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    o_d, o_h, o_2h = tl.arange(0, BD), tl.arange(0, BH), tl.arange(0, 2 * BH)
    m_x = o_x < H
    m_d, m_h = m_x[:, None] & (o_d < D - 2 * HALF)[None, :], m_x[:, None] & (o_h < HALF)[None, :]
    i_splits = 1
    if RATIO > 0:
        _, i_seen = _entries_seen(tl.load(p_positions + i_r).to(tl.int32), RATIO, TOP_K)
        if i_seen > 0:
            i_splits += tl.cdiv(i_seen, _split_of(i_seen, SPLIT, MOST))
    b_sink = tl.load(p_sink + o_x, mask=m_x, other=0.0)
    o_s = tl.arange(0, BS)
    o_lse = (i_r * S + o_s)[None, :] * H + o_x[:, None]
    b_lses = tl.load(p_lse + o_lse, mask=m_x[:, None] & (o_s < i_splits)[None, :], other=float("-inf"))
    b_top = tl.maximum(b_sink, tl.max(b_lses, 1))
    b_sum = tl.exp2((b_sink - b_top) * 1.4426950408889634)
    b_acc = tl.zeros([BX, BD], tl.float32)
    b_first, b_second = tl.zeros([BX, BH], tl.float32), tl.zeros([BX, BH], tl.float32)
    for i_s in tl.range(0, i_splits, AHEAD):
        # Issue all loads before the first use, so that they are in flight together. Missing splits add exact zeros.
        b_parts = ()
        for u in tl.static_range(AHEAD):
            m_s = i_s + u < i_splits
            o_row = (i_r * S + i_s + u) * H + o_x
            p_row = p_part + o_row[:, None] * D
            p_half = p_row + (D - 2 * HALF) + o_h[None, :]
            b_part = (
                tl.load(p_lse + o_row, mask=m_x & m_s, other=float("-inf")),
                tl.load(p_row + o_d[None, :], mask=m_d & m_s, other=0.0),
                tl.load(p_half, mask=m_h & m_s, other=0.0),
                tl.load(p_half + HALF, mask=m_h & m_s, other=0.0),
            )
            # Triton has no unpacking.
            b_parts = b_parts + (b_part,)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(AHEAD):
            b_w = tl.exp2((b_parts[u][0] - b_top) * 1.4426950408889634)  # type: ignore[misc]
            b_sum += b_w
            b_wide = tl.broadcast_to(b_w[:, None], b_first.shape)
            b_acc = tl.fma(tl.broadcast_to(b_w[:, None], b_acc.shape), b_parts[u][1], b_acc)  # type: ignore[misc]
            b_first = tl.fma(b_wide, b_parts[u][2], b_first)  # type: ignore[misc]
            b_second = tl.fma(b_wide, b_parts[u][3], b_second)  # type: ignore[misc]
    b_inv = tl.div_rn(tl.full([BX], 1.0, tl.float32), b_sum)[:, None]
    b_first, b_second = round_to(b_first * b_inv, DTYPE), round_to(b_second * b_inv, DTYPE)
    b_cos = tl.load(p_cos + i_r * s_cos + o_h, mask=o_h < HALF, other=0.0)[None, :]
    b_sin = tl.load(p_sin + i_r * s_cos + o_h, mask=o_h < HALF, other=0.0)[None, :]
    b_pairs = turned_back(b_first, b_second, b_cos, b_sin, DTYPE)
    p_head = p_out + (i_r * H + o_x)[:, None] * D
    tl.store(p_head + o_d[None, :], stored_as(b_acc * b_inv, DTYPE), mask=m_d)
    m_2h = m_x[:, None] & (o_2h < 2 * HALF)[None, :]
    tl.store(p_head + (D - 2 * HALF) + o_2h[None, :], stored_as(b_pairs, DTYPE), mask=m_2h)


def compressed_decode(
    queries: torch.Tensor,
    recent: torch.Tensor,
    entries: torch.Tensor | None,
    chosen: torch.Tensor | None,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rows: CompressedRows,
    window: int,
    ratio: int,
    granule: int,
    top_k: int,
    config: OutputConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.compressed_decode`."""
    count, heads, dim = queries.shape
    out = torch.empty_like(queries)
    if not count:
        return out
    splits = rows.num_splits(ratio, top_k)
    part = torch.empty(count, splits, heads, dim, dtype=torch.float32, device=queries.device)
    lse = torch.empty(count, splits, heads, dtype=torch.float32, device=queries.device)
    if config is None:
        config = _FP32 if queries.dtype == torch.float32 else default_config(count, heads)
    work = count * splits * triton.cdiv(heads, config.BM)
    if work > MAX_GRID_X:
        raise ValueError(f"compressed_decode: {count} rows of {splits} splits exceed the grid of a GPU")
    sizes = {"H": heads, "D": dim, "RATIO": ratio, "TOP_K": top_k}
    sizes |= {"SPLIT": COMPRESSED_SPLIT, "MOST": COMPRESSED_SPLITS}
    block = max(16, triton.next_power_of_2(dim))
    _compressed_decode_kernel[(work,)](
        *(queries, recent, recent if entries is None else entries, rows.page_table if chosen is None else chosen),
        *(rows.positions, rows.slots, rows.page_table, part, lse),
        *(dim**-0.5 * LOG2E, rows.page_table.shape[1], splits, rows.num_queries),
        **sizes,
        WINDOW=window,
        RING=recent.shape[1],
        GRANULE=granule,
        PAGE=rows.page_size,
        CHOOSES=chosen is not None,
        BN=BLOCK,
        LOG2_BN=BLOCK.bit_length() - 1,
        BD=block,
        BM=config.BM,
        SWAP=config.SWAP,
        UPCAST=interpreted(),
        **config.options,
        **UNFUSED,
        **dependent(queries),
    )
    if cos.stride() != sin.stride():
        raise ValueError(f"compressed_decode: cos has strides {cos.stride()}, sin {sin.stride()}")
    some = triton.next_power_of_2(heads) if interpreted() else _HEADS
    _merge_kernel[(count, triton.cdiv(heads, some))](
        *(part, lse, sink, rows.positions, cos, sin, out),
        splits,
        cos.stride(0),
        **sizes,
        HALF=cos.shape[1],
        BX=some,
        BS=triton.next_power_of_2(splits),
        AHEAD=min(_AHEAD, triton.next_power_of_2(splits)),
        BD=block,
        BH=half_block(2 * cos.shape[1]),
        num_warps=4,
        **UNFUSED,
        **dependent(queries),
    )
    return out
