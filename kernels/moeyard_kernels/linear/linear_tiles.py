"""Triton: the kernels of `linear` with one output tile per program, and the store of all its Triton kernels."""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.common.rounding import product
from moeyard_kernels.common.tile_order import place


@triton.jit
def store(b_acc, p_y, p_bias, o_m, o_n, M, N, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store b_acc [BM, BN] fp32 (its transpose if SWAP), with the bias [N], as rows o_m and columns o_n of y [M, N]."""
    if SWAP:
        b_acc = tl.trans(b_acc)
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_by = p_y + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_by, b_acc.to(p_y.dtype.element_ty), mask=(o_m[:, None] < M) & (o_n[None, :] < N))


@triton.jit(do_not_specialize=["M"])
def linear_tiles_kernel(
    p_x, p_wa, p_wb, p_bias, p_ya, p_yb, M, NA, NB, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of x [M, K] @ wa [NA, K].T, or of wb's after wa's. GROUP 0: there is one row of tiles."""
    wait_for_previous()
    tiles_a = tl.cdiv(NA, BN)
    tiles_n = tiles_a
    if PAIR:
        tiles_n += tl.cdiv(NB, BN)
    if GROUP == 0:
        i_m, i_n = 0, tl.program_id(0)
    else:
        i_m, i_n = place(tl.program_id(0), tl.cdiv(M, BM), tiles_n, GROUP)
    p_w, p_y, N = p_wa, p_ya, NA
    if PAIR:
        second = i_n >= tiles_a
        p_w, p_y, N = tl.where(second, p_wb, p_wa), tl.where(second, p_yb, p_ya), tl.where(second, NB, NA)
        i_n = tl.where(second, i_n - tiles_a, i_n)

    o_m = i_m * BM + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = o_m[:, None] < M
    p_bx = p_x + o_m.to(tl.int64)[:, None] * K + o_k[None, :]
    # Rows past the weight's end read the last one; their results are not stored.
    p_bw = p_w + tl.minimum(o_n, N - 1).to(tl.int64)[:, None] * K + o_k[None, :]
    b_acc = tl.zeros([BN, BM] if SWAP else [BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            b_w = tl.load(p_bw, eviction_policy="evict_first")
            b_x = tl.load(p_bx, mask=m_m, other=0.0)
        else:
            b_w = tl.load(p_bw, mask=o_k[None, :] < K - k, other=0.0)
            b_x = tl.load(p_bx, mask=m_m & (o_k[None, :] < K - k), other=0.0)
        b_acc = product(b_x, b_w, b_acc, SWAP)
        p_bx += BK
        p_bw += BK
    store(b_acc, p_y, p_bias, o_m, o_n, M, N, SWAP, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def linear_wide_kernel(
    d_x, d_w, d_t, p_bias, p_y, M, N, K,
    BM: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, HEAD + TAIL] of x [M, K] @ w [N, K].T; HEAD and TAIL are powers of two, at least 16.

    Descriptor blocks are [BM, BK] for x, [HEAD, BK] for w and [TAIL, BK] for t, which is w again. Tiles of 320 columns
    make 128 programs for 1024 rows of a weight of 5120: one wave of an H200, while tiles of 256 take two.
    """
    wait_for_previous()
    BN: tl.constexpr = HEAD + TAIL
    i_m, i_n = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    o_m, o_n = i_m * BM, i_n * BN
    b_head = tl.zeros([BM, HEAD], dtype=tl.float32)
    b_tail = tl.zeros([BM, TAIL], dtype=tl.float32)
    for k in range(0, K, BK):
        b_x = d_x.load([o_m, k])
        b_head = product(b_x, d_w.load([o_n, k]), b_head, False)
        b_tail = product(b_x, d_t.load([o_n + HEAD, k]), b_tail, False)
    r_m, o_t = o_m + tl.arange(0, BM), o_n + HEAD
    store(b_head, p_y, p_bias, r_m, o_n + tl.arange(0, HEAD), M, N, False, HAS_BIAS)
    store(b_tail, p_y, p_bias, r_m, o_t + tl.arange(0, TAIL), M, N, False, HAS_BIAS)
