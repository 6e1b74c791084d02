"""Triton: parts of `rope_gqa_decode`: the rotated queries and new key, and row maxima of several blocks at once."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED, opaque, round_to
from moeyard_kernels.elementwise.rms_norm import row_scale


@triton.jit
def join_halves(b_first, b_second, DTYPE: tl.constexpr):
    """Concatenate the halves [M, BH] of rows into [M, 2 BH] of DTYPE.

    The result is opaque. If Triton sees that an operand of a product is joined, it changes the order of the sum, hence
    the bits, and every warp computes all of the operand.
    """
    b_x = tl.permute(tl.join(b_first, b_second), (0, 2, 1))
    return opaque(tl.reshape(b_x, [b_x.shape[0], 2 * b_x.shape[2]]).to(DTYPE), DTYPE)


@triton.jit
def read_key(
    p_x, p_cos, p_sin, p_norm,
    D: tl.constexpr, BK: tl.constexpr, NORMED: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Load one head for `rotated_key`: its values, the other value of each pair, cos and sin, [D] each.

    Also return the norm's weights of both values, and the head as BK equal rows, so that it is summed as in rms_norm.
    """
    BH: tl.constexpr = D // 2
    o_d = tl.arange(0, D)
    o_pair = tl.where(o_d < BH, o_d, o_d - BH)
    if INTERLEAVED:
        o_own = 2 * o_pair + tl.where(o_d < BH, 0, 1)
        o_other = 2 * o_pair + tl.where(o_d < BH, 1, 0)
    else:
        o_own = o_d
        o_other = tl.where(o_d < BH, o_d + BH, o_pair)
    b_own, b_other = tl.load(p_x + o_own), tl.load(p_x + o_other)
    b_cos, b_sin = tl.load(p_cos + o_pair), tl.load(p_sin + o_pair)
    b_weight, b_weight_other, b_rows = b_own, b_own, b_own
    if NORMED:
        b_weight, b_weight_other = tl.load(p_norm + o_own), tl.load(p_norm + o_other)
        b_rows = tl.load(p_x + (tl.zeros([BK, 1], tl.int32) + o_d[None, :]))
    return b_own, b_other, b_cos, b_sin, b_weight, b_weight_other, b_rows


@triton.jit
def rotated_key(b_read, D: tl.constexpr, eps, NORMED: tl.constexpr):
    """Return the rotated head of `read_key`, [D] with the bits of `rotated_heads`: fp32 rounded to its dtype."""
    DTYPE: tl.constexpr = b_read[0].dtype
    ANGLE: tl.constexpr = b_read[2].dtype
    # A weight in fp32 is applied before the rounding, one in x's dtype after it: see the reference of `rms_norm`.
    WEIGHT: tl.constexpr = b_read[4].dtype
    b_own, b_other = b_read[0].to(tl.float32), b_read[1].to(tl.float32)
    if NORMED:
        b_scale = tl.max(row_scale(b_read[6].to(tl.float32), D, eps), 0)
        b_own = round_to(round_to(b_own * b_scale, WEIGHT) * b_read[4].to(tl.float32), DTYPE)
        b_other = round_to(round_to(b_other * b_scale, WEIGHT) * b_read[5].to(tl.float32), DTYPE)
    # As in `rotate`: a cos - b sin for the first of a pair, b cos + a sin for the second.
    WIDE: tl.constexpr = tl.float32 if tl.float32 == ANGLE else DTYPE
    b_sine = round_to(b_other * b_read[3].to(tl.float32), WIDE)
    b_sine = tl.where(tl.arange(0, D) < D // 2, -b_sine, b_sine)
    return round_to(round_to(round_to(b_own * b_read[2].to(tl.float32), WIDE) + b_sine, WIDE), DTYPE)


@triton.jit
def _larger_of_two(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _larger_of_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2), tl.maximum(a3, b3)


@triton.jit
def row_maxima(b_ss, TAIL: tl.constexpr):
    """Return the row maxima of TAIL tiles (1, 2 or 4), computed together so that warps synchronise once."""
    if TAIL == 4 and not INTERPRETED:
        b_tops = tl.reduce((b_ss[0], b_ss[1], b_ss[2], b_ss[3]), 1, _larger_of_four)
    elif TAIL == 2 and not INTERPRETED:
        b_tops = tl.reduce((b_ss[0], b_ss[1]), 1, _larger_of_two)
    else:
        b_tops = ()
        for u in tl.static_range(TAIL):
            b_tops = b_tops + (tl.max(b_ss[u], 1),)  # type: ignore[assignment]  # noqa: RUF005
    return b_tops
