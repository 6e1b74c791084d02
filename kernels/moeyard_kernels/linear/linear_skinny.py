"""Gluon: `linear` for few rows on Hopper, with the same bits: slices of columns, up to one program per multiprocessor.

Rows of x are the left operand, which always has 64 rows. BM of them are copied. The memory after them in shared memory
fills the others, whose results are not stored. So a tile may have only 16 columns, which a weight of 2112 needs to
occupy 132 multiprocessors. If the columns are no power of two (40: 5120 in 128 programs), they are likewise the first
columns of an operand of the next power. With LEFT the columns are the left operand, the first of 64, and the rows of x
are the right one. An instruction's time depends on what it reads from shared memory; with LEFT and 64 columns none of
that is garbage. One warp copies, four multiply.

If no running launch writes the weight (STATIC), its first EARLY steps are copied while the previous launch still runs,
as far as that leaves room. Filling all buffers is slower, because the first rows of x would queue after them. For 7168
x 2112 with 16 rows on an H200, 7 steps of weights before x take 9.6 us, 4 steps 9.2.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.common.dependent import let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.linear.linear_configs import SHARED_BYTES, Skinny, head_and_tail

# Values of K per copy: 128 bytes, the width of the shared memory swizzle.
COLUMNS = 64
_COLUMNS = gl.constexpr(COLUMNS)
_LARGER_VIEWS = gl.constexpr(launch.LARGER_VIEWS)


@gluon.jit
def _place(i_tile, M, NA, BM: gl.constexpr, BN: gl.constexpr, PAIR: gl.constexpr):
    """Return (row, column, whether of the second weight) of a tile: rows fastest."""
    tiles_m, tiles_a = gl.cdiv(M, BM), gl.cdiv(NA, BN)
    i_n = i_tile // tiles_m
    second = i_n >= tiles_a
    if PAIR:
        i_n = gl.where(second, i_n - tiles_a, i_n)
    return i_tile % tiles_m * BM, i_n * BN, second


@gluon.jit
def _advance(i_buffer, phase, STAGES: gl.constexpr):
    """Return the next buffer of the ring, and the phase of its barriers."""
    last = i_buffer == STAGES - 1
    return gl.where(last, 0, i_buffer + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(i_buffer, STAGES: gl.constexpr):
    """Return the previous buffer. Triton 3.7 would not carry `i_last = i_buffer` if both began as one value."""
    return gl.where(i_buffer == 0, STAGES - 1, i_buffer - 1)


@gluon.jit
def _copy_columns(
    d_w, d_t, s_w, bar, i_n, i_k, i_buffer, HEAD: gl.constexpr, TAIL: gl.constexpr, SUB: gl.constexpr,
):  # fmt: skip
    """Copy one step of HEAD + TAIL consecutive columns of a weight. One copy brings a power of two."""
    BLOCK: gl.constexpr = s_w.shape[1]
    BLOCKS: gl.constexpr = (HEAD + TAIL) // BLOCK if _LARGER_VIEWS else 1
    L_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD, _COLUMNS], s_w.dtype)
    for u in gl.static_range(SUB):
        o_k, i_block = (i_k * SUB + u) * _COLUMNS, (i_buffer * SUB + u) * BLOCKS
        if _LARGER_VIEWS:
            s_head = reinterpret(s_w.index(i_block), s_w.dtype, [HEAD, _COLUMNS], L_W)
        else:
            s_head = s_w.index(i_block).slice(0, HEAD)
        load_block(d_w, [i_n, o_k], bar, s_head)
        if TAIL:
            s_tail = s_w.index(i_block + HEAD // BLOCK) if _LARGER_VIEWS else s_w.index(i_block).slice(HEAD, TAIL)
            load_block(d_t, [i_n + HEAD, o_k], bar, s_tail)


@gluon.jit
def _copy_weight(
    d_wa, d_ta, d_wb, d_tb, s_w, bar, i_n, second, i_k, i_buffer,
    HEAD: gl.constexpr, TAIL: gl.constexpr, SUB: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Copy one step of the tile's columns, of the second weight or the first."""
    if PAIR and second:
        _copy_columns(d_wb, d_tb, s_w, bar, i_n, i_k, i_buffer, HEAD, TAIL, SUB)
    else:
        _copy_columns(d_wa, d_ta, s_w, bar, i_n, i_k, i_buffer, HEAD, TAIL, SUB)


@gluon.jit
def _copy_rows(
    d_x, s_x, bar, i_m, i_n, i_k, i_buffer, num_k, BM: gl.constexpr, SUB: gl.constexpr, GN: gl.constexpr,
):  # fmt: skip
    """Copy the rows of x of one step, from the columns of the group that output column i_n belongs to."""
    if GN:
        i_k += i_n // GN * num_k
    for u in gl.static_range(SUB):
        i_part, o_k = i_buffer * SUB + u, (i_k * SUB + u) * _COLUMNS
        s_rows = s_x.index(i_part)
        if s_x.shape[1] > BM:
            s_rows = s_rows.slice(0, BM)
        load_block(d_x, [i_m, o_k], bar, s_rows)


