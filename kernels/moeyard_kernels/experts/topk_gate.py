"""Triton: router logits to expert ids and weights, one warp per token.

The k best are found one after the other, each by one reduction over integers that hold a score and, below it, an
expert, the lowest highest. Sums are additions of two, neighbours first: a row's bits follow from the padded number of
experts, however many warps have it and whatever is beside it, in every kernel that calls `choose_experts`.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.launch import MAX_GRID_X, check_layout
from moeyard_kernels.types.gate import GateRule

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST = tl.constexpr(-(2**31))
# Of a key and, below it, 31 bits of an expert.
_LEAST_PAIR = tl.constexpr(-(2**63))


@triton.jit
def _exp(b_x):
    """e^x to about an ulp: the power of two of the rounded product, corrected by what the rounding took off."""
    m_near = tl.abs(b_x) < 88.0
    b_near = tl.where(m_near, b_x, 0.0)
    b_rest = tl.fma(b_near, tl.full(b_x.shape, _LOG2_E, tl.float32), -(b_near * _LOG2_E))
    b_power = tl.exp2(b_x * _LOG2_E)
    return tl.fma(tl.where(m_near, b_power, 0.0), b_rest * _LN_2, b_power)


@triton.jit
def _scores(b_x, b_max, b_sum, SOFTMAX: tl.constexpr):
    """Softmax (of rows with those maxima and sums of exponentials, in the shape of b_x) or sigmoid of logits."""
    if SOFTMAX:
        b_score = tl.div_rn(_exp(b_x - b_max), b_sum)
    else:
        b_score = tl.div_rn(tl.full(b_x.shape, 1.0, tl.float32), 1.0 + _exp(-b_x))
    return b_score


@triton.jit
def _row_sums(b_x):
    """[R] sums of b_x [R, N] for N a power of two up to 4096, of two neighbours at a time."""
    for _ in tl.static_range(12):
        if b_x.shape[1] > 1:
            b_x = tl.sum(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]), 2)
    return tl.reshape(b_x, [b_x.shape[0]])


@triton.jit
def _kept_groups(
    b_choice, m_e, BR: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2SUM: tl.constexpr,
):  # fmt: skip
    """[BR, BG] whether a group is among its row's best: fewer than TOPK_GROUPS are better, or as good and before it."""
    o_g = tl.arange(0, BG)
    o_s = tl.broadcast_to(tl.arange(0, BS)[None, None, :], [BR, BG, BS])
    b_choice = tl.where(m_e, b_choice, float("-inf"))
    b_best = tl.max(b_choice, 2)
    if TOP2SUM:
        o_first = tl.min(tl.where(b_choice == b_best[:, :, None], o_s, BS), 2)
        b_best += tl.max(tl.where(o_s == o_first[:, :, None], float("-inf"), b_choice), 2)
    b_other = tl.reshape(b_best, [BR, 1, BG])
    m_before = o_g[None, None, :] < o_g[None, :, None]
    m_better = (b_other > b_best[:, :, None]) | ((b_other == b_best[:, :, None]) & m_before)
    return tl.sum(m_better.to(tl.int32), 2) < TOPK_GROUPS


