"""Gluon: the second product of `grouped_gemm` for one token on Hopper, with the same bits: weights before rows.

The weights of the second product are known when the first one begins; only its rows are not. So a program requests its
whole slice of a weight (BN outputs by all of K) in bulk copies, and then waits. Meanwhile programs of the first product
run or exit. Memory stays busy across the two launches. A slice is in shared memory as a whole. For [2048 x 768] two
slices fit a multiprocessor, and all slices of 8 experts fit the GPU. Each pair has its own program, so tokens that
share an expert would read its weights again.

The left operand is the weights. The right operand is 8 rows of h; only the first belongs to the pair. If the
first product chooses the experts, so does this one (`grouped_choice`), and it may then also compute a shared expert.
The shared expert's first product is known, because the launch of the logits also computed it. Its programs come first
and apply the activation while the programs of the first product run.
"""

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.elementwise.silu_mul import rounded_limit, silu_mul
from moeyard_kernels.experts.grouped_choice import (
    by_steps,
    limited,
    nth_slot,
    score_experts,
    write_choice,
    writing_arguments,
)
from moeyard_kernels.experts.grouped_configs import STEP
from moeyard_kernels.experts.topk_gate import make_choice
from moeyard_kernels.linear.linear import linear
from moeyard_kernels.types.expert_layout import ExpertPairs
from moeyard_kernels.types.gate import SharedRow

_STEP = gl.constexpr(STEP)
# Rows of h that are copied: the fewest that a product accepts.
_ROWS = gl.constexpr(8)


