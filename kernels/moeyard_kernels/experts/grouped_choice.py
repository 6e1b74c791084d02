"""Gluon: one token's choice of experts inside the products that use it, and its first product, on Hopper.

The choice takes microseconds of latency in one warp. A launch of its own doubles that: it has to start, and the next
launch has to read ids and slots back from memory. So each program of both products repeats the choice from the router's
logits and continues with its expert. A program of the second product, which has time, writes ids and weights
(`grouped_slice`). The bits are those of `topk_gate` and `grouped_gemm`: every warp holds all logits in the layout of
`topk_gate` for its sums, and products run over K in the same order.

The left operand is weights: BN gates and the BN ups that belong to them. The right operand is 8 rows of x; only
the first belongs to the token. Two programs fit a multiprocessor, and all programs fit the GPU.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.elementwise.silu_mul import rounded_limit
from moeyard_kernels.experts.grouped_configs import SLICE, STEP, slice_fits, slices_of_choice
from moeyard_kernels.types.expert_layout import ExpertPairs
from moeyard_kernels.types.gate import TokenChoice

_STEP = gl.constexpr(STEP)
# Rows of x that are copied: the fewest that a product accepts.
_ROWS = gl.constexpr(8)
# Outputs of one product, half gates and half ups. A shorter left operand is followed by garbage.
_WIDTH = gl.constexpr(64)
_LARGER_VIEWS = gl.constexpr(launch.LARGER_VIEWS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_LEAST = gl.constexpr(-(2**31))


@gluon.jit
def _exp(b_x):
    """Compute as `topk_gate`, whose functions give no layout for the constants among their operands."""
    m_near = gl.abs(b_x) < 88.0
    b_near = gl.where(m_near, b_x, 0.0)
    b_rest = gl.fma(b_near, gl.full(b_x.shape, _LOG2_E, gl.float32, b_x.type.layout), -(b_near * _LOG2_E))
    b_power = gl.exp2(b_x * _LOG2_E)
    return gl.fma(gl.where(m_near, b_power, 0.0), b_rest * _LN_2, b_power)


@gluon.jit
def _scores(b_x, b_max, b_sum, SOFTMAX: gl.constexpr):
    """Compute as `topk_gate`."""
    if SOFTMAX:
        b_score = gl.div_rn(_exp(b_x - b_max), gl.full(b_x.shape, b_sum, gl.float32, b_x.type.layout))
    else:
        b_score = gl.div_rn(gl.full(b_x.shape, 1.0, gl.float32, b_x.type.layout), 1.0 + _exp(-b_x))
    return b_score


@gluon.jit
def score_experts(p_logits, p_bias, E: gl.constexpr, SOFTMAX: gl.constexpr, HAS_BIAS: gl.constexpr, L_E: gl.constexpr):
    """Return experts, scores as order-preserving integers, and the logits' maximum and sum of exponentials."""
    o_e = gl.arange(0, L_E.shape[0], L_E)
    m_e = o_e < E
    b_x = gl.load(p_logits + o_e, mask=m_e, other=0.0).to(gl.float32)
    b_max, b_sum = 0.0, 1.0
    if SOFTMAX:
        b_max = gl.max(gl.where(m_e, b_x, float("-inf")), 0)
        b_sum = gl.sum(gl.where(m_e, _exp(b_x - b_max), 0.0), 0)
    b_choice = _scores(b_x, b_max, b_sum, SOFTMAX)
    if HAS_BIAS:
        b_choice += gl.load(p_bias + o_e, mask=m_e, other=0.0)
    b_key = (b_choice + 0.0).to(gl.int32, bitcast=True)
    return o_e, gl.where(m_e, b_key ^ ((b_key >> 31) & 0x7FFFFFFF), _LEAST), b_max, b_sum


@gluon.jit
def _best(o_e, b_key):
    """Return the best expert, and the keys without it."""
    i_top = gl.min(gl.where(b_key == gl.max(b_key, 0), o_e, 0x7FFFFFFF), 0)
    return i_top, gl.where(o_e == i_top, _LEAST, b_key)


@gluon.jit
def nth_slot(o_e, b_key, b_slot, n):
    """Return the slot of the n-th chosen expert."""
    i_top = 0
    for _ in range(n + 1):
        i_top, b_key = _best(o_e, b_key)
    return gl.sum(gl.where(o_e == i_top, b_slot, 0), 0)


