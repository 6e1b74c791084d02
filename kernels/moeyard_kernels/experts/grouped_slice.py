"""Gluon: the second product of `grouped_gemm` for one token on Hopper, bit for bit the same: weights ahead of the rows.

Which experts' weights the second product reads is known when the first one begins, only its rows are not. So a program
asks for its whole slice of a weight (BN outputs by all of K) in bulk copies while programs of the first product are at
work or leave, and waits behind that: the memory goes from the one to the other without a pause. Slices lie in shared
memory whole; of [2048 x 768] two fit a multiprocessor, and all slices of 8 experts the GPU. Each pair is a program's
alone, so tokens that share an expert would read its weights anew.

The weights are the left operand, and 8 rows of h the right one, of which only the first is the pair's.
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

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.experts.grouped_configs import slice_bytes
from moeyard_kernels.types.expert_layout import ExpertPairs

# What a copy brings of K: 128 bytes, as far as shared memory is swizzled.
STEP = 64
_STEP = gl.constexpr(STEP)
# Rows of h that are copied: the fewest that a product takes.
_ROWS = gl.constexpr(8)
# What a block may have on Hopper, less the barriers.
_SHARED_BYTES = 227 * 1024 - 1024


@gluon.jit
def expert_slice_kernel(
    d_h, d_w, p_ids, p_slots, p_out, N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr
):
    """BN outputs of one pair: out [P, N] from the first rows of blocks of h. Grid: (P ceil(N / BN),).

    d_h: [BLOCK P, K] in blocks [8, 64]; d_w: all slots' outputs one behind the other, [S N, K], in blocks [BN, 64].
    """
    DT: gl.constexpr = d_h.dtype
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    s_w = gl.allocate_shared_memory(DT, [STEPS, BN, _STEP], d_w.layout)
    s_h = gl.allocate_shared_memory(DT, [STEPS, _ROWS, _STEP], d_h.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    let_next_begin()
    # The launch ahead lets this one begin when it has waited for the ids in every program: they are complete.
    i_p, i_n = gl.program_id(0) // gl.cdiv(N, BN), gl.program_id(0) % gl.cdiv(N, BN) * BN
    i_id = gl.load(p_ids + i_p).to(gl.int32)
    i_slot = gl.load(p_slots + gl.maximum(i_id, 0))
    here = (i_id >= 0) & (i_slot >= 0)
    for i in gl.static_range(STEPS):
        mbarrier.expect(bars.index(i), (BN + _ROWS) * _STEP * 2, pred=here)
        tma.async_copy_global_to_shared(d_w, [i_slot * N + i_n, i * _STEP], bars.index(i), s_w.index(i), pred=here)
    # In every program, also one without work: launches complete in order.
    wait_for_previous()
    if here:
        for i in gl.static_range(STEPS):
            tma.async_copy_global_to_shared(d_h, [i_p * BLOCK, i * _STEP], bars.index(i), s_h.index(i))
        b_acc = gl.zeros([BN, _ROWS], gl.float32, L_Y)
        for i in gl.static_range(STEPS):
            mbarrier.wait(bars.index(i), 0)
            b_acc = warpgroup_mma(s_w.index(i), s_h.index(i).permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, L_Y))
        o_r = gl.arange(0, _ROWS, gl.SliceLayout(0, L_Y))
        p_by = p_out + i_p.to(gl.int64) * N + o_n[:, None] + o_r[None, :]
        gl.store(p_by, b_acc.to(p_out.dtype.element_ty), mask=(o_n < N)[:, None] & (o_r == 0)[None, :])


def fits(down: torch.Tensor, columns: int) -> bool:
    """Whether slices of `columns` outputs of down [S, H, I] fit shared memory, in whole steps."""
    dim = down.shape[2]
    return dim % STEP == 0 and slice_bytes(dim, columns) <= _SHARED_BYTES


def slice_pairs(h: torch.Tensor, down: torch.Tensor, out: torch.Tensor, pairs: ExpertPairs, columns: int) -> None:
    """out [P, H] of one token's pairs from h [P block_rows, I] and down [S, H, I], in slices that fit."""
    num_slots, num_out, dim = down.shape
    expert_slice_kernel[pairs.num_pairs * -(-num_out // columns),](
        _descriptor(h, 8), _descriptor(down.view(num_slots * num_out, dim), columns), pairs.topk_ids,
        pairs.slot_of_expert, out, N=num_out, STEPS=dim // STEP, BN=columns, BLOCK=pairs.block_rows, num_warps=4,
        **dependent(h),
    )  # fmt: skip


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    block = [rows, STEP]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
