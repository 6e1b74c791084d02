"""Triton: the entry of one block of positions. One function for all kernels, so their entries have the same bits.

For each column, over the rows of the block in the order of positions:

    g = gate + bias;  m = max g;  w = exp(g - m);  total = total + w;  sum = fma(w, value, sum);  out = sum / total

Then the row is rounded, normalised and rotated as by `rms_norm` and `rope`. Launch with `enable_fp_fusion=False` and
`NUM_WARPS`: the norm's sum is a tree whose shape depends on the warps.
"""

import triton
import triton.language as tl

from moeyard_kernels.attention.rope import rotate
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.elementwise.rms_norm import normed

NUM_WARPS = 4
# Rows whose loads are in flight together. A part of a block has a multiple of them, or fewer.
_ROWS = tl.constexpr(8)


@triton.jit
def _gate_top(p_new, p_old, s_new, s_old, p_bias, i_first, i_start, SIZE, o_d, m_d, b_top, C, RATIO: tl.constexpr):
    """Return the maximum of b_top and of the gates plus bias of RATIO positions from i_first on, by column."""
    BR: tl.constexpr = min(RATIO, _ROWS)
    for i in range(0, RATIO, BR):
        for j in tl.static_range(BR):
            p_row = _row_of(p_new, p_old, s_new, s_old, i_first + i + j, i_start, SIZE)
            b_gate = tl.load(p_row + C + o_d, mask=m_d, other=0.0)
            b_top = tl.maximum(b_top, b_gate + tl.load(p_bias + (i + j) * C + o_d, mask=m_d, other=0.0))
    return b_top


@triton.jit
def _row_of(p_new, p_old, s_new, s_old, i_p, i_start, SIZE):
    """Return the pointer to the row of position i_p: before i_start in the slot, else in the rows of the step."""
    p_row = p_new + (i_p - i_start).to(tl.int64) * s_new
    if i_p < i_start:
        p_row = p_old + (i_p % SIZE).to(tl.int64) * s_old
    return p_row


@triton.jit
def _add_rows(
    p_new, p_old, s_new, s_old, p_bias, i_first, i_start, SIZE, o_d, m_d, b_top, b_total, b_sum, C, RATIO: tl.constexpr
):
    """Add the weights and weighted values of RATIO positions from i_first on."""
    BR: tl.constexpr = min(RATIO, _ROWS)
    for i in range(0, RATIO, BR):
        for j in tl.static_range(BR):
            p_row = _row_of(p_new, p_old, s_new, s_old, i_first + i + j, i_start, SIZE)
            b_value = tl.load(p_row + o_d, mask=m_d, other=0.0)
            b_gate = tl.load(p_row + C + o_d, mask=m_d, other=0.0)
            b_gate += tl.load(p_bias + (i + j) * C + o_d, mask=m_d, other=0.0)
            b_weight = tl.exp(b_gate - b_top)
            b_total += b_weight
            b_sum = tl.fma(b_weight, b_value, b_sum)
    return b_total, b_sum


@triton.jit
def store_entry(
    p_new, p_old, s_new, s_old, p_bias, p_norm, p_rope, p_entry, i_w, i_start, SIZE, eps,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the entry [D] of block i_w at p_entry.

    p_new: the values, then the gates, of position i_start, with C = 2 D columns each if OVERLAPS, else D. Rows of later
    positions follow, s_new apart. p_old: the same columns of a slot of SIZE rows, s_old apart, with position p in row
    p % SIZE. Positions before i_start are read from there. p_rope [positions, R].
    """
    C: tl.constexpr = 2 * D if OVERLAPS else D
    OWN: tl.constexpr = D if OVERLAPS else 0
    i_first = i_w * RATIO
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_top = tl.full([BD], float("-inf"), tl.float32)
    if OVERLAPS:  # noqa: SIM102 - the first condition is known at compile time
        if i_w > 0:
            b_top = _gate_top(
                p_new, p_old, s_new, s_old, p_bias, i_first - RATIO, i_start, SIZE, o_d, m_d, b_top, C, RATIO
            )
    b_top = _gate_top(
        p_new + OWN, p_old + OWN, s_new, s_old, p_bias + OWN, i_first, i_start, SIZE, o_d, m_d, b_top, C, RATIO
    )
    b_total = tl.zeros([BD], tl.float32)
    b_sum = tl.zeros([BD], tl.float32)
    if OVERLAPS:  # noqa: SIM102 - as above
        if i_w > 0:
            b_total, b_sum = _add_rows(
                p_new, p_old, s_new, s_old, p_bias, i_first - RATIO, i_start, SIZE, o_d, m_d, b_top, b_total, b_sum, C,
                RATIO,
            )  # fmt: skip
    b_total, b_sum = _add_rows(
        p_new + OWN, p_old + OWN, s_new, s_old, p_bias + OWN, i_first, i_start, SIZE, o_d, m_d, b_top, b_total, b_sum,
        C, RATIO,
    )  # fmt: skip
    DTYPE: tl.constexpr = p_entry.dtype.element_ty
    b_x = tl.where(m_d, round_to(tl.div_rn(b_sum, b_total), DTYPE), 0.0)
    b_norm = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = round_to(normed(b_x[None, :], b_norm, D, eps, p_norm.dtype.element_ty), DTYPE)
    # Rotate the last R values, pairs (2 i, 2 i + 1). All first values of pairs then precede all second ones.
    b_first, b_second = tl.split(tl.reshape(b_y, [BD // 2, 2]))
    o_i = tl.arange(0, BD // 2)
    o_r = o_i - (D - R) // 2
    m_i = o_i < D // 2
    m_r = m_i & (o_r >= 0)
    p_angle = p_rope + i_first.to(tl.int64) * R + o_r
    b_cos = tl.load(p_angle, mask=m_r, other=1.0)
    b_sin = tl.load(p_angle + R // 2, mask=m_r, other=0.0)
    b_one, b_two = rotate(b_first, b_second, b_cos, b_sin, tl.float32)
    b_one, b_two = tl.where(m_r, b_one, b_first), tl.where(m_r, b_two, b_second)
    o_one = tl.where(o_r >= 0, D - R + o_r, 2 * o_i)
    o_two = tl.where(o_r >= 0, D - R // 2 + o_r, 2 * o_i + 1)
    tl.store(p_entry + o_one, round_to(b_one, DTYPE).to(DTYPE), mask=m_i)
    tl.store(p_entry + o_two, round_to(b_two, DTYPE).to(DTYPE), mask=m_i)
