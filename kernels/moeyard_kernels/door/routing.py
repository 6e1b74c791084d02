"""The door to the gate: which experts a token goes to, and in what order they are computed. See `ops`."""

from typing import Literal

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, check_groups, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.gate import GateRule


def check_gate(
    op: str, logits: torch.Tensor, rule: GateRule, bias: torch.Tensor | None, counts: torch.Tensor | None,
    entries: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for what `topk_gate` does not take."""
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(f"{op}: logits must be fp32 or bf16 [T, E], got {show(logits)}")
    num_experts, top_k = logits.shape[1], rule.top_k
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{op}: top_k {top_k} of {num_experts} experts")
    if rule.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"{op}: scoring {rule.scoring!r} is neither 'softmax' nor 'sigmoid'")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,)):
        raise ValueError(f"{op}: bias must be fp32 [{num_experts}], got {show(bias)}")
    if rule.num_groups != 1 or rule.topk_groups != 1:
        check_groups(num_experts, top_k, rule.num_groups, rule.topk_groups, rule.group_score)
    if (counts is None) != (entries is None):
        raise ValueError(f"{op}: counts and entries come together")
    for name, x, size in (("counts", counts, num_experts), ("entries", entries, logits.shape[0])):
        if x is not None and (x.dtype != torch.int64 or x.shape != (size,) or not x.is_contiguous()):
            raise ValueError(f"{op}: {name} must be contiguous int64 [{size}], got {show(x)}")
    check_devices(op, logits=logits, bias=bias, counts=counts, entries=entries)


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
    counts: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for logits [T, E], fp32 or bf16 -> (weights [T, K] fp32, ids [T, K] int64), by falling score.

    Rows of logits may be slices of wider ones.

    scores = softmax or sigmoid of the logits; the choice is by scores + bias [E] fp32 (ties: the lowest id), within the
    `topk_groups` best of `num_groups` groups of consecutive experts, a group counting as its best score or the sum of
    its two best. Weights are the unbiased scores, divided by their sum (+ 1e-20 for sigmoid) if `renormalize`, times
    `scaling`. Outside the chosen groups a score is -inf (sigmoid) or 0 (softmax) for the choice, as in transformers.

    counts [E] and entries [T], both int64 or neither: each row whose entry is not negative adds one to counts of each
    expert that it has chosen. Weights and ids are the same bits.
    """
    rule = GateRule(
        top_k=top_k, scoring=scoring, renormalize=renormalize, num_groups=num_groups, topk_groups=topk_groups,
        group_score=group_score, scaling=scaling,
    )  # fmt: skip
    check_gate("topk_gate", logits, rule, bias, counts, entries)
    return kernel("experts.topk_gate", logits).topk_gate(
        logits,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
        scaling=scaling,
        counts=counts,
        entries=entries,
    )
