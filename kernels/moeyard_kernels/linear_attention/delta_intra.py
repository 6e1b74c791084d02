"""Triton: what a chunk of 64 positions of the gated delta rule needs of itself alone, whatever the state before it.

With G_i the sum of log2 of the gates up to position i of the chunk (every exponential here is of base 2), and for
j <= i D_ij = exp2(G_i - G_j), of each of the Dk rows of the state in Kimi Delta Attention:

    pairs_ij = sum over d of k_id k_jd D_ijd for j < i;  scores_ij = the same of q_i and k_j, for j <= i
    T = (I + beta pairs)^-1 beta

Keys and queries stay as long as they are: lengths are a number of each row, which goes into what a product gave instead
of what it takes. So `inverse` is T with rows over the keys' lengths, and what is new of a chunk comes out over the
lengths, which scores and state then want no more. `delta_chunk` reads these tiles and a few numbers of each row
(`FACTORS`). A gate of the head is such a number too; gates of rows of the state are not, hence for these, of raw rows,

    kd = exp2(G) k;  kg = exp2(G_64 - G) k;  qg = exp2(G) q;  left = exp2(G_64)

exp2(-G_j) alone would leave fp32, so with a gate per row products go by levels: where i and j first part, from the
highest bit, at bit l, there is one position b between them that ends the lower half of their block of 2^(l + 1), and
D_ij = exp2(G_i - G_b) exp2(G_b - G_j), neither above 1. Hence six products over a tile of 64 x 64, each with one
exponential per value, and no gate, however strong, that overflows or is clamped. Levels 0 to 3 are the diagonal blocks
of 16, 4 and 5 those off the diagonal. T goes by the same levels: of a block of which both halves are inverted, the
inverse is X - X C X, C being what lies between the halves (forward substitution by blocks; powers of the whole, as
Newton's steps have them, grow beyond any precision where keys are alike).

Stages are one launch or two (`delta_chunk`): what passes between them is stored as it is used, so the bits agree.
Sums are in one order whatever the tile: over positions in two runs of 32, over Dk by halves. Of Dk a program has HALF
columns at a time, for registers: two programs of 8 warps fit a multiprocessor, one's products under the other's
exponentials.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.common.rounding import INTERPRETED, round_to
from moeyard_kernels.linear_attention.halves import LOG2_E, TABLE_WIDTH, power_of_two, sigmoid, softplus, sum_columns

_DECAY = tl.constexpr("{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }")
# Positions of a chunk are 2^6.
LEVELS = tl.constexpr(6)
# Numbers of each row of a chunk: 1 / |k|; its rate; what an output is times; and with a gate of the head, what k S is
# times, and what is new of a row on its way into the state.
FACTORS = tl.constexpr(5)


@triton.jit
def operand(b_x, DTYPE: tl.constexpr):
    """What a product takes for values b_x: rounded to DTYPE (the interpreter gets products of bf16 wrong)."""
    if INTERPRETED:  # noqa: SIM108 - of two types
        b_y = round_to(b_x.to(tl.float32), DTYPE)
    else:
        b_y = b_x.to(DTYPE)
    return b_y


@triton.jit
def _once(b_x, DTYPE: tl.constexpr):
    """b_x for a product, through an instruction that Triton does not look into: else it computes all of b_x, with its
    exponentials, for each side of a product anew, and in every group of warps."""
    b_y = operand(b_x, DTYPE)
    if not INTERPRETED:
        if tl.float32 == DTYPE:
            b_y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_y], dtype=tl.float32, is_pure=False, pack=1)
        else:
            b_y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_y], dtype=tl.bfloat16, is_pure=False, pack=2)
    return b_y


@triton.jit
def _decay(b_x):
    """2^-|x|: the sign costs nothing within the instruction."""
    if INTERPRETED:
        b_y = tl.exp2(-tl.abs(b_x))
    else:
        b_y = tl.inline_asm_elementwise(_DECAY, "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def _store(p_y, b_y, DTYPE: tl.constexpr):
    """b_y, rounded to DTYPE, where p_y points to."""
    tl.store(p_y, round_to(b_y, DTYPE).to(p_y.dtype.element_ty))


@triton.jit
def _level(o_c, level):
    """[N, N]: whether i and j part at this bit: in the same block of 2^(level + 1), not in the same half of it."""
    return (o_c[:, None] ^ o_c[None, :]) >> level == 1


@triton.jit
def _of(b_xs, n: tl.constexpr):
    return b_xs[n]


@triton.jit
def _sums_by_row(
    p_a, p_sums, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Sums of log2 of the gates into p_sums [C, BK], of positions up to each, anew in the second half of the chunk.

    A thread has one column of a half.
    """
    RUN: tl.constexpr = C // 2
    o_run = tl.arange(0, 2) * RUN
    b_as = ()
    for r in tl.static_range(RUN):
        i_row = i_first + o_run + r
        b_a = tl.load(
            p_a + i_row[:, None] * stride_a + o_k[None, :], mask=(i_row < i_end)[:, None] & m_k[None, :], other=0.0
        )
        # Triton has no unpacking. All at once: no load passes a store.
        b_as = b_as + (b_a,)  # type: ignore[assignment]  # noqa: RUF005
    b_sum = tl.zeros([2, BK], dtype=tl.float32)
    for r in tl.static_range(RUN):
        m_row = (i_first + o_run + r < i_end)[:, None] & m_k[None, :]
        b_gate = b_rate * softplus(_of(b_as, r).to(tl.float32) + b_bias[None, :])
        b_sum += tl.where(m_row, b_gate, 0.0)
        tl.store(p_sums + (o_run + r)[:, None] * BK + o_k[None, :], b_sum)


