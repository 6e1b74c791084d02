"""Triton: shared parts of the kernels of `sample`: edited logits, order-preserving keys, weights, masses and noise.

A value X is fp32, or fp64 in a launch with edits, so that comparisons match the float64 reference. Masses are weights
in fixed point. Integer sums do not depend on their order, hence not on the tile.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.launch import interpreted
from moeyard_kernels.types.sampling import BIAS_BITS, COUNT_SHIFT

# Larger than any token id.
NO_ID = tl.constexpr(2**31 - 1)
# Bound of the error of fp32 scores that can win.
SLACK = tl.constexpr(1e-4)

_BIAS_MASK = tl.constexpr(2**BIAS_BITS - 1)
_IN_PROMPT = tl.constexpr(2**BIAS_BITS)
_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, m_v, V, L, EDIT: tl.constexpr):
    """Return edited logits of row i_b at o_v, as X; -inf where m_v is false."""
    b_x = tl.load(p_logits + i_b * V + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
    if EDIT:
        b_x = b_x.to(tl.float64)
        slot = tl.load(p_slots + i_b)
        if slot >= 0:
            repetition = tl.load(p_penalties + i_b * 3)
            frequency = tl.load(p_penalties + i_b * 3 + 1)
            presence = tl.load(p_penalties + i_b * 3 + 2)
            b_word = tl.load(p_words + slot * V + o_v, mask=m_v, other=0)
            if L > 0:
                b_index = b_word & _BIAS_MASK
                b_bias = tl.load(p_bias + slot * L + b_index - 1, mask=b_index > 0, other=0.0)
                b_x = tl.where(b_bias == -float("inf"), b_bias, b_x + b_bias)
            b_other = tl.where(b_x > 0, _quotient(b_x, repetition), b_x * repetition)
            b_x = tl.where(b_word >= _IN_PROMPT, b_other, b_x)
            b_count = b_word >> _COUNT_SHIFT
            b_x = tl.where(b_count > 0, b_x - (frequency * b_count.to(tl.float64) + presence), b_x)
    return b_x


@triton.jit
def _quotient(b_x, d):
    """Return b_x / d in fp64, correctly rounded, with one division for all of b_x.

    Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990: a quotient off by at
    most one last place is corrected by its exact remainder times the correctly rounded reciprocal.
    """
    if _INTERPRETED:
        return b_x / d
    reciprocal = 1.0 / d
    b_d = tl.zeros_like(b_x) + d
    b_r = tl.zeros_like(b_x) + reciprocal
    b_q = b_x * reciprocal
    b_q = tl.fma(tl.fma(-b_q, b_d, b_x), b_r, b_q)
    b_exact = tl.fma(tl.fma(-b_q, b_d, b_x), b_r, b_q)
    # The remainder of an infinity is a NaN.
    return tl.where(b_x < float("inf"), b_exact, b_x)


@triton.jit
def to_key(x):
    """Return integers (32 or 64 bits) in the order of the values X. Both zeros have one key; a NaN has the largest."""
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
def from_key(key):
    """Return the value X of a key."""
    if key.dtype == tl.int64:
        return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:  # noqa: RET505
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """Return (low + high) / 2, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def quarters(low, high):
    """Return three keys that divide (low, high] into four, for low < high."""
    second = middle(low, high)
    return middle(low, second - 1), second, middle(second, high)


@triton.jit
def reaching(b_key, first, second, third):
    """Mark which of three keys each key reaches, in bits 0, 21 and 42: one sum of less than 2^21 of them counts all."""
    b_both = (b_key >= first).to(tl.int64) + ((b_key >= second).to(tl.int64) << 21)
    return b_both + ((b_key >= third).to(tl.int64) << 42)


@triton.jit
def narrow(counts, k, low, first, second, third, high):
    """Return (low, high) of the quarter that ends with the largest key that at least k reach."""
    most, more, least = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
    new_low = tl.where(least >= k, third, tl.where(more >= k, second, tl.where(most >= k, first, low)))
    new_high = tl.where(least >= k, high, tl.where(more >= k, third - 1, tl.where(most >= k, second - 1, first - 1)))
    return new_low, new_high


@triton.jit
def kth_largest(b_key, k, low, high):
    """Return the largest t in [low, high] that at least k of the keys reach, if they reach `low`."""
    while low < high:
        first, second, third = quarters(low, high)
        counts = tl.sum(reaching(b_key, first, second, third))
        low, high = narrow(counts, k, low, first, second, third, high)
    return low


@triton.jit
def before(b_x, o_v, x, i_v):
    """Return which tokens come before token i_v of value x: larger values first, then lower ids."""
    return (b_x > x) | ((b_x == x) & (o_v < i_v))


@triton.jit
def weight(b_x, top, temperature):
    """Return exp((x - top) / temperature) in fp64, by the formula of the reference."""
    return tl.exp((b_x.to(tl.float64) - top.to(tl.float64)) / temperature)


@triton.jit
def mass_scale(temperature):
    """Return the factor of logit differences in `mass`: log2(e) / temperature, finite."""
    return tl.minimum(1.4426950408889634 / temperature, 1e300)


