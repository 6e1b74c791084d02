"""Triton: parts that the decode attentions over device-side tables share: work lists, splits, the online softmax.

A sequence's keys are cut at multiples of SPLIT positions. Splits are numbered from 0 at the first one that any of its
queries sees. A window or a shorter length may hide a split from a query, which leaves the query's sums unchanged, bit
for bit. Sums over keys have one order for every layout.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.launch import check_indices, num_multiprocessors
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.types.decode_tables import DecodeTables

LOG2E = 1.4426950408889634
# Launch options: fuse products and sums only in `tl.fma`, so that all tiles round alike.
UNFUSED = MappingProxyType({"enable_fp_fusion": False})


def check_tables(op: str, tables: DecodeTables, num_pages: int) -> None:
    """Raise ValueError for invalid lengths or pages. On a GPU this needs `launch.checked()`."""
    longest = tables.page_table.shape[1] * tables.page_size
    check_indices(op, low=0, high=longest + 1, kv_lens=tables.kv_lens)
    check_indices(op, low=0, high=num_pages, page_table=tables.page_table)


def num_programs(work: int, x: torch.Tensor, per_multiprocessor: int) -> int:
    """Return the programs that share `work` pieces: at most those that run at once, or two in the interpreter."""
    if not x.is_cuda:
        return min(work, 2)
    return min(work, per_multiprocessor * num_multiprocessors(x))


class _Tiled(Protocol):
    @property
    def BM(self) -> int: ...


T = TypeVar("T", bound=_Tiled)


def fitting(configs: Sequence[T], rows: int) -> tuple[T, ...]:
    """Return the configs whose tile of BM rows, at most 64, suits `rows` rows of a sequence."""
    rows = max(rows, 16)
    return tuple(c for c in configs if c.BM // 2 < rows <= 2 * c.BM or (c.BM == 64 and rows > 64))


@triton.jit
def split_span(b_lens, WINDOW: tl.constexpr, SPLIT: tl.constexpr, AXIS: tl.constexpr):
    """Return (first, end) of the splits that queries of these lengths see, over AXIS. A length of 0 is padding."""
    i_end = tl.cdiv(tl.max(b_lens, AXIS), SPLIT)
    if WINDOW > 0:
        b_low = tl.where(b_lens > 0, tl.maximum(b_lens - WINDOW, 0), 2147483647)
        i_first = tl.minimum(tl.min(b_low, AXIS) // SPLIT, i_end)
    else:
        i_first = tl.zeros_like(i_end)
    return i_first, i_end


@triton.jit
def work_ends(
    p_lens, B, Q: tl.constexpr, BB: tl.constexpr, BQ: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST
):
    """Return [BB] int32: the splits of sequences 0 to b together, at least LEAST each. p_lens: [B, Q]."""
    o_b, o_q = tl.arange(0, BB), tl.arange(0, BQ)
    m_b = (o_b < B)[:, None] & (o_q < Q)[None, :]
    b_lens = tl.load(p_lens + o_b[:, None] * Q + o_q[None, :], mask=m_b, other=0)
    i_first, i_end = split_span(b_lens, WINDOW, SPLIT, 1)
    return tl.cumsum(tl.where(o_b < B, tl.maximum(i_end - i_first, LEAST), 0), 0)


@triton.jit
def find_work(i_work, b_ends):
    """Return (sequence, its split) of piece i_work, counted over all sequences in order."""
    m_before = b_ends <= i_work
    return tl.sum(m_before.to(tl.int32), 0), i_work - tl.max(tl.where(m_before, b_ends, 0), 0)


@triton.jit
def keys_seen(
    p_lens, i_b, i_s, o_query, m_row, Q: tl.constexpr, BQ: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Return (b_len, b_low, i_low, i_bottom, i_high): the keys of split i_s of sequence i_b that each row sees.

    Row m is query o_query[m] if m_row, and sees positions [b_low[m], b_len[m]). Blocks of BN from i_low to i_high cover
    all keys of the split that any row sees. Memory below i_bottom and from i_high on may hold anything.
    """
    o_q = tl.arange(0, BQ)
    i_first, _ = split_span(tl.load(p_lens + i_b * Q + o_q, mask=o_q < Q, other=0), WINDOW, SPLIT, 0)
    b_len = tl.load(p_lens + i_b * Q + o_query, mask=m_row, other=0)
    i_high = tl.minimum(tl.max(b_len, 0), (i_first + i_s + 1) * SPLIT)
    i_low = (i_first + i_s) * SPLIT
    i_bottom = i_low
    b_low = tl.zeros_like(b_len)
    if WINDOW > 0:
        b_low = tl.maximum(b_len - WINDOW, 0)
        i_bottom = tl.min(tl.where(b_len > 0, b_low, 2147483647), 0)
        # If no row sees anything, no block remains whose pages would be read.
        i_low = tl.maximum(i_low, tl.minimum(i_bottom, i_high) // BN * BN)
    return b_len, b_low, i_low, i_bottom, i_high


@triton.jit
def cache_rows(p_pages, i_n, o_n, m_n, i_page0, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return [BN] int64: the cache rows, from page i_page0 on, of positions o_n (i_n to i_n + BN - 1) where m_n."""
    if PAGE == BN:
        i_page = tl.load(p_pages + i_n // PAGE).to(tl.int64)
        o_row = (i_page0 + i_page) * PAGE + tl.arange(0, BN)
    else:
        i_page = tl.load(p_pages + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
        o_row = (i_page0 + i_page) * PAGE + o_n % PAGE
    return o_row


@triton.jit
def sees(o_n, b_len, b_low, AXIS: tl.constexpr):
    """Return the mask of the positions o_n that each row sees, with keys along AXIS."""
    o_n = tl.expand_dims(o_n, 1 - AXIS)
    return (o_n < tl.expand_dims(b_len, AXIS)) & (o_n >= tl.expand_dims(b_low, AXIS))


@triton.jit
def sum_over_keys(b_x, BM: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr, AXIS: tl.constexpr):
    """Sum the BN values along AXIS by halves, (n, n + BN / 2) first. The order of `tl.sum` depends on the tile."""
    for i in tl.static_range(LOG2_BN):
        if AXIS == 1:
            b_x = tl.sum(tl.reshape(b_x, [BM, 2, BN >> (i + 1)]), 1)
        else:
            b_x = tl.sum(tl.reshape(b_x, [2, BN >> (i + 1), BM]), 0)
    return tl.reshape(b_x, [BM])


@triton.jit
def softmax_step(b_s, m_seen, b_m, c, AXIS: tl.constexpr):
    """Apply the online softmax to a block of scores b_s, keys along AXIS, with the running maximum b_m.

    c > 0: the scale times log2(e). Return (p, factor of the earlier sums, the same in the shape of p, new b_m).
    """
    b_s = tl.where(m_seen, b_s * c, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, AXIS))
    b_p, b_alpha, b_wide = softmax_under(b_s, b_m, b_new, AXIS)
    return b_p, b_alpha, b_wide, b_new


@triton.jit
def softmax_under(b_s, b_m, b_new, AXIS: tl.constexpr):
    """`softmax_step` for scaled and masked scores whose new maximum b_new is known. Return all but b_new."""
    # If nothing was seen yet, -inf - -inf would be NaN.
    b_top = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - tl.expand_dims(b_top, AXIS))
    b_alpha = tl.exp2(b_m - b_top)
    return b_p, b_alpha, tl.broadcast_to(tl.expand_dims(b_alpha, AXIS), b_s.shape)


@triton.jit
def attend_block(
    b_q, b_k, b_v, m_seen, b_m, b_l, b_acc, c, DTYPE: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr
):
    """Update maxima b_m, sums per key b_l and sums of values b_acc with keys b_k [BN, BD] and values b_v [BN, BV].

    b_m [BM]; b_q [BM, BD], b_l [BM, BN], b_acc [BM, BV] and m_seen are transposed if SWAP. DTYPE: of the values.
    """
    AXIS: tl.constexpr = 0 if SWAP else 1
    b_s = tl.dot(b_k, b_q, input_precision="ieee") if SWAP else tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_p, b_alpha, b_wide, b_m = softmax_step(b_s, m_seen, b_m, c, AXIS)
    b_l = tl.fma(b_l, b_wide, b_p)
    if UPCAST:
        b_p = round_to(b_p, DTYPE)
    b_acc = b_acc * tl.expand_dims(b_alpha, AXIS)
    if SWAP:
        b_acc = tl.dot(tl.trans(b_v), b_p.to(b_v.dtype), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_m, b_l, b_acc


@triton.jit
def split_result(b_m, b_sum):
    """Return (factor of the sum of values, natural log-sum-exp) of a split; (0, -inf) if it saw nothing."""
    m_any = b_sum > 0
    b_sum = tl.where(m_any, b_sum, 1.0)
    b_lse = (b_m + tl.log2(b_sum)) * 0.6931471805599453
    return tl.where(m_any, tl.div_rn(1.0, b_sum), 0.0), tl.where(m_any, b_lse, float("-inf"))
