"""Triton: what a chunk of 64 positions of the gated delta rule needs of itself alone, whatever the state before it.

With G_i the sum of log2 of the gates up to position i of the chunk (every exponential here is of base 2), and for
j <= i D_ij = exp2(G_i - G_j), of each of the Dk rows of the state in Kimi Delta Attention:

    pairs_ij = sum over d of k_id k_jd D_ijd for j < i;  scores_ij = the same of q_i and k_j, for j <= i
    T = (I + beta pairs)^-1 beta;  w = T (exp2(G) k);  u = T v
    kg = exp2(G_64 - G) k;  qg = exp2(G) q;  left = exp2(G_64)

which is all that `delta_chunk` reads of a chunk. exp2(-G_j) alone would leave fp32, so with a gate per row products go
by levels: where i and j first part, from the highest bit, at bit l, there is one position b between them that ends the
lower half of their block of 2^(l + 1), and D_ij = exp2(G_i - G_b) exp2(G_b - G_j), neither above 1. Hence six products
over a tile of 64 x 64, each with one exponential per value, and no gate, however strong, that overflows or is clamped.
Levels 0 to 3 are the diagonal blocks of 16, 4 and 5 those off the diagonal. T goes by the same levels: of a block of
which both halves are inverted, the inverse is X - X C X, C being what lies between the halves (forward substitution by
blocks; powers of the whole, as Newton's steps have them, grow beyond any precision where keys are alike).

Stages are one launch or three (`delta_chunk`): what passes between them is stored as it is used, so the bits agree.
Sums are in one order whatever the tile: over positions in four runs of 16, over Dk by halves.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.common.rounding import INTERPRETED, round_to
from moeyard_kernels.linear_attention.halves import TABLE_WIDTH, sigmoid, softplus, sum_columns

LOG2_E = tl.constexpr(1.4426950408889634)
# Rows of a diagonal block are 2^4.
DIAGONAL = tl.constexpr(4)
# Positions of a chunk are 2^6.
LEVELS = tl.constexpr(6)


@triton.jit
def operand(b_x, DTYPE: tl.constexpr):
    """What a product takes for values b_x: rounded to DTYPE (the interpreter gets products of bf16 wrong)."""
    if INTERPRETED:  # noqa: SIM108 - of two types
        b_y = round_to(b_x.to(tl.float32), DTYPE)
    else:
        b_y = b_x.to(DTYPE)
    return b_y


@triton.jit
def _unit_rows(b_x, eps, R: tl.constexpr, N: tl.constexpr, LOG2_N: tl.constexpr):
    """Each row of b_x [R, N] fp32 over the root of its sum of squares and eps."""
    b_square = sum_columns(b_x * b_x, R, N, LOG2_N)
    return b_x * tl.div_rn(tl.full([R], 1.0, tl.float32), tl.sqrt_rn(b_square + eps))[:, None]


@triton.jit
def _keys(p_row, i_head, m_x, o_k, eps, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LOG2_BK: tl.constexpr):
    """[C, BK] fp32: queries or keys of head i_head, of length 1, zeros where not m_x."""
    b_x = tl.load(p_row + i_head * DK + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
    return _unit_rows(b_x, eps, C, BK, LOG2_BK)


@triton.jit
def _between(o_c, level):
    """[64, 64]: whether row i is in the upper and column j in the lower half of the same block of 2^(level + 1)."""
    m_late = ((o_c >> level) & 1) == 1
    m_block = (o_c >> (level + 1))[:, None] == (o_c >> (level + 1))[None, :]
    return m_late[:, None] & (m_late[None, :] == 0) & m_block


@triton.jit
def _store_sums(
    p_a, p_sums, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Sums of log2 of the gates [C, BK], of positions up to each, into p_sums; 0 behind i_end."""
    RUN: tl.constexpr = C // 4
    o_run = tl.arange(0, 4)
    b_sum = tl.zeros([4, BK], dtype=tl.float32)
    b_sums = ()
    for r in tl.static_range(RUN):
        i_row = i_first + o_run * RUN + r
        m_row = (i_row < i_end)[:, None] & m_k[None, :]
        b_a = tl.load(p_a + i_row[:, None] * stride_a + o_k[None, :], mask=m_row, other=0.0).to(tl.float32)
        b_sum += tl.where(m_row, b_rate * softplus(b_a + b_bias[None, :]), 0.0)
        # Triton has no unpacking.
        b_sums = b_sums + (b_sum,)  # type: ignore[assignment]  # noqa: RUF005
    # Of each sum all values but one are zeros.
    b_0 = tl.sum(tl.where(o_run[:, None] == 0, b_sum, 0.0), 0)
    b_1 = b_0 + tl.sum(tl.where(o_run[:, None] == 1, b_sum, 0.0), 0)
    b_2 = b_1 + tl.sum(tl.where(o_run[:, None] == 2, b_sum, 0.0), 0)
    b_before = tl.where(o_run[:, None] == 1, b_0[None, :], 0.0)
    b_before = tl.where(o_run[:, None] == 2, b_1[None, :], b_before)
    b_before = tl.where(o_run[:, None] == 3, b_2[None, :], b_before)
    for r in tl.static_range(RUN):
        o_row = o_run * RUN + r
        tl.store(p_sums + o_row[:, None] * BK + o_k[None, :], b_sums[r] + b_before)  # type: ignore[misc]


