"""What the kernels of linear attention share: sums in one order whatever the tile, and the gates' arithmetic."""

import triton
import triton.language as tl

from moeyard_kernels.types import prompt_chunks

# Values of a row of `PromptChunks.table`: first row, prompt's first row, pairs of a row behind and a slot.
TABLE_WIDTH = tl.constexpr(prompt_chunks.WIDTH)
SNAPSHOTS = tl.constexpr(prompt_chunks.SNAPSHOTS)


@triton.jit
def sum_rows(b_x, N: tl.constexpr, LOG2_N: tl.constexpr, M: tl.constexpr):
    """[M]: the sums of b_x [N, M] by halves, (n, n + N / 2) first: `tl.sum` follows the layout, hence the tile."""
    for i in tl.static_range(LOG2_N):
        b_x = tl.sum(tl.reshape(b_x, [2, N >> (i + 1), M]), 0)
    return tl.reshape(b_x, [M])


@triton.jit
def unit_length(b_x, eps, N: tl.constexpr, LOG2_N: tl.constexpr):
    """b_x [N] fp32 over the root of its sum of squares and eps."""
    b_square = sum_rows(tl.reshape(b_x * b_x, [N, 1]), N, LOG2_N, 1)
    return b_x * tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(b_square + eps))


@triton.jit
def softplus(b_x):
    """log(1 + e^x) in fp32, small results too: log(u) e / (u - 1) takes back what u = 1 + e lost of e."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_lost = b_u - 1.0
    b_log = tl.where(b_lost == 0.0, b_e, tl.log(b_u) * (b_e / tl.where(b_lost == 0.0, 1.0, b_lost)))
    return tl.maximum(b_x, 0.0) + b_log


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