@triton.jit
def _products_by_row(
    p_q, p_k, p_sums, p_qg, p_kg, p_kd, p_left, m_row, o_c, DK: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
    LOG2_HALF: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """(pairs, scores) [C, C] and sums of squares [C] of keys and of queries; stores what reads the state."""
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
        for level in range(LEVELS):
            o_mid = ((o_c >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
            # The sums of the upper half of a chunk are of that half alone, and before it there is nothing.
            m_mid = (o_c < C // 2) | (level < LEVELS - 1)
            b_mid = tl.load(p_sums + o_mid[:, None] * BK + o_k[None, :], mask=m_mid[:, None], other=0.0)
            # Sums do not rise: this is G_i - G_b in the upper half of a block and G_b - G_j in the lower.
            b_decay = _decay(b_sum - b_mid)
            b_columns = _once(b_k * b_decay, DTYPE)
            m_level = _level(o_c, level)
            b_found = tl.dot(b_columns, tl.trans(b_columns), input_precision="ieee")
            b_pairs += tl.where(m_level, b_found, 0.0)
            b_found = tl.dot(_once(b_q * b_decay, DTYPE), tl.trans(b_columns), input_precision="ieee")
            b_scores += tl.where(m_level, b_found, 0.0)
        b_half = tl.load(p_sums + (C // 2 - 1) * BK + o_k)
        b_last = b_half + tl.load(p_sums + (C - 1) * BK + o_k)
        b_sum += tl.where(o_c[:, None] < C // 2, 0.0, b_half[None, :])
        b_grown = power_of_two(b_sum)
        _store(p_qg + o_tile, b_q * b_grown, DTYPE)
        _store(p_kd + o_tile, b_k * b_grown, DTYPE)
        _store(p_kg + o_tile, b_k * power_of_two(b_last[None, :] - b_sum), DTYPE)
        tl.store(p_left + o_k, power_of_two(b_last))
    b_scores = tl.where(o_c[:, None] > o_c[None, :], b_scores, 0.0)
    b_scores = tl.where(o_c[:, None] == o_c[None, :], b_qk[:, None], b_scores)
    return b_pairs, b_scores, b_kk, b_qq


@triton.jit
def _product(b_x, b_y, DTYPE: tl.constexpr):
    """b_x @ b_y of fp32, in tf32 unless rows are fp32."""
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    return tl.dot(b_x, b_y, input_precision=PRECISION)


@triton.jit
def _invert_block(p_low, o_r, C: tl.constexpr, DTYPE: tl.constexpr):
    """(I + L)^-1 [16, 16] of the strictly lower L at p_low."""
    b_low = tl.load(p_low + o_r[:, None] * C + o_r[None, :])
    # Above the diagonal it holds zeros.
    b_x = tl.where(_level(o_r, 0), -b_low, tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0))
    for level in tl.static_range(1, 4):
        b_c = tl.where(_level(o_r, level), b_low, 0.0)
        b_x -= _product(b_x, _product(b_c, b_x, DTYPE), DTYPE)
    return b_x


@triton.jit
def _put(p_to, i: tl.constexpr, j: tl.constexpr, b_x, p_factor, o_r, C: tl.constexpr, DTYPE: tl.constexpr):
    """Block (i, j) of the inverse, times its rows' 1 / |k| and its columns' rates."""
    b_scaled = b_x * tl.load(p_factor + 16 * i + o_r)[:, None] * tl.load(p_factor + (C + 16 * j) + o_r)[None, :]
    _store(p_to + 16 * (i * C + j) + o_r[:, None] * C + o_r[None, :], b_scaled, DTYPE)


@triton.jit
def _solve(p_low, p_to, p_factor, C: tl.constexpr, DTYPE: tl.constexpr):
    """T of the lower [C, C] at p_low into p_to, by blocks of 16, of which the ones above the diagonal are zeros."""
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
    # What lies below times the inverse above, which the inverse below is times.
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
    """One chunk of one head. Grid: (chunks HV,). BLOCKS, SOLVE: the stages that this launch has.

    BLOCKS: all that is no solution; SOLVE: the inverse. stride_x is in units of UNIT values (`stride_unit`). Tiles of a
    chunk and head lie one behind the other: p_sums [C, BK] (or [C]), p_lower [C, C], p_factors [FACTORS, C] and p_left
    [BK] (or one value) in fp32, p_scores and p_inverse [C, C], p_kd, p_kg, p_qg [C, BK] in the rows' dtype; the last
    three with a gate of each row only.
    """
    wait_for_previous()
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    i_unit = tl.program_id(0).to(tl.int64)
    i_chunk, i_h = i_unit // HV, i_unit % HV
    p_low = p_lower + i_unit * (C * C)
    if BLOCKS:
        p_chunk = p_table + i_chunk * TABLE_WIDTH
        i_first, i_end = tl.load(p_chunk), tl.load(p_chunk + (TABLE_WIDTH - 2))
        o_c = tl.arange(0, C)
        i_row = i_first + o_c
        # Rows behind a prompt's last are zeros, and change nothing.
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
            _sums_by_row(p_a + i_h * DK, p_sum, i_first, i_end, stride_a, b_rate, b_bias, o_k, m_k, BK, C)
            # Other threads read them.
            tl.debug_barrier()
            i_tile = i_unit * (C * BK)
            b_pairs, b_scores, b_kk, b_qq = _products_by_row(
                p_q, p_k, p_sum, p_qg + i_tile, p_kg + i_tile, p_kd + i_tile, p_left + i_unit * BK, m_row, o_c,
                DK, BK, HALF, LOG2_HALF, C, DTYPE,
            )  # fmt: skip
        else:
            p_sum = p_sums + i_unit * C
            b_a = tl.load(p_a + i_row * stride_a + i_h, mask=m_row, other=0.0).to(tl.float32)
            b_gate = tl.where(m_row, b_rate * softplus(b_a + tl.load(p_bias + i_h)), 0.0)
            # Through memory, or each thread would compute those of all rows and columns that it holds.
            tl.store(p_sum + o_c, tl.cumsum(b_gate))
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
            b_sum = tl.load(p_sum + o_c)
            b_decay = tl.where(m_later, power_of_two(tl.where(m_later, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
            b_pairs, b_scores = b_pairs * b_decay, b_scores * b_decay
        # Not rounded as a root and a quotient would be, and alike wherever it is used.
        b_k_length, b_out = tl.rsqrt(b_kk + eps), tl.rsqrt(b_qq + eps) * scale
        _store(p_scores + i_unit * (C * C) + o_square, b_scores * b_out[:, None], DTYPE)
        p_factor = p_factors + i_unit * (FACTORS * C) + o_c
        tl.store(p_factor, b_k_length)
        tl.store(p_factor + C, b_beta)
        if BY_ROW:
            tl.store(p_factor + 2 * C, b_out)
        else:
            b_last = tl.load(p_sum + (C - 1))
            b_grown = power_of_two(b_sum)
            tl.store(p_factor + 2 * C, b_out * b_grown)
            tl.store(p_factor + 3 * C, b_k_length * b_grown)
            tl.store(p_factor + 4 * C, power_of_two(b_last - b_sum))
            tl.store(p_left + i_unit, power_of_two(b_last))
        b_lower = tl.where(o_c[:, None] > o_c[None, :], b_pairs, 0.0)
        b_lower = b_lower * (b_beta * b_k_length)[:, None] * b_k_length[None, :]
        tl.store(p_low + o_square, b_lower)
        if SOLVE:
            tl.debug_barrier()
    if SOLVE:
        # Out of memory here too: of a product's operands that it sees to come of bf16 Triton takes K in another order.
        _solve(p_low, p_inverse + i_unit * (C * C), p_factors + i_unit * (FACTORS * C), C, DTYPE)