@triton.jit
def _by_levels(
    b_q, b_k, b_sum, p_sums, b_pairs, b_scores, o_c, o_k, BK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    DTYPE: tl.constexpr
):  # fmt: skip
    """(pairs, scores) with the levels from FIRST up to LAST filled in."""
    for level in range(FIRST, LAST):
        o_mid = ((o_c >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
        b_mid = tl.load(p_sums + o_mid[:, None] * BK + o_k[None, :])
        # Sums do not rise: this is G_i - G_b in the upper half and G_b - G_j in the lower.
        b_decay = tl.exp2(-tl.abs(b_sum - b_mid))
        b_columns = operand(b_k * b_decay, DTYPE)
        m_here = _between(o_c, level)
        b_found = tl.dot(b_columns, tl.trans(b_columns), input_precision="ieee")
        b_pairs = tl.where(m_here, b_found, b_pairs)
        b_found = tl.dot(operand(b_q * b_decay, DTYPE), tl.trans(b_columns), input_precision="ieee")
        b_scores = tl.where(m_here, b_found, b_scores)
    return b_pairs, b_scores


@triton.jit
def _inverse(b_lower, o_c, PRECISION: tl.constexpr):
    """(I + b_lower)^-1 for strictly lower b_lower [64, 64] fp32."""
    b_one = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    b_x = tl.where(_between(o_c, 0), -b_lower, b_one)
    for level in range(1, LEVELS):
        b_c = tl.where(_between(o_c, level), b_lower, 0.0)
        b_x = b_x - tl.dot(b_x, tl.dot(b_c, b_x, input_precision=PRECISION), input_precision=PRECISION)
    return b_x


@triton.jit(do_not_specialize=("stride_x", "stride_b", "stride_a"))
def delta_intra_kernel(
    p_x, p_b, p_a, p_rate, p_bias, p_table, p_sums, p_pairs, p_scores, p_inverse, p_w, p_u, p_kg, p_qg, p_left,
    stride_x, stride_b, stride_a, scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, LOG2_BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr, BLOCKS: tl.constexpr, SOLVE: tl.constexpr,
    READS: tl.constexpr
):  # fmt: skip
    """One chunk of one head. Grid: (chunks HV,). BLOCKS, SOLVE, READS: the stages that this launch has.

    BLOCKS: sums of gates and diagonal blocks; SOLVE: the other blocks and the inverse; READS: w, u, kg, qg and left.
    Tiles of a chunk and head lie one behind the other: p_sums [C, BK], p_pairs [2, C, C] (pairs and scores so far),
    p_u [BV, C] and p_left [BK] (or one value) in fp32, p_scores and p_inverse [C, C], p_w, p_kg, p_qg [C, BK] in the
    rows' dtype.
    """
    wait_for_previous()
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_unit = tl.program_id(0).to(tl.int64)
    i_chunk, i_h = i_unit // HV, i_unit % HV
    i_k = i_h // (HV // HK)
    p_chunk = p_table + i_chunk * TABLE_WIDTH
    i_first, i_end = tl.load(p_chunk), tl.load(p_chunk + (TABLE_WIDTH - 2))
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_k, i_row = o_k < DK, i_first + o_c
    m_row = i_row < i_end
    m_x = m_row[:, None] & m_k[None, :]
    o_square, o_tile = o_c[:, None] * C + o_c[None, :], o_c[:, None] * BK + o_k[None, :]
    p_row = p_x + i_row[:, None] * stride_x
    p_sum = p_sums + i_unit * (C * BK)
    p_pair = p_pairs + i_unit * (2 * C * C)
    b_rate = -tl.exp(tl.load(p_rate + i_h)) * LOG2_E
    m_later = o_c[:, None] >= o_c[None, :]
    if BY_ROW:
        if BLOCKS:
            b_bias = tl.load(p_bias + i_h * DK + o_k, mask=m_k, other=0.0)
            _store_sums(p_a + i_h * DK, p_sum, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK, C)
            # Other threads read them.
            tl.debug_barrier()
    else:
        b_a = tl.load(p_a + i_row * stride_a + i_h, mask=m_row, other=0.0).to(tl.float32)
        b_gate = tl.where(m_row, b_rate * softplus(b_a + tl.load(p_bias + i_h)), 0.0)
        b_sum = sum_columns(tl.where(m_later, b_gate[None, :], 0.0), C, C, LEVELS)
    # Rows behind a prompt's last are zeros, and change nothing. Stages load what they use, for want of registers.
    if BLOCKS:
        b_q = _keys(p_row, i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK) * scale
        b_k = _keys(p_row, HK + i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK)
        if BY_ROW:
            b_sum = tl.load(p_sum + o_tile)
            b_same = sum_columns(b_q * b_k, C, BK, LOG2_BK)
            b_scores = tl.where(o_c[:, None] == o_c[None, :], b_same[:, None], 0.0)
            b_pairs = tl.zeros([C, C], dtype=tl.float32)
            b_pairs, b_scores = _by_levels(b_q, b_k, b_sum, p_sum, b_pairs, b_scores, o_c, o_k, BK, 0, DIAGONAL, DTYPE)
        else:
            b_decay = tl.where(m_later, tl.exp2(tl.where(m_later, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
            b_columns = operand(b_k, DTYPE)
            b_scores = tl.dot(operand(b_q, DTYPE), tl.trans(b_columns), input_precision="ieee") * b_decay
            b_pairs = tl.dot(b_columns, tl.trans(b_columns), input_precision="ieee") * b_decay
            b_pairs = tl.where(o_c[:, None] > o_c[None, :], b_pairs, 0.0)
        if not SOLVE:
            tl.store(p_pair + o_square, b_pairs)
            tl.store(p_pair + C * C + o_square, b_scores)
    elif SOLVE:
        b_pairs, b_scores = tl.load(p_pair + o_square), tl.load(p_pair + C * C + o_square)
    if SOLVE:
        if BY_ROW:
            b_q = _keys(p_row, i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK) * scale
            b_k = _keys(p_row, HK + i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK)
            b_sum = tl.load(p_sum + o_tile)
            b_pairs, b_scores = _by_levels(
                b_q, b_k, b_sum, p_sum, b_pairs, b_scores, o_c, o_k, BK, DIAGONAL, LEVELS, DTYPE
            )
        b_rounded = round_to(b_scores, DTYPE).to(p_scores.dtype.element_ty)
        tl.store(p_scores + i_unit * (C * C) + o_square, b_rounded)
        b_beta = sigmoid(tl.load(p_b + i_row * stride_b + i_h, mask=m_row, other=0.0).to(tl.float32))
        b_inverse = _inverse(b_pairs * b_beta[:, None], o_c, "ieee" if tl.float32 == DTYPE else "tf32")
        b_inverse = operand(b_inverse * b_beta[None, :], DTYPE)
        if not READS:
            tl.store(p_inverse + i_unit * (C * C) + o_square, b_inverse)
    elif READS:
        b_inverse = tl.load(p_inverse + i_unit * (C * C) + o_square)
    if READS:
        o_v = tl.arange(0, BV)
        m_v = m_row[:, None] & (o_v < DV)[None, :]
        b_v = tl.load(p_row + (2 * HK * DK + i_h * DV + o_v)[None, :], mask=m_v, other=0.0)
        b_u = tl.dot(tl.trans(operand(b_v, DTYPE)), tl.trans(b_inverse), input_precision="ieee")
        o_u = o_v[:, None] * C + o_c[None, :]
        tl.store(p_u + i_unit * (BV * C) + o_u, b_u)
        # Keeps the loads of this stage behind the ones before, for registers' sake.
        tl.debug_barrier()
        b_q = _keys(p_row, i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK) * scale
        b_k = _keys(p_row, HK + i_k, m_x, o_k, eps, DK, C, BK, LOG2_BK)
        if BY_ROW:
            b_sum = tl.load(p_sum + o_tile)
            b_last = tl.load(p_sum + (C - 1) * BK + o_k)
            b_grown, b_rest = tl.exp2(b_sum), tl.exp2(b_last[None, :] - b_sum)
            tl.store(p_left + i_unit * BK + o_k, tl.exp2(b_last))
        else:
            # Of each sum all values but one are zeros.
            b_last = tl.sum(tl.where(o_c == C - 1, b_sum, 0.0), 0)
            b_grown, b_rest = tl.exp2(b_sum)[:, None], tl.exp2(b_last - b_sum)[:, None]
            tl.store(p_left + i_unit, tl.exp2(b_last))
        o_reads = i_unit * (C * BK) + o_tile
        tl.store(p_qg + o_reads, round_to(b_q * b_grown, DTYPE).to(p_qg.dtype.element_ty))
        tl.store(p_kg + o_reads, round_to(b_k * b_rest, DTYPE).to(p_kg.dtype.element_ty))
        b_w = tl.dot(b_inverse, operand(b_k * b_grown, DTYPE), input_precision="ieee")
        tl.store(p_w + o_reads, round_to(b_w, DTYPE).to(p_w.dtype.element_ty))