@gluon.jit
def _multiply(s_w, s_h, bars, STEPS: gl.constexpr, CH: gl.constexpr, L_Y: gl.constexpr):
    """Return [BN, 8]: a slice of a weight by rows of h, multiplied as they arrive."""
    BN: gl.constexpr = s_w.shape[1]
    b_acc = gl.zeros([BN, _ROWS], gl.float32, L_Y)
    for i in gl.static_range(STEPS):
        if i % CH == 0:
            mbarrier.wait(bars.index(i // CH), 0)
        b_acc = warpgroup_mma(s_w.index(i), s_h.index(i).permute((1, 0)), b_acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))


@gluon.jit
def _store(b_acc, p_out, i_n, N: gl.constexpr, L_Y: gl.constexpr):
    """Store the outputs from i_n on of the first of 8 rows."""
    BN: gl.constexpr = b_acc.shape[0]
    o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, L_Y))
    o_r = gl.arange(0, _ROWS, gl.SliceLayout(0, L_Y))
    m_y = (o_n < N)[:, None] & (o_r == 0)[None, :]
    gl.store(p_out + o_n[:, None] + o_r[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_y)


@gluon.jit
def _activate(p_y, s_h, STEPS: gl.constexpr, LIMIT: gl.constexpr):
    """Fill all rows of s_h with silu_mul of gates and ups [2 STEPS 64], with that op's bits."""
    DT: gl.constexpr = s_h.dtype
    L_H: gl.constexpr = gl.BlockedLayout([_ROWS, 1], [1, 32], [1, 4], [0, 1])
    for i in gl.static_range(STEPS):
        p_step = p_y + i * _STEP + gl.arange(0, _STEP, gl.SliceLayout(0, L_H))
        b_gate = gl.load(p_step).to(DT).to(gl.float32)
        b_up = gl.load(p_step + STEPS * _STEP).to(DT).to(gl.float32)
        b_gate, b_up = limited(b_gate, b_up, LIMIT)
        b_y = ((b_gate / (1.0 + gl.exp(-b_gate))).to(DT).to(gl.float32) * b_up).to(DT)
        s_h.index(i).store(b_y[None, :].broadcast_to([_ROWS, _STEP]))


@gluon.jit
def _share(
    p_y, d_w, p_out, s_w, s_h, bars, N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr,
    L_Y: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Compute BN outputs of a shared expert. Its inputs were written by a launch before the previous one."""
    DT: gl.constexpr = s_w.dtype
    i_n = gl.program_id(0) * BN
    for i in gl.static_range(STEPS // CH):
        mbarrier.expect(bars.index(i), CH * BN * _STEP * 2)
        s_part = reinterpret(s_w, DT, [STEPS // CH, CH, BN, _STEP], d_w.layout).index(i)
        load_block(d_w, [i * CH, i_n, 0], bars.index(i), s_part)
    _activate(p_y, s_h, STEPS, LIMIT)
    fence_async_shared()
    b_acc = _multiply(s_w, s_h, bars, STEPS, CH, L_Y)
    wait_for_previous()
    _store(b_acc, p_out, i_n, N, L_Y)


@gluon.jit
def _route(
    p_logits, p_bias, p_counts, p_entries, d_h, d_w, p_weights, p_ids, p_slots, p_out, s_w, s_h, bars, i_block, scaling,
    N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr, L_Y: gl.constexpr, BLOCK: gl.constexpr,
    E: gl.constexpr, SOFTMAX: gl.constexpr, HAS_BIAS: gl.constexpr, L_E: gl.constexpr,
    CHOSEN: gl.constexpr, BC: gl.constexpr, RENORMALIZE: gl.constexpr, HAS_COUNTS: gl.constexpr,
):  # fmt: skip
    """Compute BN outputs of one pair. The first block's program writes the choice, if it is still to be made."""
    DT: gl.constexpr = d_h.dtype
    # In the previous launch every program waits for the ids or logits before it lets this launch begin, so they are
    # complete.
    i_p, i_n = i_block // gl.cdiv(N, BN), i_block % gl.cdiv(N, BN) * BN
    if E:
        o_e, b_key, b_max, b_sum = score_experts(p_logits, p_bias, E, SOFTMAX, HAS_BIAS, L_E)
        i_slot = nth_slot(o_e, b_key, gl.load(p_slots + o_e, mask=o_e < E, other=0), i_p)
        here = i_slot >= 0
    else:
        i_id = gl.load(p_ids + i_p).to(gl.int32)
        i_slot = gl.load(p_slots + gl.maximum(i_id, 0))
        here = (i_id >= 0) & (i_slot >= 0)
    for i in gl.static_range(STEPS // CH):
        mbarrier.expect(bars.index(i), CH * (BN + _ROWS) * _STEP * 2, pred=here)
        s_part = reinterpret(s_w, DT, [STEPS // CH, CH, BN, _STEP], d_w.layout).index(i)
        load_block(d_w, [i * CH, i_slot * N + i_n, 0], bars.index(i), s_part, pred=here)
    if E:  # noqa: SIM102 - of a constant and of what is known in the kernel
        if i_block == 0:
            # All launches before the first product have ended: it waited in all programs before it let this one begin.
            # It does not touch these tensors itself. Counts are only added to, and read after whole steps.
            write_choice(
                p_logits, p_counts, p_entries, p_weights, p_ids, o_e, b_key, b_max, b_sum, scaling,
                CHOSEN, BC, SOFTMAX, RENORMALIZE, HAS_COUNTS, 4,
            )  # fmt: skip
    # Every program waits, even without work, so that launches complete in order.
    wait_for_previous()
    if here:
        for i in gl.static_range(STEPS // CH):
            s_rows = reinterpret(s_h, DT, [STEPS // CH, CH, _ROWS, _STEP], d_h.layout).index(i)
            load_block(d_h, [i * CH, i_p * BLOCK, 0], bars.index(i), s_rows)
        b_acc = _multiply(s_w, s_h, bars, STEPS, CH, L_Y)
        _store(b_acc, p_out + i_p.to(gl.int64) * N, i_n, N, L_Y)


@gluon.jit(do_not_specialize_on_alignment=["p_entries"])
def expert_slice_kernel(
    p_logits, p_bias, p_counts, p_entries, d_h, d_w, p_weights, p_ids, p_slots, p_out, p_y, d_s, p_shared, scaling,
    N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
    E: gl.constexpr, SOFTMAX: gl.constexpr, HAS_BIAS: gl.constexpr, L_E: gl.constexpr,
    CHOSEN: gl.constexpr, BC: gl.constexpr, RENORMALIZE: gl.constexpr, HAS_COUNTS: gl.constexpr,
    SHARED: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Compute BN outputs of one pair: out [P, N] from the first rows of blocks of h. Grid: (P ceil(N / BN),).

    d_h: [K / 64, BLOCK P, 64] in blocks [CH, 8, 64]. d_w: consecutive outputs of all slots, [K / 64, S N, 64], in
    blocks [CH, BN, 64]. E > 0: choose CHOSEN of E experts and write the choice; 0: p_ids are given. SHARED, with E
    only: ceil(N / BN) programs before the others compute shared [N] from y [2 K] and the weight d_s, with LIMIT.
    """
    DT: gl.constexpr = d_h.dtype
    CH: gl.constexpr = STEPS & -STEPS
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    L_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, _STEP], DT)
    L_H: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _STEP], DT)
    s_w = gl.allocate_shared_memory(DT, [STEPS, BN, _STEP], L_W)
    s_h = gl.allocate_shared_memory(DT, [STEPS, _ROWS, _STEP], L_H)
    bars = gl.allocate_shared_memory(gl.int64, [STEPS // CH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STEPS // CH):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    let_next_begin()
    i_block = gl.program_id(0)
    if SHARED:
        i_block -= gl.cdiv(N, BN)
        if i_block < 0:
            _share(p_y, d_s, p_shared, s_w, s_h, bars, N, STEPS, BN, CH, L_Y, LIMIT)
    if i_block >= 0:
        _route(
            p_logits, p_bias, p_counts, p_entries, d_h, d_w, p_weights, p_ids, p_slots, p_out, s_w, s_h, bars, i_block,
            scaling, N, STEPS, BN, CH, L_Y, BLOCK, E, SOFTMAX, HAS_BIAS, L_E, CHOSEN, BC, RENORMALIZE, HAS_COUNTS,
        )  # fmt: skip


def shares(shared: SharedRow, down: torch.Tensor) -> bool:
    """Return whether the second product of chosen experts, by down [S, H, I], can include the shared expert."""
    alike = shared.down.shape == down.shape[1:] and shared.down.dtype == down.dtype
    return alike and shared.down.is_contiguous() and shared.gate_up.is_contiguous() and shared.down.data_ptr() % 16 == 0


def settle_choice(pairs: ExpertPairs, *, chooses: bool, down: torch.Tensor | None = None) -> ExpertPairs:
    """Return pairs whose choice the products make (`chooses`); otherwise choose here.

    down: the weight of a second product that may include the shared expert. Without it, that is computed here, too.
    """
    choice = pairs.choice
    if choice is None:
        return pairs
    if choice.shared is not None and not (chooses and down is not None and shares(choice.shared, down)):
        rows = silu_mul(choice.shared.gate_up.to(choice.shared.down.dtype), choice.shared.limit)
        choice.shared.out.copy_(linear(rows, choice.shared.down, static_weight=True))
        choice = replace(choice, shared=None)
    if chooses:
        return replace(pairs, choice=choice)
    make_choice(choice)
    return replace(pairs, choice=None)


def slice_pairs(h: torch.Tensor, down: torch.Tensor, out: torch.Tensor, pairs: ExpertPairs, columns: int) -> None:
    """Compute out [P, H] of one token's pairs from h [P block_rows, I] and down [S, H, I], in slices.

    If the choice is still to be made, these programs repeat it and one of them writes it. A shared expert in it must
    satisfy `shares`.
    """
    num_slots, num_out, dim = down.shape
    shared = None if pairs.choice is None else pairs.choice.shared
    d_w = by_steps(down.view(num_slots * num_out, dim), columns)
    beside = (h, d_w, out) if shared is None else (shared.gate_up, by_steps(shared.down, columns), shared.out)
    expert_slice_kernel[(pairs.num_pairs + (shared is not None)) * -(-num_out // columns),](
        d_h=by_steps(h, 8),
        d_w=d_w,
        p_ids=pairs.topk_ids,
        p_slots=pairs.slot_of_expert,
        p_out=out,
        p_y=beside[0],
        d_s=beside[1],
        p_shared=beside[2],
        N=num_out,
        STEPS=dim // STEP,
        BN=columns,
        BLOCK=pairs.block_rows,
        SHARED=shared is not None,
        LIMIT=0.0 if shared is None else rounded_limit(shared.limit, h.dtype),
        num_warps=4,
        enable_fp_fusion=False,
        **writing_arguments(pairs.choice, h),
        **dependent(h),
    )