@triton.jit
def choose_experts(
    p_logits, p_bias, p_weights, p_ids, i_block, T, E, SIZE, scaling,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2SUM: tl.constexpr,
    BR: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Rows [i_block BR, i_block BR + BR) of T, their experts as [groups, SIZE]. CACHE: where logits are read from."""
    o_r = i_block.to(tl.int64) * BR + tl.arange(0, BR)
    o_g, o_s, o_k = tl.arange(0, BG), tl.arange(0, BS), tl.arange(0, BK)
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    m_e = ((o_g < NUM_GROUPS)[:, None] & (o_s < SIZE)[None, :])[None, :, :]
    m_r = o_r < T
    p_row = p_logits + o_r * E
    b_x = tl.load(
        p_row[:, None, None] + o_e[None, :, :], mask=m_r[:, None, None] & m_e, other=0.0, cache_modifier=CACHE
    ).to(tl.float32)
    b_max, b_sum = tl.zeros([BR], dtype=tl.float32), tl.full([BR], 1.0, tl.float32)
    if SOFTMAX:
        b_max = tl.max(tl.max(tl.where(m_e, b_x, float("-inf")), 2), 1)
        b_exp = tl.where(m_e, _exp(b_x - b_max[:, None, None]), 0.0)
        b_sum = _row_sums(tl.reshape(b_exp, [BR, BG * BS]))
    b_choice = _scores(b_x, b_max[:, None, None], tl.broadcast_to(b_sum[:, None, None], [BR, BG, BS]), SOFTMAX)
    if HAS_BIAS:
        b_choice += tl.load(p_bias + o_e, mask=(o_g < NUM_GROUPS)[:, None] & (o_s < SIZE)[None, :], other=0.0)[None]
    if TOPK_GROUPS < NUM_GROUPS:
        m_kept = _kept_groups(b_choice, m_e, BR, BG, BS, TOPK_GROUPS, TOP2SUM)
        b_choice = tl.where(m_kept[:, :, None], b_choice, 0.0 if SOFTMAX else float("-inf"))
    # The bits of a float as an integer of the same order, above the expert's.
    b_key = (b_choice + 0.0).to(tl.int32, bitcast=True)
    b_key = tl.reshape(tl.where(m_e, b_key ^ ((b_key >> 31) & 0x7FFFFFFF), _LEAST), [BR, BG * BS])
    o_flat = tl.arange(0, BG * BS)
    o_flat = o_flat // BS * SIZE + o_flat % BS
    b_pair = (b_key.to(tl.int64) << 32) + (0x7FFFFFFF - o_flat).to(tl.int64)[None, :]
    b_ids = tl.zeros([BR, BK], dtype=tl.int32)
    for k in tl.static_range(K):
        b_top = tl.max(b_pair, 1)
        b_pair = tl.where(b_pair == b_top[:, None], _LEAST_PAIR, b_pair)
        b_ids = tl.where((o_k == k)[None, :], 0x7FFFFFFF - b_top.to(tl.int32)[:, None], b_ids)
    m_k = m_r[:, None] & (o_k < K)[None, :]
    b_chosen = tl.load(p_row[:, None] + b_ids, mask=m_k, other=0.0, cache_modifier=CACHE).to(tl.float32)
    b_weight = _scores(b_chosen, b_max[:, None], tl.broadcast_to(b_sum[:, None], [BR, BK]), SOFTMAX)
    b_weight = tl.where((o_k < K)[None, :], b_weight, 0.0)
    if RENORMALIZE:
        b_total = _row_sums(b_weight)
        if not SOFTMAX:
            b_total += 1e-20
        b_weight = tl.div_rn(b_weight, tl.broadcast_to(b_total[:, None], [BR, BK]))
    o_out = o_r[:, None] * K + o_k[None, :]
    tl.store(p_weights + o_out, b_weight * scaling, mask=m_k)
    tl.store(p_ids + o_out, b_ids.to(tl.int64), mask=m_k)


@triton.jit(do_not_specialize=["T"])
def _topk_gate_kernel(
    p_logits, p_bias, p_weights, p_ids, T, E, SIZE, scaling,
    K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2SUM: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One token. Grid: (T,)."""
    choose_experts(
        p_logits, p_bias, p_weights, p_ids, tl.program_id(0), T, E, SIZE, scaling, K, SOFTMAX, RENORMALIZE, HAS_BIAS,
        NUM_GROUPS, TOPK_GROUPS, TOP2SUM, 1, BG, BS, BK, "",
    )  # fmt: skip


def choice_constants(rule: GateRule, num_experts: int, *, has_bias: bool) -> dict[str, Any]:
    """What `choose_experts` is compiled for: groups only where they exclude any, each dimension padded."""
    grouped = rule.topk_groups < rule.num_groups
    num_groups = rule.num_groups if grouped else 1
    return {
        "K": rule.top_k,
        "SOFTMAX": rule.scoring == "softmax",
        "RENORMALIZE": rule.renormalize,
        "HAS_BIAS": has_bias,
        "NUM_GROUPS": num_groups,
        "TOPK_GROUPS": rule.topk_groups if grouped else 1,
        "TOP2SUM": rule.group_score == "top2sum",
        "BG": triton.next_power_of_2(num_groups),
        "BS": triton.next_power_of_2(num_experts // num_groups),
        "BK": triton.next_power_of_2(rule.top_k),
    }


def topk_gate(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    renormalize: bool,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["max", "top2sum"] = "max",
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.topk_gate`. Raises ValueError for strided logits and for what its grid cannot hold."""
    check_layout("topk_gate", logits=logits, bias=bias)
    num_tokens, num_experts = logits.shape
    if num_tokens > MAX_GRID_X:
        raise ValueError(f"topk_gate: {list(logits.shape)} exceeds the grid of a GPU")
    rule = GateRule(
        top_k=top_k, scoring=scoring, renormalize=renormalize, num_groups=num_groups, topk_groups=topk_groups,
        group_score=group_score, scaling=scaling,
    )  # fmt: skip
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens:
        constants = choice_constants(rule, num_experts, has_bias=bias is not None)
        _topk_gate_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, weights, ids, num_tokens, num_experts,
            num_experts // constants["NUM_GROUPS"], float(scaling), **constants, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return weights, ids
