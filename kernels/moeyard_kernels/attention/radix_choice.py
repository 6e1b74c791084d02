"""Triton: the exact choice of the largest scores of a row, ties by lower index, in ascending order.

Scores become unsigned integers of the same order. A radix search over four digits of 8 bits finds the least chosen one.
Counts are integers, so no order matters. Then one pass over the scores takes those above it, and the first ones that
equal it.
"""

import triton
import triton.language as tl


@triton.jit
def _sort_keys(p_row, o_n, m_n):
    """Return uint32 keys in the order of the scores; those where m_n is false are undefined. Both zeros are equal."""
    b_x = tl.load(p_row + o_n, mask=m_n, other=0.0)
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.uint32, bitcast=True)
    return tl.where((b_bits >> 31) == 1, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)


@triton.jit
def _next_digit(p_row, i_count, i_least, i_need, SHIFT: tl.constexpr, BN: tl.constexpr):
    """Return the least chosen key with the 8 bits at SHIFT added, and how many keys with these bits are chosen."""
    o_bin, o_b = tl.arange(0, 256), tl.arange(0, BN)
    b_counts = tl.zeros([256], tl.int32)
    for i_n in tl.range(0, i_count, BN):
        m_n = i_n + o_b < i_count
        b_key = _sort_keys(p_row, i_n + o_b, m_n)
        if SHIFT < 24:
            m_n = m_n & ((b_key >> (SHIFT + 8)) == (i_least >> (SHIFT + 8)))
        b_counts += tl.histogram(((b_key >> SHIFT) & 255).to(tl.int32), 256, mask=m_n)
    # Keys in this bin and above.
    b_from = tl.sum(b_counts, 0) - tl.cumsum(b_counts, 0) + b_counts
    i_bin = tl.sum((b_from >= i_need).to(tl.int32), 0) - 1
    i_need -= tl.sum(tl.where(o_bin > i_bin, b_counts, 0), 0)
    return i_least | (i_bin.to(tl.uint32) << SHIFT), i_need


@triton.jit
def least_chosen(p_row, i_count, TOP, BN: tl.constexpr):
    """Return the key of the TOP-th largest of i_count > TOP scores, and how many scores of this key to take."""
    i_least = tl.full([], 0, tl.uint32)
    i_need = tl.full([], 0, tl.int32) + TOP
    for n in tl.static_range(4):
        i_least, i_need = _next_digit(p_row, i_count, i_least, i_need, SHIFT=24 - 8 * n, BN=BN)
    return i_least, i_need


@triton.jit
def take(p_row, o_n, i_count, i_least, i_need, i_taken, i_equal):
    """Choose among the scores o_n. i_taken scores before them are chosen, and i_equal scores equal the least one.

    Return where they are chosen, their numbers among all chosen ones, and both totals.
    """
    m_n = o_n < i_count
    b_key = _sort_keys(p_row, o_n, m_n)
    b_equal = (m_n & (b_key == i_least)).to(tl.int32)
    m_take = (m_n & (b_key > i_least)) | ((b_equal > 0) & (i_equal + tl.cumsum(b_equal, 0) <= i_need))
    b_take = m_take.to(tl.int32)
    o_out = i_taken + tl.cumsum(b_take, 0) - 1
    return m_take, o_out, i_taken + tl.sum(b_take, 0), i_equal + tl.sum(b_equal, 0)