@gluon.jit
def write_choice(
    p_logits, p_counts, p_entries, p_weights, p_ids, o_e, b_key, b_max, b_sum, scaling,
    K: gl.constexpr, BK: gl.constexpr, SOFTMAX: gl.constexpr, RENORMALIZE: gl.constexpr, HAS_COUNTS: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Write the token's ids and weights."""
    L_K: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    o_k = gl.arange(0, BK, L_K)
    b_ids = gl.zeros([BK], gl.int32, L_K)
    for k in gl.static_range(K):
        i_top, b_key = _best(o_e, b_key)
        b_ids = gl.where(o_k == k, i_top, b_ids)
    m_k = o_k < K
    if HAS_COUNTS:
        m_counted = m_k & (gl.load(p_entries) >= 0)
        gl.atomic_add(p_counts + b_ids, gl.full([BK], 1, gl.int64, L_K), mask=m_counted, sem="relaxed")
    b_chosen = gl.load(p_logits + b_ids, mask=m_k, other=0.0).to(gl.float32)
    b_weight = gl.where(m_k, _scores(b_chosen, b_max, b_sum, SOFTMAX), 0.0)
    if RENORMALIZE:
        b_total = gl.sum(b_weight, 0)
        if not SOFTMAX:
            b_total += 1e-20
        b_weight = gl.div_rn(b_weight, gl.full([BK], b_total, gl.float32, L_K))
    gl.store(p_weights + o_k, b_weight * scaling, mask=m_k)
    gl.store(p_ids + o_k, b_ids.to(gl.int64), mask=m_k)


@gluon.jit
def limited(b_gate, b_up, LIMIT: gl.constexpr):
    """Return gates and ups within LIMIT, as `silu_mul`."""
    if LIMIT > 0:
        b_gate = gl.where(b_gate > LIMIT, LIMIT, b_gate)
        b_up = gl.where(b_up > LIMIT, LIMIT, gl.where(b_up < -LIMIT, -LIMIT, b_up))
    return b_gate, b_up


@gluon.jit
def _copy_step(d_w, s_w, bars, i_k, i_slot, i_n, i_buffer, SUB: gl.constexpr, BN: gl.constexpr):
    """Copy step i_k of an expert's gates and ups, SUB blocks of K, into a buffer."""
    mbarrier.expect(bars.index(i_buffer), SUB * 2 * BN * _STEP * 2)
    if _LARGER_VIEWS:
        s_part = reinterpret(s_w.index(i_buffer * SUB), s_w.dtype, [SUB, 2, BN, _STEP], d_w.layout)
        load_block(d_w, [i_k * SUB, i_slot * 2, i_n, 0], bars.index(i_buffer), s_part)
    else:
        for u in gl.static_range(SUB):
            s_part = s_w.index(i_buffer * SUB + u).slice(0, 1)
            load_block(d_w, [i_k * SUB + u, i_slot * 2, i_n, 0], bars.index(i_buffer), s_part)


@gluon.jit
def expert_choice_kernel(
    p_logits, p_bias, p_slots, d_x, d_w, p_h, N: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr,
    SUB: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, E: gl.constexpr, SOFTMAX: gl.constexpr,
    HAS_BIAS: gl.constexpr, L_E: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Compute BN values of the token's h for one expert: h [BLOCK K, N], the first row of each block.

    d_x: [H / 64, 1, 64] in blocks [CX, 8, 64]. d_w: gates and ups of all slots, [H / 64, 2 S, N, 64], in blocks
    [SUB, 2, BN, 64] ([1, 2, BN, 64] without LARGER_VIEWS), STAGES of them in flight. Grid: (K ceil(N / BN),).
    """
    DT: gl.constexpr = d_x.dtype
    CX: gl.constexpr = STEPS & -STEPS
    NUM: gl.constexpr = STEPS // SUB
    ROWS: gl.constexpr = 2 * BN
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    L_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _STEP], DT)
    L_W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_WIDTH, _STEP], DT)
    L_B: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, _STEP], DT)
    if _LARGER_VIEWS:
        # The buffer extends past the last block by a whole operand.
        s_w = gl.allocate_shared_memory(DT, [STAGES * SUB + _WIDTH // ROWS - 1, ROWS, _STEP], L_B)
    else:
        s_w = gl.allocate_shared_memory(DT, [STAGES * SUB, _WIDTH // ROWS, 2, BN, _STEP], d_w.layout)
    s_x = gl.allocate_shared_memory(DT, [STEPS, _ROWS, _STEP], L_X)
    e = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ex = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(e.index(i), count=1)
    mbarrier.init(ex.index(0), count=1)
    fence_async_shared()
    i_p, i_n = gl.program_id(0) // gl.cdiv(N, BN), gl.program_id(0) % gl.cdiv(N, BN) * BN
    # In every program: the second product reads logits before it waits, and relies on this wait.
    wait_for_previous()
    let_next_begin()
    mbarrier.expect(ex.index(0), STEPS * _ROWS * _STEP * 2)
    for i in gl.static_range(STEPS // CX):
        s_rows = reinterpret(s_x, DT, [STEPS // CX, CX, _ROWS, _STEP], d_x.layout).index(i)
        load_block(d_x, [i * CX, 0, 0], ex.index(0), s_rows)
    o_s = gl.arange(0, L_E.shape[0], L_E)
    b_slot = gl.load(p_slots + o_s, mask=o_s < E, other=0)
    o_e, b_key, _, _ = score_experts(p_logits, p_bias, E, SOFTMAX, HAS_BIAS, L_E)
    i_slot = nth_slot(o_e, b_key, b_slot, i_p)
    for i in gl.static_range(STAGES):
        _copy_step(d_w, s_w, e, i, i_slot, i_n, i, SUB, BN)
    b_acc = gl.zeros([_WIDTH, _ROWS], gl.float32, L_Y)
    mbarrier.wait(ex.index(0), 0)
    i_buffer, phase = 0, 0
    for i_k in range(NUM):
        mbarrier.wait(e.index(i_buffer), phase)
        for u in gl.static_range(SUB):
            # With LARGER_VIEWS, one that extends past its block.
            s_whole = reinterpret(s_w.index(i_buffer * SUB + u), DT, [_WIDTH, _STEP], L_W)
            b_acc = warpgroup_mma(s_whole, s_x.index(i_k * SUB + u).permute((1, 0)), b_acc, is_async=True)
        # The previous step has ended, so its buffer is free.
        b_acc = warpgroup_mma_wait(num_outstanding=SUB, deps=(b_acc,))
        i_next = i_k - 1 + STAGES
        if (i_k > 0) & (i_next < NUM):
            i_free = gl.where(i_buffer == 0, STAGES - 1, i_buffer - 1)
            _copy_step(d_w, s_w, e, i_next, i_slot, i_n, i_free, SUB, BN)
        last = i_buffer == STAGES - 1
        i_buffer, phase = gl.where(last, 0, i_buffer + 1), gl.where(last, phase ^ 1, phase)
    b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
    # [parts of the operand (only the first is valid), BN, rows, gate and up]
    L_S: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 4, 8, 1], [1, 4, 1, 1], [3, 2, 1, 0])
    b_both = gl.permute(gl.reshape(b_acc, [_WIDTH // ROWS, 2, BN, _ROWS]), (0, 2, 3, 1))
    b_gate, b_up = gl.split(gl.convert_layout(b_both, L_S))
    b_gate, b_up = limited(b_gate.to(DT).to(gl.float32), b_up.to(DT).to(gl.float32), LIMIT)
    b_y = (b_gate / (1.0 + gl.exp(-b_gate))).to(DT).to(gl.float32) * b_up
    L_R: gl.constexpr = b_y.type.layout
    o_g = gl.arange(0, _WIDTH // ROWS, gl.SliceLayout(1, gl.SliceLayout(2, L_R)))
    o_n = i_n + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, L_R)))
    o_r = gl.arange(0, _ROWS, gl.SliceLayout(0, gl.SliceLayout(1, L_R)))
    o_g, o_n, o_r = o_g[:, None, None], o_n[None, :, None], o_r[None, None, :]
    m_y = (o_g == 0) & (o_n < N) & (o_r == 0)
    gl.store(p_h + i_p * BLOCK * N + o_n + o_r + o_g, b_y.to(p_h.dtype.element_ty), mask=m_y)


def expert_lanes(num_experts: int, itemsize: int, num_warps: int = 4) -> gl.DistributedLinearLayout:
    """Return the layout of one token's logits in `topk_gate`'s warp. Here every warp holds all of them."""
    size = triton.next_power_of_2(num_experts)
    run = max(1, min(16 // itemsize, size // 32))
    bits = [1 << i for i in range(size.bit_length() - 1)]
    own = run.bit_length() - 1
    lanes = [[bit] for bit in bits[own : own + 5]]
    lanes += [[0]] * (5 - len(lanes))
    registers = [[bit] for bit in (*bits[:own], *bits[own + 5 :])]
    return gl.DistributedLinearLayout(registers, lanes, [[0]] * (num_warps.bit_length() - 1), [], [size])


def choice_arguments(choice: TokenChoice, num_warps: int = 4) -> dict[str, Any]:
    """Return the arguments of `score_experts` that are no pointers."""
    lanes = expert_lanes(choice.logits.shape[1], choice.logits.element_size(), num_warps)
    softmax = choice.rule.scoring == "softmax"
    return {"E": choice.logits.shape[1], "SOFTMAX": softmax, "HAS_BIAS": choice.bias is not None, "L_E": lanes}


# Constants of a kernel whose ids are known.
_NO_CHOICE: Mapping[str, Any] = MappingProxyType(
    {"E": 0, "SOFTMAX": False, "HAS_BIAS": False, "L_E": expert_lanes(32, 4)}
    | {"CHOSEN": 1, "BC": 1, "RENORMALIZE": False, "HAS_COUNTS": False}
)


def writing_arguments(choice: TokenChoice | None, unread: torch.Tensor, num_warps: int = 4) -> dict[str, Any]:
    """Return the arguments of a kernel that makes `choice` and writes it, if it is still to be made.

    Pointers that the kernel does not read are `unread`.
    """
    if choice is None:
        tensors = dict.fromkeys(("p_logits", "p_bias", "p_counts", "p_entries", "p_weights"), unread)
        return tensors | {"scaling": 1.0, **_NO_CHOICE}
    rule, counted = choice.rule, choice.counts is not None
    return choice_arguments(choice, num_warps) | {
        "p_logits": choice.logits,
        "p_bias": choice.logits if choice.bias is None else choice.bias,
        "p_counts": choice.counts if counted else unread,
        "p_entries": choice.entries if counted else unread,
        "p_weights": choice.weights,
        "scaling": float(rule.scaling),
        "CHOSEN": rule.top_k,
        "BC": triton.next_power_of_2(rule.top_k),
        "RENORMALIZE": rule.renormalize,
        "HAS_COUNTS": counted,
    }


def is_simple(choice: TokenChoice) -> bool:
    """Return whether the functions here match `topk_gate`'s bits.

    They do so for a multiple of 16 experts, without groups, and if one warp can hold the chosen ones. They have no
    scores by sqrt(softplus).
    """
    rule = choice.rule
    grouped = rule.topk_groups < rule.num_groups or rule.scoring == "sqrtsoftplus"
    return not grouped and choice.logits.shape[1] % 16 == 0 and rule.top_k <= 32 and choice.logits.data_ptr() % 16 == 0


def can_choose(choice: TokenChoice, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Return whether both products of one token can make the choice; otherwise `topk_gate` makes it first."""
    if not launch.on_hopper(gate_up) or not is_simple(choice):
        return False
    rule, inner, hidden = choice.rule, down.shape[2], gate_up.shape[2]
    aligned = all(x.data_ptr() % 16 == 0 for x in (gate_up, down))
    whole = slice_fits(inner, SLICE[0].BN)
    return aligned and whole and slices_of_choice(rule.top_k, hidden=hidden, inner=inner) is not None


def choose_and_gate_up(
    x: torch.Tensor, gate_up: torch.Tensor, pairs: ExpertPairs, h: torch.Tensor, limit: float | None
) -> None:
    """Compute h [K block_rows, I] of the experts that x [1, H] chooses, if `can_choose` allows it."""
    choice, num_slots, inner, hidden = pairs.choice, gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    assert choice is not None, "the experts are already chosen"
    rule = choice.rule
    tile = slices_of_choice(rule.top_k, hidden=hidden, inner=inner)
    assert tile is not None, (rule.top_k, hidden, inner)
    gates_and_ups = launch.packed(gate_up).view(2 * num_slots, inner, hidden)
    expert_choice_kernel[rule.top_k * triton.cdiv(inner, tile.columns),](
        choice.logits,
        choice.logits if choice.bias is None else choice.bias,
        pairs.slot_of_expert,
        by_steps(launch.packed(x), 8),
        by_steps(gates_and_ups, 2, tile.columns, steps=tile.steps if launch.LARGER_VIEWS else 1),
        h,
        N=inner,
        STEPS=hidden // STEP,
        BN=tile.columns,
        SUB=tile.steps,
        STAGES=tile.stages,
        BLOCK=pairs.block_rows,
        LIMIT=rounded_limit(limit, x.dtype),
        num_warps=4,
        enable_fp_fusion=False,
        **choice_arguments(choice),
        **dependent(x),
    )


def by_steps(x: torch.Tensor, *block: int, steps: int = 0) -> TensorDescriptor:
    """Describe x [..., K] as [K / 64, ..., 64], copied in blocks [steps, *block, 64].

    steps 0 means the largest power of two that divides all steps.
    """
    num = x.shape[-1] // STEP
    whole = [steps or num & -num, *block, STEP]
    strides = x.stride()
    return TensorDescriptor(
        x,
        [num, *x.shape[:-1], STEP],
        [STEP, *strides[:-1], 1],
        whole,
        launch.shared_layout(*whole),
    )
