"""Gluon: `head_linear` for few rows on Hopper, with the same bits: a program requests all of its inputs at once.

A program has one tile of one head. K is short (128 or 512), so there is no ring of buffers. Bulk copies request the
whole slice of the weight, then the rows of x. If no running launch writes the weight (STATIC), the former start before
the previous launch ends. Products follow as their steps arrive. The Triton kernel instead holds a slice in registers,
and each step has to pass through shared memory and a barrier before it can be multiplied.

Rows of x are the left operand, which always has 64 rows. BM of them are copied. The memory after them fills the others,
whose results are not stored, as in `linear_skinny`.
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

# Values of K per step: 128 bytes, the width of the shared memory swizzle.
STEP = 64
_STEP = gl.constexpr(STEP)
_LARGER_VIEWS = gl.constexpr(launch.LARGER_VIEWS)


@gluon.jit(do_not_specialize=["T"])
def head_linear_hopper_kernel(
    d_x, d_w, p_y, T, H, N, s_xh, w_heads,
    STEPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ALONG_K: gl.constexpr, STATIC: gl.constexpr,
):  # fmt: skip
    """Compute a tile of y [T, H, N]: BM rows, BN outputs of a head. Grid: (H ceil(N / BN) ceil(T / BM),), rows fastest.

    d_x: x as a matrix [T, ...] in blocks [BM, 64]; a head's columns are s_xh apart. d_w: the weight as a matrix whose
    heads are w_heads rows apart: [outputs, K] in blocks [BN, 64] if ALONG_K, else [K, outputs] in blocks [64, BN].
    """
    DT: gl.constexpr = d_x.dtype
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    L_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, _STEP], DT)
    W_SHAPE: gl.constexpr = [BN, _STEP] if ALONG_K else [_STEP, BN]
    if _LARGER_VIEWS:
        # The buffer extends past the last rows by a whole operand.
        s_x = gl.allocate_shared_memory(DT, [STEPS + 64 // BM - 1, BM, _STEP], d_x.layout)
    else:
        s_x = gl.allocate_shared_memory(DT, [STEPS, 64, _STEP], L_X)
    s_w = gl.allocate_shared_memory(DT, [STEPS, W_SHAPE[0], W_SHAPE[1]], d_w.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    if not STATIC:
        let_next_begin()
        wait_for_previous()
    tiles_m, tiles_n = gl.cdiv(T, BM), gl.cdiv(N, BN)
    i_m, i_slice = gl.program_id(0) % tiles_m * BM, gl.program_id(0) // tiles_m
    i_h, i_n = i_slice // tiles_n, i_slice % tiles_n * BN
    for i in gl.static_range(STEPS):
        mbarrier.expect(bars.index(i), (BM + BN) * _STEP * 2)
        if ALONG_K:
            load_block(d_w, [i_h * w_heads + i_n, i * _STEP], bars.index(i), s_w.index(i))
        else:
            load_block(d_w, [i_h * w_heads + i * _STEP, i_n], bars.index(i), s_w.index(i))
    if STATIC:
        let_next_begin()
        wait_for_previous()
    for i in gl.static_range(STEPS):
        s_rows = s_x.index(i) if _LARGER_VIEWS else s_x.index(i).slice(0, BM)
        load_block(d_x, [i_m, i_h * s_xh + i * _STEP], bars.index(i), s_rows)
    b_acc = gl.zeros([64, BN], gl.float32, L_Y)
    for i in gl.static_range(STEPS):
        mbarrier.wait(bars.index(i), 0)
        s_rows = reinterpret(s_x.index(i), DT, [64, _STEP], L_X) if _LARGER_VIEWS else s_x.index(i)
        s_part = s_w.index(i)
        if ALONG_K:
            s_part = s_part.permute((1, 0))
        b_acc = warpgroup_mma(s_rows, s_part, b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
    o_r = gl.arange(0, 64, gl.SliceLayout(1, L_Y))
    o_c = gl.arange(0, BN, gl.SliceLayout(0, L_Y))
    p_by = p_y + ((i_m + o_r).to(gl.int64)[:, None] * H + i_h) * N + (i_n + o_c)[None, :]
    m_y = ((o_r < BM) & (i_m + o_r < T))[:, None] & (i_n + o_c < N)[None, :]
    gl.store(p_by, b_acc.to(p_y.dtype.element_ty), mask=m_y)


def describes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether tensor descriptors can describe x [T, H, K] and weight [H, N, K], and K is whole steps."""
    along = weight if weight.stride(2) == 1 else weight.transpose(1, 2)
    heads, rows = along.stride(0), along.stride(1)
    strides = (x.stride(0), x.stride(1), rows)
    return (
        x.shape[2] % STEP == 0
        and along.stride(2) == 1
        and rows > 0
        and heads % rows == 0
        and all(t.data_ptr() % 16 == 0 for t in (x, weight))
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)
    )


def descriptors(x: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> tuple[TensorDescriptor, ...]:
    """Return descriptors of blocks of `rows` rows of x and of `columns` outputs of the weight."""
    num_rows, num_heads, dim = x.shape
    flat_x = x.as_strided((num_rows, (num_heads - 1) * x.stride(1) + dim), (x.stride(0), 1))
    along_k = weight.stride(2) == 1
    along = weight if along_k else weight.transpose(1, 2)
    apart = along.stride(0) // along.stride(1)
    flat_w = along.as_strided(((num_heads - 1) * apart + along.shape[1], along.shape[2]), (along.stride(1), 1))
    return _descriptor(flat_x, rows, STEP), _descriptor(flat_w, *((columns, STEP) if along_k else (STEP, columns)))


def _descriptor(x: torch.Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [*block], launch.shared_layout(*block))
