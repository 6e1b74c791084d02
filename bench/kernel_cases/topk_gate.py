"""Bench of the gate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import ModelStep
from moeyard_kernels import ops

OPS = ("topk_gate",)

_SIGMOID: Mapping[str, Any] = MappingProxyType({"scoring": "sigmoid", "renormalize": True, "scaling": 2.5})
_GATES: tuple[tuple[str, int, Mapping[str, Any]], ...] = (
    ("Kimi-K2 sigmoid bias", 384, _SIGMOID),
    (
        "DeepSeek-V3 sigmoid bias, 4 of 8 groups",
        256,
        {**_SIGMOID, "num_groups": 8, "topk_groups": 4, "group_score": "top2sum"},
    ),
    ("DeepSeek-V4 sqrtsoftplus bias", 256, {**_SIGMOID, "scoring": "sqrtsoftplus", "top_k": 6, "scaling": 1.5}),
    ("Qwen3 softmax", 128, MappingProxyType({"scoring": "softmax", "renormalize": True})),
)
_SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "softmax": lambda logits: torch.softmax(logits, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    }
)
_CHAIN = "torch scores, topk, gather, divide"
# Two units in the last place of an fp32 score: its own error and that of the reference.
_ROUNDING = 4 * 2.0**-24
# Rows for which the counting of choices is measured: single tokens, a full decode step, a prompt.
_COUNTED_ROWS = (1, 8, 64, 8192)


def cases() -> Iterator[Case]:
    """Yield four gates at 64 tokens, at one token and at a prompt's 4096, and three that count choices."""
    for num_tokens in (64, 1, 4096):
        for name, num_experts, options in _GATES:
            yield _case(_logits(num_tokens, num_experts), name, options)
    for num_tokens in _COUNTED_ROWS:
        for name, num_experts, options in _GATES[1:]:
            yield _case(_logits(num_tokens, num_experts), name, options, counted=True)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield each gate over its model's product: logits in fp32 or bf16, with or without a shared expert's gate."""
    for model in models:
        for num_tokens in rows:
            logits = _logits(num_tokens, model.num_logits)
            logits = logits if model.fp32_logits else logits.bfloat16()
            yield _case(logits[:, : model.num_experts], model.name, asdict(model.rule), judged=False)


def _logits(num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, device="cuda")


def _case(
    logits: torch.Tensor, name: str, options: Mapping[str, Any], *, counted: bool = False, judged: bool = True
) -> Case:
    num_tokens, num_experts = logits.shape
    options = {"top_k": 8, **options}
    top_k = options["top_k"]
    bias = torch.randn(num_experts, device="cuda") * 0.1 if options["scoring"] != "softmax" else None
    choose: partial[Any] = partial(ops.topk_gate, bias=bias, **options)
    counts = torch.zeros(num_experts, dtype=torch.int64, device="cuda")
    entries = torch.arange(num_tokens, device="cuda")

    def prove() -> None:
        weights, ids = choose(logits)
        wanted, wanted_ids = ops.topk_gate.reference(logits.cpu(), bias=None if bias is None else bias.cpu(), **options)
        scores = _SCORES[options["scoring"]](logits.cpu().double())
        _assert_chosen(scores, None if bias is None else bias.cpu().double(), ids.cpu(), wanted_ids)
        assert torch.allclose(weights.cpu(), wanted, rtol=1e-6, atol=0), "weights are not the reference's"
        for t in {0, num_tokens - 1}:
            assert_bits("row alone", choose(logits[t : t + 1].clone()), (weights[t : t + 1], ids[t : t + 1]))
        if counted:
            chosen, real = torch.zeros_like(counts), torch.where(entries % 3 == 1, -1, entries)
            assert_bits("beside counts", choose(logits, counts=chosen, entries=real), (weights, ids))
            assert_bits("counts", chosen, torch.bincount(ids[real >= 0].flatten(), minlength=num_experts))

    if counted:
        baseline, baseline_name = partial(choose, logits), "without counts"
    elif bias is None:
        baseline, baseline_name = partial(_softmax_chain, logits, top_k), _CHAIN
    else:
        grouped = options.get("num_groups", 1) > 1
        baseline = partial(_biased_chain, logits, bias, options["scoring"], top_k, options["scaling"], grouped=grouped)
        baseline_name = _CHAIN
    return Case(
        op="topk_gate",
        shape=f"T{num_tokens} E{num_experts} K{top_k} {name}{', counted' if counted else ''}",
        run=partial(choose, logits, counts=counts, entries=entries) if counted else partial(choose, logits),
        prove=prove,
        num_bytes=num_tokens * (logits.itemsize * num_experts + top_k * 12),
        target=Target("us", 6) if num_tokens == 64 and judged and not counted else None,
        baseline=baseline,
        baseline_name=baseline_name,
        early=False,
    )


def _assert_chosen(scores: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise AssertionError unless `ids` are those of the host's reference.

    If scores differ by a rounding only, either expert is right. The exp of host and device differ in the last bit.
    """
    choice, size = (scores, scores) if bias is None else (scores + bias, scores + bias.abs())
    gap = (choice.gather(1, ids) - choice.gather(1, wanted)).abs()
    wrong = int((gap > size.gather(1, wanted) * _ROUNDING).sum())
    assert wrong == 0, (
        f"ids of the reference: {wrong} of {ids.numel()} differ, by {float(gap.max()):.1e} in their score"
    )
    assert int((ids != wanted).sum()) < 1e-3 * ids.numel() + 1, "more ids differ than roundings explain"
    assert int((ids.sort(1).values.diff(dim=1) == 0).sum()) == 0, "an expert is chosen twice"


def _softmax_chain(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    weights, _ = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    return weights / weights.sum(-1, keepdim=True)


def _biased_chain(
    logits: torch.Tensor, bias: torch.Tensor, scoring: str, top_k: int, scaling: float, *, grouped: bool
) -> torch.Tensor:
    scores = _SCORES[scoring](logits)
    choice = scores + bias
    if grouped:
        best = choice.view(-1, 8, choice.shape[1] // 8).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(4, -1).indices, 1.0).bool()
        choice = choice.masked_fill(~kept.repeat_interleave(choice.shape[1] // 8, 1), float("-inf"))
    weights = scores.gather(1, choice.topk(top_k, -1).indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
