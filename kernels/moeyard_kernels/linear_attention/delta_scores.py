"""Triton: scores of a chunk of the gated delta rule with a gate per row of the state (Kimi Delta Attention).

See `delta_intra` for the notation. exp2(-G_j) alone would overflow fp32, so products go by levels. Let l be the highest
bit in which i and j differ. The position b that ends the lower half of their block of 2^(l + 1) lies between them. So
D_ij = exp2(G_i - G_b) exp2(G_b - G_j), and neither factor exceeds 1. A tile of 64 x 64 takes six products, each with
one exponential per value, and no gate, however strong, overflows or is clamped. Levels 0 to 3 are the diagonal blocks
of 16, levels 4 and 5 the blocks off the diagonal.

With weak gates, one product serves a whole block, with its middle as b for all i and j. One of the exponentials then
exceeds 1, but both stay far within range. The chunk is one product if neither half of 32 positions forgets more than
LIMIT. Blocks of 16 are one product each if no 8 positions do. Only the chunk's own gates decide. So the bits of a
position depend on its whole chunk, later positions too, and on nothing else.

Sums have one order for every tile: over positions in two runs of 32, over Dk by HALF columns. A program holds HALF
columns at a time to save registers. So two programs fit a multiprocessor and overlap products with exponentials.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED, opaque, round_to
from moeyard_kernels.linear_attention.halves import power_of_two, softplus, sum_columns

_DECAY = tl.constexpr("{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }")
# A chunk has 2^6 positions.
LEVELS = tl.constexpr(6)
# In log2: the largest distance of a sum of gates from the middle of a block that is one product. Raw keys and queries
# times 2^96 fit bf16 and fp32, and times 2^-96 they stay above the smallest normal numbers.
LIMIT = tl.constexpr(96.0)


@triton.jit
def operand(b_x, DTYPE: tl.constexpr):
    """Return b_x as an operand of a product, rounded to DTYPE. The interpreter computes products of bf16 wrongly."""
    if INTERPRETED:  # noqa: SIM108 - of two types
        b_y = round_to(b_x.to(tl.float32), DTYPE)
    else:
        b_y = b_x.to(DTYPE)
    return b_y


@triton.jit
def _once(b_x, DTYPE: tl.constexpr):
    """Return b_x as an opaque operand of a product.

    Otherwise Triton recomputes all of b_x, with its exponentials, for each side of a product and in every warp group.
    """
    return opaque(operand(b_x, DTYPE), DTYPE)


@triton.jit
def _decay(b_x):
    """Return 2^-|x|. The sign is free within the instruction."""
    if INTERPRETED:
        b_y = tl.exp2(-tl.abs(b_x))
    else:
        b_y = tl.inline_asm_elementwise(_DECAY, "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def store_rounded(p_y, b_y, DTYPE: tl.constexpr):
    """Store b_y at p_y, rounded to DTYPE."""
    tl.store(p_y, round_to(b_y, DTYPE).to(p_y.dtype.element_ty))


@triton.jit
def level_mask(o_c, level):
    """Return [N, N]: whether i and j are in one block of 2^(level + 1), but in different halves of it."""
    return (o_c[:, None] ^ o_c[None, :]) >> level == 1


@triton.jit
def _of(b_xs, n: tl.constexpr):
    return b_xs[n]


@triton.jit
def _most(b_x):
    return tl.max(tl.max(b_x, 1), 0)


@triton.jit
def sums_by_row(
    p_a, p_sums, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Store the running sums of log2 of the gates in p_sums [C, BK], with a new start in the second half of the chunk.

    A thread has one column of a half. Return the first level that needs its own product, `LEVELS` if none does.
    """
    RUN: tl.constexpr = C // 2
    o_run = tl.arange(0, 2) * RUN
    b_as = ()
    for r in tl.static_range(RUN):
        i_row = i_first + o_run + r
        b_a = tl.load(
            p_a + i_row[:, None] * stride_a + o_k[None, :], mask=(i_row < i_end)[:, None] & m_k[None, :], other=0.0
        )
        # Triton has no unpacking. All loads come first, because no load passes a store.
        b_as = b_as + (b_a,)  # type: ignore[assignment]  # noqa: RUF005
    b_sum = tl.zeros([2, BK], dtype=tl.float32)
    b_mark, b_most = tl.zeros([2, BK], dtype=tl.float32), tl.zeros([2, BK], dtype=tl.float32)
    for r in tl.static_range(RUN):
        m_row = (i_first + o_run + r < i_end)[:, None] & m_k[None, :]
        b_gate = b_rate * softplus(_of(b_as, r).to(tl.float32) + b_bias[None, :])
        b_sum += tl.where(m_row, b_gate, 0.0)
        tl.store(p_sums + (o_run + r)[:, None] * BK + o_k[None, :], b_sum)
        if r % 8 == 7:
            b_most = tl.maximum(b_most, b_mark - b_sum)
            b_mark = b_sum
    return tl.where(_most(-b_sum) <= LIMIT, LEVELS, tl.where(_most(b_most) <= LIMIT, 4, 0))


