"""What the kernels of linear attention share: sums in one order whatever the tile, and the gates' arithmetic."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.types import state_slots

LOG2_E = tl.constexpr(1.4426950408889634)

# Values of a row of `PromptChunks.table`: first row, prompt's first row, pairs of a row behind and a slot.
TABLE_WIDTH = tl.constexpr(state_slots.WIDTH)
SNAPSHOTS = tl.constexpr(state_slots.SNAPSHOTS)


@triton.jit
def sum_rows(b_x, N: tl.constexpr, LOG2_N: tl.constexpr, M: tl.constexpr):
    """[M]: the sums of b_x [N, M] by halves, (n, n + N / 2) first: `tl.sum` follows the layout, hence the tile."""
    for i in tl.static_range(LOG2_N):
        b_x = tl.sum(tl.reshape(b_x, [2, N >> (i + 1), M]), 0)
    return tl.reshape(b_x, [M])


@triton.jit
def power_of_two(b_x):
    """2^x in fp32, 0 where that is no normal number: one instruction, `tl.exp2` has four for numbers that are none."""
    if INTERPRETED:
        b_y = tl.exp2(b_x)
    else:
        b_y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def _reciprocal(b_x):
    """1 / x in fp32 to about one unit in the last place, of normal x."""
    if INTERPRETED:
        b_y = 1.0 / b_x
    else:
        b_y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    return b_y


@triton.jit
def softplus(b_x):
    """log(1 + e^x) in fp32, relatively exact however small: log(1 + e) is 2 artanh(s), s = e / (2 + e) <= 1 / 3.

    artanh(s) / s as a polynomial of s^2 (least maximum of the error, by Chebyshev nodes): within 1.6e-8.
    """
    b_e = power_of_two(tl.abs(b_x) * -LOG2_E)
    b_s = b_e * _reciprocal(2.0 + b_e)
    b_t = b_s * b_s
    b_sum = ((0.13433775 * b_t + 0.14116978) * b_t + 0.20003835) * b_t + 0.3333332
    b_twice = b_s + b_s
    return tl.maximum(b_x, 0.0) + (b_twice + b_twice * b_t * b_sum)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x) in fp32."""
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def sum_columns(b_x, R: tl.constexpr, N: tl.constexpr, LOG2_N: tl.constexpr):
    """[R]: the sums of b_x [R, N] by halves, (2 n, 2 n + 1) first: most of them lie in one thread."""
    for i in tl.static_range(LOG2_N):
        b_x = tl.sum(tl.reshape(b_x, [R, N >> (i + 1), 2]), 2)
    return tl.reshape(b_x, [R])
