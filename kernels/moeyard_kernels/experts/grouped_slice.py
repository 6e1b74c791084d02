"""Gluon: the second product of `grouped_gemm` for one token on Hopper, bit for bit the same: weights ahead of the rows.

Which experts' weights the second product reads is known when the first one begins, only its rows are not. So a program
asks for its whole slice of a weight (BN outputs by all of K) in bulk copies while programs of the first product are at
work or leave, and waits behind that: the memory goes from the one to the other without a pause. Slices lie in shared
memory whole; of [2048 x 768] two fit a multiprocessor, and all slices of 8 experts the GPU. Each pair is a program's
alone, so tokens that share an expert would read its weights anew.

The weights are the left operand, and 8 rows of h the right one, of which only the first is the pair's. Where the first
product chooses experts by itself, so does this one (`grouped_choice`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.experts.grouped_choice import (
    by_steps,
    choice_arguments,
    expert_lanes,
    nth_slot,
    score_experts,
    write_choice,
)
from moeyard_kernels.experts.grouped_configs import STEP
from moeyard_kernels.types.expert_layout import ExpertPairs

_STEP = gl.constexpr(STEP)
# Rows of h that are copied: the fewest that a product takes.
_ROWS = gl.constexpr(8)
# Where ids are known.
_NO_CHOICE: Mapping[str, Any] = MappingProxyType(
    {"E": 0, "SOFTMAX": False, "HAS_BIAS": False, "L_E": expert_lanes(32, 4)}
    | {"K": 1, "BK": 1, "RENORMALIZE": False, "HAS_COUNTS": False}
)


@gluon.jit(do_not_specialize_on_alignment=["p_entries"])
def expert_slice_kernel(
    p_logits, p_bias, p_counts, p_entries, d_h, d_w, p_weights, p_ids, p_slots, p_out, scaling,
    N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
    E: gl.constexpr, SOFTMAX: gl.constexpr, HAS_BIAS: gl.constexpr, L_E: gl.constexpr,
    K: gl.constexpr, BK: gl.constexpr, RENORMALIZE: gl.constexpr, HAS_COUNTS: gl.constexpr,
):  # fmt: skip
    """BN outputs of one pair: out [P, N] from the first rows of blocks of h. Grid: (P ceil(N / BN),).

    d_h: [K / 64, BLOCK P, 64] in blocks [CH, 8, 64]; d_w: all slots' outputs one behind the other, [K / 64, S N, 64],
    in blocks [CH, BN, 64]. E: choose K among so many experts, and write the choice; 0: p_ids are chosen.
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
    # The launch ahead lets this one begin when it has waited for the ids, or the logits, in every program: they are
    # complete.
    i_p, i_n = gl.program_id(0) // gl.cdiv(N, BN), gl.program_id(0) % gl.cdiv(N, BN) * BN
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
        s_part = s_w.index(i * CH)._reinterpret(DT, [CH, BN, _STEP], d_w.layout)
        tma.async_copy_global_to_shared(d_w, [i * CH, i_slot * N + i_n, 0], bars.index(i), s_part, pred=here)
    if E:  # noqa: SIM102 - of a constant and of what is known in the kernel
        if gl.program_id(0) == 0:
            # Every launch ahead of the first product has ended, as that one waited in all programs before it let this
            # begin; and it touches none of these itself. Counts are added to, and read behind whole steps.
            write_choice(
                p_logits, p_counts, p_entries, p_weights, p_ids, o_e, b_key, b_max, b_sum, scaling,
                K, BK, SOFTMAX, RENORMALIZE, HAS_COUNTS,
            )  # fmt: skip
    # In every program, also one without work: launches complete in order.
    wait_for_previous()
    if here:
        for i in gl.static_range(STEPS // CH):
            s_rows = s_h.index(i * CH)._reinterpret(DT, [CH, _ROWS, _STEP], d_h.layout)
            tma.async_copy_global_to_shared(d_h, [i * CH, i_p * BLOCK, 0], bars.index(i), s_rows)
        b_acc = gl.zeros([BN, _ROWS], gl.float32, L_Y)
        for i in gl.static_range(STEPS):
            if i % CH == 0:
                mbarrier.wait(bars.index(i // CH), 0)
            b_acc = warpgroup_mma(s_w.index(i), s_h.index(i).permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, L_Y))
        o_r = gl.arange(0, _ROWS, gl.SliceLayout(0, L_Y))
        p_by = p_out + i_p.to(gl.int64) * N + o_n[:, None] + o_r[None, :]
        gl.store(p_by, b_acc.to(p_out.dtype.element_ty), mask=(o_n < N)[:, None] & (o_r == 0)[None, :])


def slice_pairs(h: torch.Tensor, down: torch.Tensor, out: torch.Tensor, pairs: ExpertPairs, columns: int) -> None:
    """out [P, H] of one token's pairs from h [P block_rows, I] and down [S, H, I], in slices that fit.

    Where the pairs' choice is still to be made, these programs make it, as those ahead have, and one writes it.
    """
    num_slots, num_out, dim = down.shape
    choice, constants = pairs.choice, dict(_NO_CHOICE)
    inputs: tuple[torch.Tensor | None, ...] = (h, h, None, None)
    weights, scaling = out, 1.0
    if choice is not None:
        inputs = (choice.logits, choice.logits if choice.bias is None else choice.bias, choice.counts, choice.entries)
        weights, scaling = choice.weights, float(choice.rule.scaling)
        constants = choice_arguments(choice) | {"K": choice.rule.top_k, "BK": triton.next_power_of_2(choice.rule.top_k)}
        constants |= {"RENORMALIZE": choice.rule.renormalize, "HAS_COUNTS": choice.counts is not None}
    expert_slice_kernel[pairs.num_pairs * -(-num_out // columns),](
        *inputs, by_steps(h, 8), by_steps(down.view(num_slots * num_out, dim), columns), weights, pairs.topk_ids,
        pairs.slot_of_expert, out, scaling, N=num_out, STEPS=dim // STEP, BN=columns, BLOCK=pairs.block_rows,
        num_warps=4, enable_fp_fusion=False, **constants, **dependent(h),
    )  # fmt: skip