@triton.jit
def _from_middle(b_sum, p_sums, level, o_c, o_k, BK: tl.constexpr, C: tl.constexpr):
    """Return G_i - G_b, where b is the last position of the lower half of i's block of 2^(level + 1)."""
    o_mid = ((o_c >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
    # The sums of a chunk's upper half start in that half, and the sum before it is 0.
    m_mid = (o_c < C // 2) | (level < LEVELS - 1)
    return b_sum - tl.load(p_sums + o_mid[:, None] * BK + o_k[None, :], mask=m_mid[:, None], other=0.0)


@triton.jit
def products_by_row(
    p_q, p_k, p_sums, p_qg, p_kg, p_kd, p_left, m_row, o_c, first, DK: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, LOG2_HALF: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return pairs and scores [C, C] and the sums of squares [C] of keys and queries. Store qg, kd, kg and left.

    Only pairs below the diagonal are valid. first: the result of `sums_by_row`.
    """
    b_pairs, b_scores = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_kk, b_qq, b_qk = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    for half in range(BK // HALF):
        o_k = half * HALF + tl.arange(0, HALF)
        m_x = m_row[:, None] & (o_k < DK)[None, :]
        b_q = tl.load(p_q + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_kk += sum_columns(b_k * b_k, C, HALF, LOG2_HALF)
        b_qq += sum_columns(b_q * b_q, C, HALF, LOG2_HALF)
        b_qk += sum_columns(b_q * b_k, C, HALF, LOG2_HALF)
        o_tile = o_c[:, None] * BK + o_k[None, :]
        b_sum = tl.load(p_sums + o_tile)
        if first > 0:
            b_apart = _from_middle(b_sum, p_sums, first - 1, o_c, o_k, BK, C)
            b_grown = power_of_two(b_apart)
            b_columns = _once(b_k * power_of_two(-b_apart), DTYPE)
            # Values above the diagonal may be NaN.
            m_block = (o_c[:, None] ^ o_c[None, :]) >> first == 0
            b_found = tl.dot(_once(b_k * b_grown, DTYPE), tl.trans(b_columns), input_precision="ieee")
            b_pairs += tl.where(m_block, b_found, 0.0)
            b_found = tl.dot(_once(b_q * b_grown, DTYPE), tl.trans(b_columns), input_precision="ieee")
            b_scores += tl.where(m_block, b_found, 0.0)
        for level in range(first, LEVELS):
            # Sums never rise, so this is G_i - G_b in the upper half of a block and G_b - G_j in the lower half.
            b_decay = _decay(_from_middle(b_sum, p_sums, level, o_c, o_k, BK, C))
            b_columns = _once(b_k * b_decay, DTYPE)
            m_level = level_mask(o_c, level)
            b_found = tl.dot(b_columns, tl.trans(b_columns), input_precision="ieee")
            b_pairs += tl.where(m_level, b_found, 0.0)
            b_found = tl.dot(_once(b_q * b_decay, DTYPE), tl.trans(b_columns), input_precision="ieee")
            b_scores += tl.where(m_level, b_found, 0.0)
        b_half = tl.load(p_sums + (C // 2 - 1) * BK + o_k)
        b_last = b_half + tl.load(p_sums + (C - 1) * BK + o_k)
        b_sum += tl.where(o_c[:, None] < C // 2, 0.0, b_half[None, :])
        b_grown = power_of_two(b_sum)
        store_rounded(p_qg + o_tile, b_q * b_grown, DTYPE)
        store_rounded(p_kd + o_tile, b_k * b_grown, DTYPE)
        store_rounded(p_kg + o_tile, b_k * power_of_two(b_last[None, :] - b_sum), DTYPE)
        tl.store(p_left + o_k, power_of_two(b_last))
    b_scores = tl.where(o_c[:, None] > o_c[None, :], b_scores, 0.0)
    b_scores = tl.where(o_c[:, None] == o_c[None, :], b_qk[:, None], b_scores)
    return b_pairs, b_scores, b_kk, b_qq