@gluon.jit
def _copy(
    d_x, d_wa, d_ta, d_wb, d_tb, s_x, s_w, e, f, M, NA, num_tiles, num_k,
    BM: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, PAIR: gl.constexpr, STATIC: gl.constexpr, GN: gl.constexpr,
):  # fmt: skip
    """Fill the buffers in one warp, with EARLY steps of the weight before x; refill each when it is free (f).

    A buffer's e ends a phase when all bytes of a step of weight and x have arrived.
    """
    BN: gl.constexpr = HEAD + TAIL
    BYTES: gl.constexpr = (BM + BN) * SUB * _COLUMNS * 2
    if not STATIC:
        wait_for_previous()
        let_next_begin()
    i_tile, num_early = gl.program_id(0), gl.minimum(num_k, EARLY)
    i_m, i_n, second = _place(i_tile, M, NA, BM, BN, PAIR)
    for i in range(num_early):
        mbarrier.expect(e.index(i), BYTES)
        _copy_weight(d_wa, d_ta, d_wb, d_tb, s_w, e.index(i), i_n, second, i, i, HEAD, TAIL, SUB, PAIR)
    if STATIC:
        wait_for_previous()
        let_next_begin()
    for i in range(num_early):
        _copy_rows(d_x, s_x, e.index(i), i_m, i_n, i, i, num_k, BM, SUB, GN)
    # The first tile continues after the early steps.
    i_k = num_early
    # A new barrier counts as past the phase before its first, so buffers are initially free.
    i_buffer, phase = num_early % STAGES, 1 - num_early // STAGES
    while i_tile < num_tiles:
        i_m, i_n, second = _place(i_tile, M, NA, BM, BN, PAIR)
        while i_k < num_k:
            bar = e.index(i_buffer)
            mbarrier.wait(f.index(i_buffer), phase)
            mbarrier.expect(bar, BYTES)
            _copy_weight(d_wa, d_ta, d_wb, d_tb, s_w, bar, i_n, second, i_k, i_buffer, HEAD, TAIL, SUB, PAIR)
            _copy_rows(d_x, s_x, bar, i_m, i_n, i_k, i_buffer, num_k, BM, SUB, GN)
            i_buffer, phase = _advance(i_buffer, phase, STAGES)
            i_k += 1
        i_k = 0
        i_tile += gl.num_programs(0)


