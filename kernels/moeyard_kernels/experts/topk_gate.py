"""Triton: router logits to expert ids and weights, one warp per token.

The k best are found one by one, each by two integer reductions: the largest score, then the lowest expert with that
score. Sums are trees, so the tile determines a row's bits; the tile depends only on the number of experts.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.types.gate import GateRule, TokenChoice

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST = tl.constexpr(-(2**31))


@triton.jit
def _exp(b_x):
    """Return e^x to about an ulp: the power of two of the rounded product, corrected by the rounding error."""
    m_near = tl.abs(b_x) < 88.0
    b_near = tl.where(m_near, b_x, 0.0)
    b_rest = tl.fma(b_near, tl.full(b_x.shape, _LOG2_E, tl.float32), -(b_near * _LOG2_E))
    b_power = tl.exp2(b_x * _LOG2_E)
    return tl.fma(tl.where(m_near, b_power, 0.0), b_rest * _LN_2, b_power)


@triton.jit
def _softplus(b_x):
    """Return log(1 + e^x) to a few ulps: max(x, 0) + 2 artanh(e / (2 + e)) with e = e^-|x|, by the series of artanh.

    The GPU's own logarithm loses small results.
    """
    b_e = _exp(-tl.abs(b_x))
    b_s = tl.div_rn(b_e, 2.0 + b_e)
    # At most 1/9. The first term left out is below an ulp.
    b_square = b_s * b_s
    b_sum = tl.full(b_x.shape, 1.0 / 13.0, tl.float32)
    for i in tl.static_range(5):
        b_sum = tl.fma(b_sum, b_square, tl.full(b_x.shape, 1.0 / (11.0 - 2.0 * i), tl.float32))
    b_log = tl.fma(b_sum * b_square, b_s, b_s)
    return tl.where(b_x > 0.0, b_x, 0.0) + 2.0 * b_log


@triton.jit
def _scores(b_x, b_max, b_sum, SOFTMAX: tl.constexpr, SOFTPLUS: tl.constexpr):
    """Return softmax (for the row's maximum and sum of exponentials), sqrt(softplus) or sigmoid of logits."""
    if SOFTMAX:
        b_score = tl.div_rn(_exp(b_x - b_max), tl.full(b_x.shape, b_sum, tl.float32))
    elif SOFTPLUS:
        b_score = tl.sqrt_rn(_softplus(b_x))
    else:
        b_score = tl.div_rn(tl.full(b_x.shape, 1.0, tl.float32), 1.0 + _exp(-b_x))
    return b_score


@triton.jit
def _kept_groups(b_choice, m_e, BG: tl.constexpr, BS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2SUM: tl.constexpr):
    """Return [BG], true for each of the best groups: fewer than TOPK_GROUPS are better, or equal and earlier."""
    o_g = tl.arange(0, BG)
    o_s = tl.broadcast_to(tl.arange(0, BS)[None, :], [BG, BS])
    b_choice = tl.where(m_e, b_choice, float("-inf"))
    b_best = tl.max(b_choice, 1)
    if TOP2SUM:
        o_first = tl.min(tl.where(b_choice == b_best[:, None], o_s, BS), 1)
        b_best += tl.max(tl.where(o_s == o_first[:, None], float("-inf"), b_choice), 1)
    b_other = tl.reshape(b_best, [1, BG])
    m_better = (b_other > b_best[:, None]) | ((b_other == b_best[:, None]) & (o_g[None, :] < o_g[:, None]))
    return tl.sum(m_better.to(tl.int32), 1) < TOPK_GROUPS


@triton.jit
def _choose(
    b_x, b_max, b_sum, p_bias, o_e, m_e, o_k, SIZE, K: tl.constexpr, SOFTMAX: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2SUM: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return ids [BK] of the K best experts of logits b_x [BG, BS]."""
    b_choice = _scores(b_x, b_max, b_sum, SOFTMAX, SOFTPLUS)
    if HAS_BIAS:
        b_choice += tl.load(p_bias + o_e, mask=m_e, other=0.0)
    if TOPK_GROUPS < NUM_GROUPS:
        m_kept = _kept_groups(b_choice, m_e, BG, BS, TOPK_GROUPS, TOP2SUM)
        b_choice = tl.where(m_kept[:, None], b_choice, 0.0 if SOFTMAX else float("-inf"))
    # Map the float's bits to an integer with the same order.
    b_key = (b_choice + 0.0).to(tl.int32, bitcast=True)
    b_key = tl.reshape(tl.where(m_e, b_key ^ ((b_key >> 31) & 0x7FFFFFFF), _LEAST), [BG * BS])
    o_flat = tl.arange(0, BG * BS)
    o_flat = o_flat // BS * SIZE + o_flat % BS
    b_ids = tl.zeros([BK], dtype=tl.int32)
    for k in tl.static_range(K):
        i_top = tl.min(tl.where(b_key == tl.max(b_key, 0), o_flat, 0x7FFFFFFF), 0)
        b_key = tl.where(o_flat == i_top, _LEAST, b_key)
        b_ids = tl.where(o_k == k, i_top, b_ids)
    return b_ids


# A plan's entries begin after those of its earlier parts, at any alignment.
@triton.jit(do_not_specialize_on_alignment=["p_entries"])
def _topk_gate_kernel(
    p_logits, p_bias, p_weights, p_ids, p_counts, p_entries, stride, SIZE, scaling,
    K: tl.constexpr, SOFTMAX: tl.constexpr, SOFTPLUS: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_COUNTS: tl.constexpr, GIVEN: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2SUM: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Choose for one token, with experts as [groups, SIZE]. GIVEN: read the ids. Grid: (T,)."""
    let_next_begin()
    wait_for_previous()
    i_t = tl.program_id(0).to(tl.int64)
    o_g, o_s, o_k = tl.arange(0, BG), tl.arange(0, BS), tl.arange(0, BK)
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    m_e = (o_g < NUM_GROUPS)[:, None] & (o_s < SIZE)[None, :]
    p_logits += i_t * stride
    b_x = tl.load(p_logits + o_e, mask=m_e, other=0.0).to(tl.float32)
    if HAS_COUNTS:
        i_entry = tl.load(p_entries + i_t)
    b_max, b_sum = 0.0, 1.0
    if SOFTMAX:
        b_max = tl.max(tl.max(tl.where(m_e, b_x, float("-inf")), 1), 0)
        b_sum = tl.sum(tl.sum(tl.where(m_e, _exp(b_x - b_max), 0.0), 1), 0)
    m_k = o_k < K
    if GIVEN:
        b_ids = tl.load(p_ids + i_t * K + o_k, mask=m_k, other=0).to(tl.int32)
    else:
        b_ids = _choose(
            b_x, b_max, b_sum, p_bias, o_e, m_e, o_k, SIZE,
            K, SOFTMAX, SOFTPLUS, HAS_BIAS, NUM_GROUPS, TOPK_GROUPS, TOP2SUM, BG, BS, BK,
        )  # fmt: skip
    if HAS_COUNTS:
        # The old values are not needed, so these are reductions without a wait, in flight while the weights are
        # computed. Integer sums do not depend on their order.
        tl.atomic_add(p_counts + b_ids, tl.full([BK], 1, tl.int64), mask=m_k & (i_entry >= 0), sem="relaxed")
    b_chosen = tl.load(p_logits + b_ids, mask=m_k, other=0.0).to(tl.float32)
    b_weight = tl.where(m_k, _scores(b_chosen, b_max, b_sum, SOFTMAX, SOFTPLUS), 0.0)
    if RENORMALIZE:
        b_total = tl.sum(b_weight, 0)
        if not SOFTMAX:
            b_total += 1e-20
        b_weight = tl.div_rn(b_weight, tl.full([BK], b_total, tl.float32))
    tl.store(p_weights + i_t * K + o_k, b_weight * scaling, mask=m_k)
    if not GIVEN:
        tl.store(p_ids + i_t * K + o_k, b_ids.to(tl.int64), mask=m_k)


def topk_gate(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"],
    renormalize: bool,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["max", "top2sum"] = "max",
    scaling: float = 1.0,
    ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.topk_gate`. Raises ValueError for rows that are not contiguous or exceed its grid."""
    rule = GateRule(
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
        scaling=scaling,
    )
    shape = logits.shape[0], top_k
    weights = logits.new_empty(shape, dtype=torch.float32)
    found = logits.new_empty(shape, dtype=torch.int64) if ids is None else ids.contiguous()
    make_choice(
        TokenChoice(rule=rule, logits=logits, bias=bias, weights=weights, ids=found, counts=counts, entries=entries),
        given=ids is not None,
    )
    return weights, found


def make_choice(choice: TokenChoice, *, given: bool = False) -> None:
    """Make the choice of any number of tokens: write its weights, and its ids unless they are given.

    Raises as `topk_gate`.
    """
    rule, logits, bias = choice.rule, choice.logits, choice.bias
    check_rows("topk_gate", logits=logits, bias=bias)
    num_tokens, num_experts = logits.shape
    if num_tokens > MAX_GRID_X:
        raise ValueError(f"topk_gate: {list(logits.shape)} exceeds the grid of a GPU")
    num_groups, topk_groups = rule.num_groups, rule.topk_groups
    if topk_groups >= num_groups:
        num_groups = topk_groups = 1
    size = num_experts // num_groups
    if num_tokens:
        _topk_gate_kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            choice.weights,
            choice.ids,
            choice.counts,
            choice.entries,
            logits.stride(0),
            size,
            float(rule.scaling),
            K=rule.top_k,
            SOFTMAX=rule.scoring == "softmax",
            SOFTPLUS=rule.scoring == "sqrtsoftplus",
            RENORMALIZE=rule.renormalize,
            HAS_BIAS=bias is not None,
            HAS_COUNTS=choice.counts is not None,
            GIVEN=given,
            NUM_GROUPS=num_groups,
            TOPK_GROUPS=topk_groups,
            TOP2SUM=rule.group_score == "top2sum",
            BG=triton.next_power_of_2(num_groups),
            BS=triton.next_power_of_2(size),
            BK=triton.next_power_of_2(rule.top_k),
            num_warps=1,
            enable_fp_fusion=False,
            **dependent(logits),
        )
