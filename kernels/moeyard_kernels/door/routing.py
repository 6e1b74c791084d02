"""The door to the gate: which experts a token goes to, and in what order they are computed. See `ops`."""

from dataclasses import asdict
from typing import Literal

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, check_groups, check_norm, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.gate import GateRule


def _check_choice(op: str, num_experts: int, bias: torch.Tensor | None, rule: GateRule) -> None:
    if not 1 <= rule.top_k <= num_experts:
        raise ValueError(f"{op}: top_k {rule.top_k} of {num_experts} experts")
    if rule.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"{op}: scoring {rule.scoring!r} is neither 'softmax' nor 'sigmoid'")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,)):
        raise ValueError(f"{op}: bias must be fp32 [{num_experts}], got {show(bias)}")
    if rule.num_groups != 1 or rule.topk_groups != 1:
        check_groups(op, num_experts, rule)


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
    """Choose experts for logits [T, E], fp32 or bf16 -> (weights [T, K] fp32, ids [T, K] int64), by falling score.

    scores = softmax or sigmoid of the logits; the choice is by scores + bias [E] fp32 (ties: the lowest id), within the
    `topk_groups` best of `num_groups` groups of consecutive experts, a group counting as its best score or the sum of
    its two best. Weights are the unbiased scores, divided by their sum (+ 1e-20 for sigmoid) if `renormalize`, times
    `scaling`. Outside the chosen groups a score is -inf (sigmoid) or 0 (softmax) for the choice, as in transformers.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(f"topk_gate: logits must be fp32 or bf16 [T, E], got {show(logits)}")
    rule = GateRule(
        top_k=top_k, scoring=scoring, renormalize=renormalize, num_groups=num_groups, topk_groups=topk_groups,
        group_score=group_score, scaling=scaling,
    )  # fmt: skip
    _check_choice("topk_gate", logits.shape[1], bias, rule)
    check_devices("topk_gate", logits=logits, bias=bias)
    return kernel("experts.topk_gate", logits).topk_gate(logits, bias=bias, **asdict(rule))


def norm_gate(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: GateRule,
    *,
    eps: float,
    arrived: torch.Tensor,
    fp32_logits: bool = False,
    static_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed, total, weights, ids) of x and residual [T, H], bit for bit what this chain gives:

    normed, total = add_rms_norm(x, residual, norm [H], eps); logits = linear(normed, weight [E, H]) in the dtype, or in
    fp32 with `fp32_logits`; weights, ids = topk_gate(logits, bias [E], rule). An fp32 weight for bf16 rows
    multiplies fp32 copies of them. Few rows in bf16 are one launch on a GPU. arrived [1] int32 is zero, stays so, and
    belongs to launches that follow one another: each caller has its own. static_weight: as in `linear`.
    """
    check_norm("norm_gate", x, norm)
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"norm_gate: residual {show(residual)} is not like x {show(x)} [T, H]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"norm_gate: weight {show(weight)} does not fit x {show(x)}")
    if arrived.shape != (1,) or arrived.dtype != torch.int32:
        raise ValueError(f"norm_gate: arrived must be int32 [1], got {show(arrived)}")
    _check_choice("norm_gate", weight.shape[0], bias, rule)
    check_devices("norm_gate", x=x, residual=residual, norm=norm, weight=weight, bias=bias, arrived=arrived)
    return kernel("experts.norm_gate", x).norm_gate(
        x, residual, norm, weight, bias, rule,
        eps=eps, arrived=arrived, fp32_logits=fp32_logits, static_weight=static_weight,
    )  # fmt: skip
