"""Triton: what `rope_gqa_decode` does to a step's queries and new key, and to scores of several blocks at once."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED, opaque, round_to
from moeyard_kernels.elementwise.rms_norm import row_scale


@triton.jit
def joined(b_first, b_second, DTYPE: tl.constexpr):
    """The halves [M, BH] of rows, one behind the other, in DTYPE: [M, 2 BH].

    Opaque: of a product's operand that Triton sees to be joined it makes one of another order along the sum, hence
    other bits, and computes all of it anew in every warp.
    """
    b_x = tl.permute(tl.join(b_first, b_second), (0, 2, 1))
    return opaque(tl.reshape(b_x, [b_x.shape[0], 2 * b_x.shape[2]]).to(DTYPE), DTYPE)


@triton.jit
def read_key(
    p_x, p_cos, p_sin, p_norm,
    D: tl.constexpr, BK: tl.constexpr, NORMED: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """All that the rotation of one head takes: its values, the others of their pairs, cos and sin, [D] each; weights of
    the norm of either; the head as BK rows that are all the same, for its sum to be that of rms_norm."""
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
def turned_key(b_read, D: tl.constexpr, eps, NORMED: tl.constexpr):
    """[D]: what `rotated_heads` gives of the head of `read_key`, fp32 rounded to its dtype."""
    DTYPE: tl.constexpr = b_read[0].dtype
    ANGLE: tl.constexpr = b_read[2].dtype
    # A weight in fp32 comes before the rounding, one of x's dtype behind it: see the oracle of `rms_norm`.
    WEIGHT: tl.constexpr = b_read[4].dtype
    b_own, b_other = b_read[0].to(tl.float32), b_read[1].to(tl.float32)
    if NORMED:
        b_scale = tl.max(row_scale(b_read[6].to(tl.float32), D, eps), 0)
        b_own = round_to(round_to(b_own * b_scale, WEIGHT) * b_read[4].to(tl.float32), DTYPE)
        b_other = round_to(round_to(b_other * b_scale, WEIGHT) * b_read[5].to(tl.float32), DTYPE)
    # As `rotate`: a cos - b sin of the first of a pair, b cos + a sin of the second.
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
    """The maximum of each row of each of TAIL tiles, 1, 2 or 4: together, so that warps meet once."""
    if TAIL == 4 and not INTERPRETED:
        b_tops = tl.reduce((b_ss[0], b_ss[1], b_ss[2], b_ss[3]), 1, _larger_of_four)
    elif TAIL == 2 and not INTERPRETED:
        b_tops = tl.reduce((b_ss[0], b_ss[1]), 1, _larger_of_two)
    else:
        b_tops = ()
        for u in tl.static_range(TAIL):
            b_tops = b_tops + (tl.max(b_ss[u], 1),)  # type: ignore[assignment]  # noqa: RUF005
    return b_tops
