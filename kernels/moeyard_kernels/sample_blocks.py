"""Triton: what the kernels of `sample` share: edited logits, order-preserving keys, weights, masses and noise.

A value X is fp32, or fp64 in a launch with edits, so that every comparison is that of the float64 reference. Masses are
weights in fixed point: sums of integers do not depend on their order, hence on no tile.
"""

import triton
import triton.language as tl

from moeyard_kernels.ref.sample import BIAS_BITS, COUNT_SHIFT

# Larger than any token id.
NO_ID = tl.constexpr(2**31 - 1)
# Scores in fp32 are off by less than this where they can win.
SLACK = tl.constexpr(1e-4)

_BIAS_MASK = tl.constexpr(2**BIAS_BITS - 1)
_IN_PROMPT = tl.constexpr(2**BIAS_BITS)
_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_LARGEST = tl.constexpr(1e300)


@triton.jit
def values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, m_v, V, L, EDIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Edited logits of row i_b at o_v, as X; -inf where m_v is off."""
    b_x = tl.load(p_logits + i_b * V + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
    if EDIT:
        b_x = b_x.to(tl.float64)
        slot = tl.load(p_slots + i_b)
        if slot >= 0:
            repetition = tl.load(p_penalties + i_b * 3)
            frequency = tl.load(p_penalties + i_b * 3 + 1)
            presence = tl.load(p_penalties + i_b * 3 + 2)
            b_word = tl.load(p_words + slot * V + o_v, mask=m_v, other=0)
            b_index = b_word & _BIAS_MASK
            b_bias = tl.load(p_bias + slot * L + b_index - 1, mask=b_index > 0, other=0.0)
            b_x += b_bias
            b_x = tl.where(b_word >= _IN_PROMPT, tl.where(b_x > 0, b_x / repetition, b_x * repetition), b_x)
            b_count = b_word >> _COUNT_SHIFT
            b_x = tl.where(b_count > 0, b_x - (frequency * b_count.to(tl.float64) + presence), b_x)
            b_x = tl.where(b_x > _LARGEST, _LARGEST, tl.where(b_x < -_LARGEST, -_LARGEST, b_x))
            b_x = tl.where((b_bias == -float("inf")) | (m_v == 0), -float("inf"), b_x)
    return b_x


@triton.jit
def to_key(x):  # type: ignore[no-untyped-def]
    """Integers (32 or 64 bits) in the order of the values X; both zeros give one key, a NaN the largest."""
    x = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        return tl.where(x != x, 0x7FFFFFFFFFFFFFFF, key)
    else:  # noqa: RET505
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def from_key(key):  # type: ignore[no-untyped-def]
    """The value X of a key."""
    if key.dtype == tl.int64:
        return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:  # noqa: RET505
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(b_key, k, low, high):  # type: ignore[no-untyped-def]
    """The largest t in [low, high] that at least k of the keys reach, given that they reach `low`."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        if tl.sum((b_key >= middle).to(tl.int32)) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def before(b_x, o_v, x, i_v):  # type: ignore[no-untyped-def]
    """Which tokens come before token i_v of value x: larger values first, then lower ids."""
    return (b_x > x) | ((b_x == x) & (o_v < i_v))


@triton.jit
def weight(b_x, top, temperature):  # type: ignore[no-untyped-def]
    """exp((x - top) / temperature) in fp64, by the formula of the reference."""
    return tl.exp((b_x.to(tl.float64) - top.to(tl.float64)) / temperature)


@triton.jit
def mass(b_w, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights up to 1 in fixed point, rounded to the nearest 1 / SCALE."""
    return (b_w * SCALE + 0.5).to(tl.int64)


@triton.jit
def noise(seed, position, o_v):  # type: ignore[no-untyped-def]
    """Exp(1) of each token id, in fp64, by the formula of the reference."""
    b_block = (o_v >> 2).to(tl.uint32)
    b_zero = b_block * 0
    b_0, b_1, b_2, b_3 = tl.philox(seed, b_block, b_zero + position.to(tl.uint32), b_zero, b_zero)
    b_low = tl.where((o_v & 1) == 0, b_0, b_1)
    b_high = tl.where((o_v & 1) == 0, b_2, b_3)
    b_word = tl.where((o_v & 2) == 0, b_low, b_high)
    return -tl.log((b_word.to(tl.float64) + 0.5) * 2.0**-32)


@triton.jit
def log_noise(seed, position, start, BV: tl.constexpr):  # type: ignore[no-untyped-def]
    """log E of the tokens start .. start + BV - 1 (start a multiple of 4) in fp32, off by at most 2e-5."""
    b_block = ((start >> 2) + tl.arange(0, BV // 4)).to(tl.uint32)
    b_zero = b_block * 0
    b_0, b_1, b_2, b_3 = tl.philox(seed, b_block, b_zero + position.to(tl.uint32), b_zero, b_zero)
    b_word = tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [BV]).to(tl.int32, bitcast=True)
    # The distance of the uniform to 0 or to 1, whichever is nearer, keeps its digits in fp32.
    b_upper = b_word < 0
    b_near = (tl.where(b_upper, ~b_word, b_word).to(tl.float32) + 0.5) * 2.0**-32
    b_e = -tl.log2(tl.where(b_upper, 1.0 - b_near, b_near)) * 0.6931471805599453
    b_series = b_near * (1.0 + b_near * (0.5 + b_near * 0.3333333333333333))
    return tl.log2(tl.where(b_upper & (b_near < 0.015625), b_series, b_e)) * 0.6931471805599453
