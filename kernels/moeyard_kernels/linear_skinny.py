"""Gluon: `linear` of few rows for Hopper, bit for bit the same: as many programs as the weight has slices of columns.

Rows of x are the left operand of products that always take 64: BM of them are copied, and what lies behind them in
shared memory fills the others, whose results are not stored. So a tile may be as narrow as 16 columns, which a weight
of 2112 needs to occupy 132 multiprocessors. One warp copies, four multiply. Of a weight that no running launch writes
(STATIC), copies begin while the launch before still runs: as much as the buffers hold, where that one leaves them room.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.dependent import let_next_begin, wait_for_previous
from moeyard_kernels.launch import capability

# What one copy brings of K: 128 bytes, as far as shared memory is swizzled.
COLUMNS = 64
_COLUMNS = gl.constexpr(COLUMNS)


@gluon.jit
def _place(i_step, M, NA, num_k, BM: gl.constexpr, BN: gl.constexpr, PAIR: gl.constexpr):  # type: ignore[no-untyped-def]
    """(row, column, whether of the second weight, which slice of K) of this program's i_step-th step: rows fastest."""
    i_tile = gl.program_id(0) + i_step // num_k * gl.num_programs(0)
    tiles_m, tiles_a = gl.cdiv(M, BM), gl.cdiv(NA, BN)
    i_n = i_tile // tiles_m
    second = i_n >= tiles_a
    if PAIR:
        i_n = gl.where(second, i_n - tiles_a, i_n)
    return i_tile % tiles_m * BM, i_n * BN, second, i_step % num_k


@gluon.jit
def _copy_weight(  # type: ignore[no-untyped-def]
    d_wa, d_wb, s_w, e, i_n, second, i_k, i_buffer, SUB: gl.constexpr, BYTES: gl.constexpr, PAIR: gl.constexpr
):
    mbarrier.expect(e.index(i_buffer), BYTES)
    for u in gl.static_range(SUB):
        o_k, s_part = (i_k * SUB + u) * _COLUMNS, s_w.index(i_buffer * SUB + u)
        if PAIR and second:
            tma.async_copy_global_to_shared(d_wb, [i_n, o_k], e.index(i_buffer), s_part)
        else:
            tma.async_copy_global_to_shared(d_wa, [i_n, o_k], e.index(i_buffer), s_part)


