"""Triton: the parts of the gated delta rule that a chunk of 64 positions computes without the state before it.

G_i is the sum of log2 of the gates up to position i of the chunk; all exponentials have base 2. For j <= i, D_ij =
exp2(G_i - G_j), which in Kimi Delta Attention differs for each of the Dk rows of the state:

    pairs_ij = sum over d of k_id k_jd D_ijd for j < i;  scores_ij = the same of q_i and k_j, for j <= i
    T = (I + beta pairs)^-1 beta

Products take keys and queries without normalising them. Their lengths are one number per row, which scales the results.
So `inverse` is T with rows divided by the keys' lengths. The new values of a chunk then contain this division, and
scores and state do not need it. `delta_chunk` reads these tiles and a few numbers per row (`FACTORS`). A gate per head
is such a number too. Gates per row of the state are not, so these add tiles of the raw rows:

    kd = exp2(G) k;  kg = exp2(G_64 - G) k;  qg = exp2(G) q;  left = exp2(G_64)

`delta_scores` has their pairs and scores. T is computed by the same levels, the halves of blocks of 2^(l + 1). If X
inverts both halves of a block and C lies between them, the inverse of the block is X - X C X. This is forward
substitution by blocks. Powers of the whole matrix, as in Newton's method, exceed any precision if keys are alike.

The stages are one launch or two (`delta_chunk`). Values between them are stored as they are used, so the bits agree.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.linear_attention.delta_scores import (
    level_mask,
    operand,
    products_by_row,
    store_rounded,
    sums_by_row,
)
from moeyard_kernels.linear_attention.halves import LOG2_E, TABLE_WIDTH, power_of_two, sigmoid, softplus, sum_columns

# Numbers per row of a chunk: 1 / |k|, beta, the factor of the output. A gate per head adds the factor of k S and the
# factor of the row's new value in the state.
FACTORS = tl.constexpr(5)


@triton.jit
def _product(b_x, b_y, DTYPE: tl.constexpr):
    """Return b_x @ b_y of fp32, in tf32 unless rows are fp32."""
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    return tl.dot(b_x, b_y, input_precision=PRECISION)


@triton.jit
def _invert_block(p_low, o_r, C: tl.constexpr, DTYPE: tl.constexpr):
    """Return (I + L)^-1 [16, 16] for the strictly lower triangular L at p_low."""
    b_low = tl.load(p_low + o_r[:, None] * C + o_r[None, :])
    # L holds zeros above the diagonal.
    b_x = tl.where(level_mask(o_r, 0), -b_low, tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0))
    for level in tl.static_range(1, 4):
        b_c = tl.where(level_mask(o_r, level), b_low, 0.0)
        b_x -= _product(b_x, _product(b_c, b_x, DTYPE), DTYPE)
    return b_x


@triton.jit
def _put(p_to, i: tl.constexpr, j: tl.constexpr, b_x, p_factor, o_r, C: tl.constexpr, DTYPE: tl.constexpr):
    """Store block (i, j) of the inverse, times its rows' 1 / |k| and its columns' beta."""
    b_scaled = b_x * tl.load(p_factor + 16 * i + o_r)[:, None] * tl.load(p_factor + (C + 16 * j) + o_r)[None, :]
    store_rounded(p_to + 16 * (i * C + j) + o_r[:, None] * C + o_r[None, :], b_scaled, DTYPE)


@triton.jit
def _solve(p_low, p_to, p_factor, C: tl.constexpr, DTYPE: tl.constexpr):
    """Store T of the lower [C, C] at p_low in p_to by blocks of 16. Blocks above the diagonal are zeros."""
    o_r = tl.arange(0, 16)
    p_tile = p_low + o_r[:, None] * C + o_r[None, :]
    for j in tl.static_range(1, 4):
        for i in tl.static_range(j):
            _put(p_to, i, j, tl.zeros([16, 16], dtype=tl.float32), p_factor, o_r, C, DTYPE)
    x_00 = _invert_block(p_low, o_r, C, DTYPE)
    x_11 = _invert_block(p_low + 16 * C + 16, o_r, C, DTYPE)
    x_22 = _invert_block(p_low + 32 * C + 32, o_r, C, DTYPE)
    x_33 = _invert_block(p_low + 48 * C + 48, o_r, C, DTYPE)
    x_10 = -_product(x_11, _product(tl.load(p_tile + 16 * C), x_00, DTYPE), DTYPE)
    x_32 = -_product(x_33, _product(tl.load(p_tile + 48 * C + 32), x_22, DTYPE), DTYPE)
    b_20, b_21 = tl.load(p_tile + 32 * C), tl.load(p_tile + 32 * C + 16)
    b_30, b_31 = tl.load(p_tile + 48 * C), tl.load(p_tile + 48 * C + 16)
    # The blocks below the diagonal times the upper inverse. The lower inverse multiplies them next.
    y_20 = _product(b_20, x_00, DTYPE) + _product(b_21, x_10, DTYPE)
    y_30 = _product(b_30, x_00, DTYPE) + _product(b_31, x_10, DTYPE)
    y_21, y_31 = _product(b_21, x_11, DTYPE), _product(b_31, x_11, DTYPE)
    _put(p_to, 0, 0, x_00, p_factor, o_r, C, DTYPE)
    _put(p_to, 1, 0, x_10, p_factor, o_r, C, DTYPE)
    _put(p_to, 1, 1, x_11, p_factor, o_r, C, DTYPE)
    _put(p_to, 2, 0, -_product(x_22, y_20, DTYPE), p_factor, o_r, C, DTYPE)
    _put(p_to, 2, 1, -_product(x_22, y_21, DTYPE), p_factor, o_r, C, DTYPE)
    _put(p_to, 2, 2, x_22, p_factor, o_r, C, DTYPE)
    b_30, b_31 = _product(x_32, y_20, DTYPE), _product(x_32, y_21, DTYPE)
    b_30, b_31 = b_30 + _product(x_33, y_30, DTYPE), b_31 + _product(x_33, y_31, DTYPE)
    _put(p_to, 3, 0, -b_30, p_factor, o_r, C, DTYPE)
    _put(p_to, 3, 1, -b_31, p_factor, o_r, C, DTYPE)
    _put(p_to, 3, 2, x_32, p_factor, o_r, C, DTYPE)
    _put(p_to, 3, 3, x_33, p_factor, o_r, C, DTYPE)


@triton.jit(do_not_specialize=("stride_x", "stride_b", "stride_a"))
def delta_intra_kernel(
    p_x, p_b, p_a, p_rate, p_bias, p_table, p_sums, p_lower, p_scores, p_inverse, p_factors, p_kd, p_kg, p_qg, p_left,
    stride_x, stride_b, stride_a, scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, LOG2_BK: tl.constexpr,
    HALF: tl.constexpr, LOG2_HALF: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, SOLVE: tl.constexpr
):  # fmt: skip
    """Compute one chunk of one head. Grid: (chunks HV,). SOLVE: the stage of the inverse. BLOCKS: all other work.

    stride_x is in units of UNIT values (`stride_unit`). The tiles of all (chunk, head) pairs are consecutive. In fp32:
    p_sums [C, BK] (or [2, C]), p_lower [C, C], p_factors [FACTORS, C] and p_left [BK] (or one value). In the rows'
    dtype: p_scores and p_inverse [C, C], and with a gate per row (BY_ROW) p_kd, p_kg and p_qg [C, BK].
    """
    wait_for_previous()
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_unit = tl.program_id(0).to(tl.int64)
    i_chunk, i_h = i_unit // HV, i_unit % HV
    p_low = p_lower + i_unit * (C * C)
    p_chunk = p_table + i_chunk * TABLE_WIDTH
    i_first, i_end = tl.load(p_chunk), tl.load(p_chunk + (TABLE_WIDTH - 2))
    # A captured step has room for more chunks than most steps use.
    if i_first >= i_end:
        return
    if BLOCKS:
        o_c = tl.arange(0, C)
        i_row = i_first + o_c
        # Rows after a prompt's last are zeros and change nothing.
        m_row = i_row < i_end
        m_later = o_c[:, None] >= o_c[None, :]
        o_square = o_c[:, None] * C + o_c[None, :]
        b_beta = sigmoid(tl.load(p_b + i_row * stride_b + i_h, mask=m_row, other=0.0).to(tl.float32))
        b_rate = -tl.exp(tl.load(p_rate + i_h)) * LOG2_E
        p_q = p_x + i_row[:, None] * (stride_x * UNIT) + i_h // (HV // HK) * DK
        p_k = p_q + HK * DK
        if BY_ROW:
            o_k = tl.arange(0, BK)
            m_k = o_k < DK
            p_sum = p_sums + i_unit * (C * BK)
            b_bias = tl.load(p_bias + i_h * DK + o_k, mask=m_k, other=0.0)
            first = sums_by_row(p_a + i_h * DK, p_sum, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK, C)
            # Other threads read the sums.
            tl.debug_barrier()
            i_tile = i_unit * (C * BK)
            b_pairs, b_scores, b_kk, b_qq = products_by_row(
                p_q, p_k, p_sum, p_qg + i_tile, p_kg + i_tile, p_kd + i_tile, p_left + i_unit * BK, m_row, o_c,
                first, DK, BK, HALF, LOG2_HALF, C, DTYPE,
            )  # fmt: skip
        else:
            p_sum = p_sums + i_unit * (2 * C)
            b_a = tl.load(p_a + i_row * stride_a + i_h, mask=m_row, other=0.0).to(tl.float32)
            b_gate = tl.where(m_row, b_rate * softplus(b_a + tl.load(p_bias + i_h)), 0.0)
            # Sums are fp64, stored as two fp32 values, because the compiler chooses their order. After a gate that
            # leaves nothing, positions between which nothing is lost would differ by a rounding error of that gate.
            b_exact = tl.cumsum(b_gate.to(tl.float64))
            b_high = b_exact.to(tl.float32)
            # Through memory, because otherwise each thread would compute the sums of all its rows and columns.
            tl.store(p_sum + o_c, b_high)
            tl.store(p_sum + C + o_c, (b_exact - b_high.to(tl.float64)).to(tl.float32))
            o_k = tl.arange(0, BK)
            m_x = m_row[:, None] & (o_k < DK)[None, :]
            b_q = tl.load(p_q + o_k[None, :], mask=m_x, other=0.0)
            b_k = tl.load(p_k + o_k[None, :], mask=m_x, other=0.0)
            b_kk = sum_columns(b_k.to(tl.float32) * b_k.to(tl.float32), C, BK, LOG2_BK)
            b_qq = sum_columns(b_q.to(tl.float32) * b_q.to(tl.float32), C, BK, LOG2_BK)
            b_columns = operand(b_k, DTYPE)
            b_pairs = tl.dot(b_columns, tl.trans(b_columns), input_precision="ieee")
            b_scores = tl.dot(operand(b_q, DTYPE), tl.trans(b_columns), input_precision="ieee")
            tl.debug_barrier()
            b_sum, b_rest = tl.load(p_sum + o_c), tl.load(p_sum + C + o_c)
            b_apart = b_sum[:, None] - b_sum[None, :] + (b_rest[:, None] - b_rest[None, :])
            b_decay = tl.where(m_later, power_of_two(tl.where(m_later, b_apart, 0.0)), 0.0)
            b_pairs, b_scores = b_pairs * b_decay, b_scores * b_decay
        # rsqrt is not correctly rounded, but gives the same bits wherever it is used.
        b_k_length, b_out = tl.rsqrt(b_kk + eps), tl.rsqrt(b_qq + eps) * scale
        store_rounded(p_scores + i_unit * (C * C) + o_square, b_scores * b_out[:, None], DTYPE)
        p_factor = p_factors + i_unit * (FACTORS * C) + o_c
        tl.store(p_factor, b_k_length)
        tl.store(p_factor + C, b_beta)
        if BY_ROW:
            tl.store(p_factor + 2 * C, b_out)
        else:
            b_last, b_last_rest = tl.load(p_sum + (C - 1)), tl.load(p_sum + (2 * C - 1))
            b_grown = power_of_two(b_sum)
            tl.store(p_factor + 2 * C, b_out * b_grown)
            tl.store(p_factor + 3 * C, b_k_length * b_grown)
            tl.store(p_factor + 4 * C, power_of_two(b_last - b_sum + (b_last_rest - b_rest)))
            tl.store(p_left + i_unit, power_of_two(b_last))
        b_lower = tl.where(o_c[:, None] > o_c[None, :], b_pairs, 0.0)
        b_lower = b_lower * (b_beta * b_k_length)[:, None] * b_k_length[None, :]
        tl.store(p_low + o_square, b_lower)
        if SOLVE:
            tl.debug_barrier()
    if SOLVE:
        # One launch loads the tiles too, because Triton changes the order of K for operands that it knows from bf16.
        _solve(p_low, p_inverse + i_unit * (C * C), p_factors + i_unit * (FACTORS * C), C, DTYPE)
