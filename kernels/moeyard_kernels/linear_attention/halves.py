"""Shared parts of the kernels of linear attention: sums in one order for every tile, and the gates' arithmetic."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.types import state_slots

LOG2_E = tl.constexpr(1.4426950408889634)

# Values per row of `PromptChunks.table`: first row, the prompt's first row, pairs of (row, slot).
TABLE_WIDTH = tl.constexpr(state_slots.WIDTH)
SNAPSHOTS = tl.constexpr(state_slots.SNAPSHOTS)


@triton.jit
def sum_rows(b_x, N: tl.constexpr, LOG2_N: tl.constexpr, M: tl.constexpr):
    """Return [M], the sums of b_x [N, M] by halves, (n, n + N / 2) first. The order of `tl.sum` depends on the tile."""
    for i in tl.static_range(LOG2_N):
        b_x = tl.sum(tl.reshape(b_x, [2, N >> (i + 1), M]), 0)
    return tl.reshape(b_x, [M])


@triton.jit
def power_of_two(b_x):
    """Return 2^x in fp32, 0 instead of subnormal numbers. It is one instruction; `tl.exp2` has four for subnormals."""
    if INTERPRETED:
        b_y = tl.exp2(b_x)
    else:
        b_y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def _reciprocal(b_x):
    """Return 1 / x in fp32 to about one unit in the last place, for normal x."""
    if INTERPRETED:
        b_y = 1.0 / b_x
    else:
        b_y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def softplus(b_x):
    """Return log(1 + e^x) in fp32, with a small relative error for all x.

    log(1 + e) is 2 artanh(s), where s = e / (2 + e) <= 1 / 3. A polynomial in s^2 gives artanh(s) / s within 1.6e-8.
    Its fit at Chebyshev nodes keeps the largest error small.
    """
    b_e = power_of_two(tl.abs(b_x) * -LOG2_E)
    b_s = b_e * _reciprocal(2.0 + b_e)
    b_t = b_s * b_s
    b_sum = ((0.13433775 * b_t + 0.14116978) * b_t + 0.20003835) * b_t + 0.3333332
    b_twice = b_s + b_s
    return tl.maximum(b_x, 0.0) + (b_twice + b_twice * b_t * b_sum)


@triton.jit
def sigmoid(b_x):
    """Return 1 / (1 + e^-x) in fp32."""
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def sum_columns(b_x, R: tl.constexpr, N: tl.constexpr, LOG2_N: tl.constexpr):
    """Return [R], the sums of b_x [R, N] by pairs, (2 n, 2 n + 1) first. Most pairs are in one thread."""
    for i in tl.static_range(LOG2_N):
        b_x = tl.sum(tl.reshape(b_x, [R, N >> (i + 1), 2]), 2)
    return tl.reshape(b_x, [R])