@triton.jit
def mass(b_x, top, scale, BITS: tl.constexpr):
    """Return exp((x - top) / temperature) as an integer in units of 2^-BITS, off by at most two units; BITS up to 51.

    It is 2^n p(f) with n + f the exponent to base 2, rounded by adding 2^52. The polynomial p of degree 10 interpolates
    2^f on [-1/2, 1/2] at Chebyshev nodes (relative error 8.2e-16). Equal logits have equal masses; that of `top`
    is 2^BITS.
    """
    b_t = tl.maximum((b_x.to(tl.float64) - top.to(tl.float64)) * scale, -64.0)
    b_shifted = b_t + 6755399441055744.0
    b_f = b_t - (b_shifted - 6755399441055744.0)
    b_n = b_shifted.to(tl.int64, bitcast=True).to(tl.int32)
    if _INTERPRETED:
        b_p = b_f * 7.088237907737494e-09 + 1.0207768355030567e-07
        b_p = ((b_p * b_f + 1.3215364560892335e-06) * b_f + 1.5252664252329843e-05) * b_f + 0.00015403530564324087
        b_p = ((b_p * b_f + 0.0013333558212920594) * b_f + 0.00961812910754204) * b_f + 0.055504108664601044
        b_p = ((b_p * b_f + 0.24022650695910186) * b_f + 0.6931471805599464) * b_f + 1.0
    else:
        b_p = _horner(tl.full(b_f.shape, 7.088237907737494e-09, tl.float64), b_f, 1.0207768355030567e-07)
        b_p = _horner(b_p, b_f, 1.3215364560892335e-06)
        b_p = _horner(b_p, b_f, 1.5252664252329843e-05)
        b_p = _horner(b_p, b_f, 0.00015403530564324087)
        b_p = _horner(b_p, b_f, 0.0013333558212920594)
        b_p = _horner(b_p, b_f, 0.00961812910754204)
        b_p = _horner(b_p, b_f, 0.055504108664601044)
        b_p = _horner(b_p, b_f, 0.24022650695910186)
        b_p = _horner(b_p, b_f, 0.6931471805599464)
        b_p = _horner(b_p, b_f, 1.0)
    b_unit = ((b_n + (1023 + BITS)).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (b_p * b_unit + 4503599627370496.0).to(tl.int64, bitcast=True) - 0x4330000000000000


@triton.jit
def _horner(b_p, b_f, c: tl.constexpr):
    return tl.fma(b_p, b_f, tl.full(b_f.shape, c, tl.float64))


@triton.jit
def _words(seed, position, b_block):
    """Philox4x32-10: return the four words of each block of four tokens.

    The result is that of `tl.philox`, which computes both halves of a product apart. Here a 64-bit product is one
    instruction.
    """
    b_0 = b_block.to(tl.uint32)
    b_1 = tl.zeros_like(b_0) + position.to(tl.uint32)
    b_2 = tl.zeros_like(b_0)
    b_3 = tl.zeros_like(b_0)
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        b_a = b_0.to(tl.uint64) * 0xD2511F53
        b_b = b_2.to(tl.uint64) * 0xCD9E8D57
        b_0 = (b_b >> 32).to(tl.uint32) ^ b_1 ^ key_0
        b_1 = b_b.to(tl.uint32)
        b_2 = (b_a >> 32).to(tl.uint32) ^ b_3 ^ key_1
        b_3 = b_a.to(tl.uint32)
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return b_0, b_1, b_2, b_3


@triton.jit
def noise(seed, position, o_v):
    """Return Exp(1) noise of each token id in fp64, by the formula of the reference."""
    b_0, b_1, b_2, b_3 = _words(seed, position, o_v >> 2)
    b_low = tl.where((o_v & 1) == 0, b_0, b_1)
    b_high = tl.where((o_v & 1) == 0, b_2, b_3)
    b_word = tl.where((o_v & 2) == 0, b_low, b_high)
    return -tl.log((b_word.to(tl.float64) + 0.5) * 2.0**-32)


@triton.jit
def _fma(b_x, y, z):
    """Return x y + z in fp32, rounded once on a GPU; for estimates only."""
    if _INTERPRETED:
        return b_x * y + z
    return tl.fma(b_x, tl.zeros_like(b_x) + y, tl.zeros_like(b_x) + z)


@triton.jit
def _log2(b_x):
    """Return log2 in fp32 with an error of at most 2^-22: absolute in (1/2, 2), relative elsewhere."""
    if _INTERPRETED:
        return tl.log2(b_x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log_noise(seed, position, start, BV: tl.constexpr):
    """Return log E of tokens start .. start + BV - 1 (start a multiple of 4) in fp32, off by at most 2e-5."""
    b_0, b_1, b_2, b_3 = _words(seed, position, (start >> 2) + tl.arange(0, BV // 4))
    b_word = tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [BV]).to(tl.int32, bitcast=True)
    # fp32 holds all digits of the uniform's distance to 0 or to 1, whichever is nearer.
    b_upper = b_word < 0
    b_near = _fma((b_word ^ (b_word >> 31)).to(tl.float32), 2.0**-32, 2.0**-33)
    # -log2 of the uniform; near 1 by its series, which keeps all digits.
    b_e = -_log2(tl.where(b_upper, 1.0 - b_near, b_near))
    b_series = _fma(_fma(b_near, 0.4808983469629878, 0.7213475204444817), b_near, 1.4426950408889634) * b_near
    b_log = _log2(tl.where(b_upper & (b_near < 0.015625), b_series, b_e))
    return _fma(b_log, 0.6931471805599453, -0.36651292058166435)