@gluon.jit
def _multiply(
    p_bias, p_ya, p_yb, s_x, s_w, e, f, M, NA, NB, num_tiles, num_k,
    BM: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, PAIR: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Multiply. Products of a buffer start before those of the previous one end; that buffer is then free."""
    BN: gl.constexpr = HEAD + TAIL
    WIDTH: gl.constexpr = 64 if LEFT else (2 * HEAD if TAIL else HEAD)
    BLOCK: gl.constexpr = s_w.shape[1]
    ROWS: gl.constexpr = BM if LEFT else 64
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS if LEFT else WIDTH, 16])
    L_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, _COLUMNS], s_x.dtype)
    L_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, _COLUMNS], s_w.dtype)
    AXIS: gl.constexpr = 1 if LEFT else 0
    o_r, o_c = gl.arange(0, ROWS, gl.SliceLayout(1 - AXIS, L_Y)), gl.arange(0, WIDTH, gl.SliceLayout(AXIS, L_Y))
    i_buffer, phase = 0, 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, i_n, second = _place(i_tile, M, NA, BM, BN, PAIR)
        b_acc = gl.zeros([WIDTH, ROWS] if LEFT else [ROWS, WIDTH], gl.float32, L_Y)
        for i_k in range(num_k):
            mbarrier.wait(e.index(i_buffer), phase)
            for u in gl.static_range(SUB):
                i_part = i_buffer * SUB + u
                if _LARGER_VIEWS:
                    s_rows = reinterpret(s_x.index(i_part), s_x.dtype, [ROWS, _COLUMNS], L_X)
                    s_part = reinterpret(s_w.index(i_part * (BN // BLOCK)), s_w.dtype, [WIDTH, _COLUMNS], L_W)
                else:
                    s_rows, s_part = s_x.index(i_part), s_w.index(i_part)
                if LEFT:
                    b_acc = warpgroup_mma(s_part, s_rows.permute((1, 0)), b_acc, is_async=True)
                else:
                    b_acc = warpgroup_mma(s_rows, s_part.permute((1, 0)), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=SUB, deps=(b_acc,))
            if i_k > 0:
                mbarrier.arrive(f.index(_before(i_buffer, STAGES)), count=1)
            i_buffer, phase = _advance(i_buffer, phase, STAGES)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        mbarrier.arrive(f.index(_before(i_buffer, STAGES)), count=1)
        p_y, N = p_ya, NA
        if PAIR:
            p_y, N = gl.where(second, p_yb, p_ya), gl.where(second, NB, NA)
        o_n = i_n + o_c
        if HAS_BIAS:
            b_bias = gl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)
            b_acc += gl.expand_dims(b_bias, AXIS)
        p_row, m_r, m_c = p_y + (i_m + o_r).to(gl.int64) * N, (o_r < BM) & (i_m + o_r < M), (o_c < BN) & (o_n < N)
        p_by = gl.expand_dims(p_row, 1 - AXIS) + gl.expand_dims(o_n, AXIS)
        m_y = gl.expand_dims(m_r, 1 - AXIS) & gl.expand_dims(m_c, AXIS)
        gl.store(p_by, b_acc.to(p_y.dtype.element_ty), mask=m_y)


@gluon.jit(do_not_specialize=["M"])
def linear_skinny_kernel(
    d_x, d_wa, d_ta, d_wb, d_tb, p_bias, p_ya, p_yb, M, NA, NB, K,
    BM: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, HAS_BIAS: gl.constexpr, PAIR: gl.constexpr, STATIC: gl.constexpr, LEFT: gl.constexpr,
    GN: gl.constexpr,
):  # fmt: skip
    """Compute x [M, K] @ wa [NA, K].T, then @ wb [NB, K].T if PAIR. Programs take tiles [BM, HEAD + TAIL] in turn.

    Descriptor blocks are [BM, 64] for x, [HEAD, 64] for wa and wb, and [TAIL, 64] for ta and tb, which are the same
    weights. If TAIL is 0, ta and tb have the blocks of wa and wb. BM, HEAD and TAIL are powers of two, at least 8, as 8
    rows are swizzled as one. BM is at most 64. SUB blocks make a step, STAGES steps are in flight, and EARLY of them
    (at most all) before x. LEFT: see the module; HEAD + TAIL are then at most 64. GN: 0, or the outputs of a group, a
    multiple of HEAD + TAIL. x then has K columns, whole steps, for each group.
    """
    gl.static_assert(HEAD + TAIL <= 64 or not LEFT)
    gl.static_assert(EARLY <= STAGES)
    gl.static_assert(TAIL == 0 or (TAIL >= 8 and HEAD % TAIL == 0))
    DT: gl.constexpr = d_x.dtype
    BLOCK: gl.constexpr = TAIL if TAIL else HEAD
    BN: gl.constexpr = HEAD + TAIL
    WIDTH: gl.constexpr = 64 if LEFT else (2 * HEAD if TAIL else HEAD)
    if _LARGER_VIEWS:
        # The buffers extend past the last blocks by a whole operand.
        MORE: gl.constexpr = 0 if LEFT else 64 // BM - 1
        REST: gl.constexpr = (WIDTH - BN) // BLOCK
        s_x = gl.allocate_shared_memory(DT, [STAGES * SUB + MORE, BM, _COLUMNS], d_x.layout)
        s_w = gl.allocate_shared_memory(DT, [STAGES * SUB * (BN // BLOCK) + REST, BLOCK, _COLUMNS], d_ta.layout)
    else:
        s_x = gl.allocate_shared_memory(DT, [STAGES * SUB, BM if LEFT else 64, _COLUMNS], d_x.layout)
        s_w = gl.allocate_shared_memory(DT, [STAGES * SUB, WIDTH, _COLUMNS], d_ta.layout)
    e = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(e.index(i), count=1)
        mbarrier.init(f.index(i), count=1)
    fence_async_shared()
    num_tiles = gl.cdiv(M, BM) * (gl.cdiv(NA, BN) + (gl.cdiv(NB, BN) if PAIR else 0))
    num_k = gl.cdiv(K, SUB * _COLUMNS)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    p_bias, p_ya, p_yb, s_x, s_w, e, f, M, NA, NB, num_tiles, num_k,
                    BM, HEAD, TAIL, SUB, STAGES, HAS_BIAS, PAIR, LEFT,
                ),
            ),
            (
                _copy,
                (
                    d_x, d_wa, d_ta, d_wb, d_tb, s_x, s_w, e, f, M, NA, num_tiles, num_k,
                    BM, HEAD, TAIL, SUB, STAGES, EARLY, PAIR, STATIC, GN,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of blocks of `rows` rows of a matrix."""
    return TensorDescriptor.from_tensor(x, [rows, COLUMNS], launch.shared_layout(rows, COLUMNS))


def fitting_stages(chosen: Skinny) -> int:
    """Return the stages that fit shared memory: those of the config, or fewer if operands have memory of their own."""
    if launch.LARGER_VIEWS:
        return chosen.num_stages
    head, tail = head_and_tail(chosen.BN)
    rows = chosen.BM + 64 if chosen.LEFT else 64 + (2 * head if tail else head)
    return min(chosen.num_stages, SHARED_BYTES // (rows * chosen.BK * 2 + 16))