@gluon.jit
def _copy_rows(d_x, s_x, e, i_m, i_k, i_buffer, SUB: gl.constexpr):  # type: ignore[no-untyped-def]
    for u in gl.static_range(SUB):
        i_part = i_buffer * SUB + u
        tma.async_copy_global_to_shared(d_x, [i_m, (i_k * SUB + u) * _COLUMNS], e.index(i_buffer), s_x.index(i_part))


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    d_x, d_wa, d_wb, s_x, s_w, e, f, M, NA, num_k, num_steps,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, PAIR: gl.constexpr,
    STATIC: gl.constexpr,
):  # fmt: skip
    """Fill the buffers, weights first; then each again when it is free (f)."""
    BYTES: gl.constexpr = (BM + BN) * SUB * _COLUMNS * 2
    if not STATIC:
        wait_for_previous()
        let_next_begin()
    num_first = gl.minimum(num_steps, STAGES)
    for i in range(num_first):
        _, i_n, second, i_k = _place(i, M, NA, num_k, BM, BN, PAIR)
        _copy_weight(d_wa, d_wb, s_w, e, i_n, second, i_k, i, SUB, BYTES, PAIR)
    if STATIC:
        wait_for_previous()
        let_next_begin()
    for i in range(num_first):
        i_m, _, _, i_k = _place(i, M, NA, num_k, BM, BN, PAIR)
        _copy_rows(d_x, s_x, e, i_m, i_k, i, SUB)
    for i in range(num_first, num_steps):
        i_buffer = i % STAGES
        i_m, i_n, second, i_k = _place(i, M, NA, num_k, BM, BN, PAIR)
        mbarrier.wait(f.index(i_buffer), (i // STAGES - 1) & 1)
        _copy_weight(d_wa, d_wb, s_w, e, i_n, second, i_k, i_buffer, SUB, BYTES, PAIR)
        _copy_rows(d_x, s_x, e, i_m, i_k, i_buffer, SUB)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    p_bias, p_ya, p_yb, s_x, s_w, e, f, M, NA, NB, num_k, num_steps,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    PAIR: gl.constexpr,
):  # fmt: skip
    """Products of a buffer start before those of the last have ended, whose buffer is then free."""
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    L_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, _COLUMNS], s_x.dtype)
    o_r = gl.arange(0, 64, gl.SliceLayout(1, L_Y))
    for i_first in range(0, num_steps, num_k):
        i_m, i_n, second, _ = _place(i_first, M, NA, num_k, BM, BN, PAIR)
        b_acc = gl.zeros([64, BN], gl.float32, L_Y)
        for i in range(i_first, i_first + num_k):
            i_buffer = i % STAGES
            mbarrier.wait(e.index(i_buffer), (i // STAGES) & 1)
            for u in gl.static_range(SUB):
                s_rows = s_x.index(i_buffer * SUB + u)._reinterpret(s_x.dtype, [64, _COLUMNS], L_X)
                s_part = s_w.index(i_buffer * SUB + u).permute((1, 0))
                b_acc = warpgroup_mma(s_rows, s_part, b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=SUB, deps=(b_acc,))
            if i > i_first:
                mbarrier.arrive(f.index((i - 1) % STAGES), count=1)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        mbarrier.arrive(f.index((i_first + num_k - 1) % STAGES), count=1)
        p_y, N = p_ya, NA
        if PAIR:
            p_y, N = gl.where(second, p_yb, p_ya), gl.where(second, NB, NA)
        o_n = i_n + gl.arange(0, BN, gl.SliceLayout(0, L_Y))
        if HAS_BIAS:
            b_acc += gl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[None, :]
        p_by = p_y + (i_m + o_r).to(gl.int64)[:, None] * N + o_n[None, :]
        m_y = ((o_r < BM) & (i_m + o_r < M))[:, None] & (o_n < N)[None, :]
        gl.store(p_by, b_acc.to(p_y.dtype.element_ty), mask=m_y)


@gluon.jit(do_not_specialize=["M"])
def linear_skinny_kernel(  # type: ignore[no-untyped-def]
    d_x, d_wa, d_wb, p_bias, p_ya, p_yb, M, NA, NB, K,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    PAIR: gl.constexpr, STATIC: gl.constexpr,
):  # fmt: skip
    """x [M, K] @ wa [NA, K].T, then @ wb [NB, K].T if PAIR, in tiles [BM, BN] that go to the programs in turn.

    Descriptors in blocks of [BM, 64] and [BN, 64]; SUB of them are a step, and STAGES steps are on the way.
    """
    DT: gl.constexpr = p_ya.dtype.element_ty
    # Behind the last rows there is room for a whole operand of 64.
    s_x = gl.allocate_shared_memory(DT, [STAGES * SUB + 64 // BM - 1, BM, _COLUMNS], d_x.layout)
    s_w = gl.allocate_shared_memory(DT, [STAGES * SUB, BN, _COLUMNS], d_wa.layout)
    e = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(e.index(i), count=1)
        mbarrier.init(f.index(i), count=1)
    fence_async_shared()
    tiles = gl.cdiv(M, BM) * (gl.cdiv(NA, BN) + (gl.cdiv(NB, BN) if PAIR else 0))
    num_k = gl.cdiv(K, SUB * _COLUMNS)
    num_steps = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)) * num_k
    gl.warp_specialize(
        [
            (
                _multiply,
                (p_bias, p_ya, p_yb, s_x, s_w, e, f, M, NA, NB, num_k, num_steps, BM, BN, SUB, STAGES, HAS_BIAS, PAIR),
            ),
            (
                _copy,
                (d_x, d_wa, d_wb, s_x, s_w, e, f, M, NA, num_k, num_steps, BM, BN, SUB, STAGES, PAIR, STATIC),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """What the kernel copies blocks of `rows` rows of a matrix through."""
    return TensorDescriptor.from_tensor(
        x, [rows, COLUMNS], gl.NVMMASharedLayout.get_default_for([rows, COLUMNS], gl.bfloat16)
    )


def suits(x: torch.Tensor) -> bool:
    """Whether the kernel can run: in bf16, on Hopper."""
    return x.dtype == torch.bfloat16 and capability(x) == (9, 0)
