"""Triton: the exact choice of the largest scores of each row, ties by lower index, in ascending order.

A radix search over four digits of 8 bits finds the least chosen score. Counts are integers, so no order matters. Then
one pass over the scores writes the chosen indices.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous

# Scores that a program holds at once.
_BLOCK = 4096


@triton.jit
def _sort_keys(p_scores, o_n, m_n):
    """Return uint32 keys in the order of the scores; those where m_n is false are undefined."""
    b_bits = tl.load(p_scores + o_n, mask=m_n, other=0.0).to(tl.uint32, bitcast=True)
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


@triton.jit(do_not_specialize=("N",))
def _choose_kernel(p_scores, p_positions, p_out, N, RATIO: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr):
    """Grid: (rows,)."""
    wait_for_previous()
    let_next_begin()
    i_r = tl.program_id(0).to(tl.int64)
    i_count = ((tl.load(p_positions + i_r) + 1) // RATIO).to(tl.int32)
    if i_count > TOP_K:
        p_row = p_scores + i_r * N
        o_b = tl.arange(0, BN)
        i_least = tl.full([], 0, tl.uint32)
        i_need = tl.full([], TOP_K, tl.int32)
        for n in tl.static_range(4):
            i_least, i_need = _next_digit(p_row, i_count, i_least, i_need, SHIFT=24 - 8 * n, BN=BN)
        # All scores above the least one are chosen, and the first i_need that equal it.
        i_written = tl.full([], 0, tl.int32)
        i_equal = tl.full([], 0, tl.int32)
        for i_n in tl.range(0, i_count, BN):
            m_n = i_n + o_b < i_count
            b_key = _sort_keys(p_row, i_n + o_b, m_n)
            b_equal = (m_n & (b_key == i_least)).to(tl.int32)
            b_rank = i_equal + tl.cumsum(b_equal, 0)
            m_taken = (m_n & (b_key > i_least)) | ((b_equal > 0) & (b_rank <= i_need))
            b_taken = m_taken.to(tl.int32)
            o_out = i_written + tl.cumsum(b_taken, 0) - 1
            tl.store(p_out + i_r * TOP_K + o_out, i_n + o_b, mask=m_taken)
            i_written += tl.sum(b_taken, 0)
            i_equal += tl.sum(b_equal, 0)


def output_choice(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, top_k: int) -> torch.Tensor:
    """See `moeyard_kernels.ops.output_choice`."""
    count, num = scores.shape
    out = torch.empty(count, top_k, dtype=torch.int32, device=scores.device)
    if count:
        block = min(_BLOCK, max(256, triton.next_power_of_2(num)))
        options = {"num_warps": 16, **dependent(scores)}
        _choose_kernel[(count,)](scores, positions, out, num, RATIO=ratio, TOP_K=top_k, BN=block, **options)
    return out
