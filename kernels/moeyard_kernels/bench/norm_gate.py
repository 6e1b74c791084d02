"""Bench cases of the norm, router product and choice of a decode step: one launch against a launch for each."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from moeyard_kernels.bench.case import Case, Target, assert_bits
from moeyard_kernels.experts import norm_gate as op
from moeyard_kernels.ref import norm_gate as reference
from moeyard_kernels.types.gate import GateRule

OPS = ("norm_gate",)

_SIGMOID = GateRule(top_k=8, scoring="sigmoid", renormalize=True, scaling=2.5)
# Name, experts, hidden size, rule; sigmoid gates have a bias and fp32 logits.
MODELS = (
    ("Qwen3-30B-A3B", 128, 2048, GateRule(top_k=8, scoring="softmax", renormalize=True)),
    ("DeepSeek-V2-Lite", 64, 2048, GateRule(top_k=6, scoring="softmax", renormalize=False)),
    (
        "DeepSeek-V3",
        256,
        7168,
        GateRule(
            top_k=8,
            scoring="sigmoid",
            renormalize=True,
            num_groups=8,
            topk_groups=4,
            group_score="top2sum",
            scaling=2.5,
        ),
    ),
    ("Kimi-K2", 384, 7168, _SIGMOID),
)


def cases() -> Iterator[Case]:
    """Each model's gate for decode steps of 1 to 64 rows, in one launch also where the op itself takes the chain."""
    for name, num_experts, hidden, rule in MODELS:
        for num_rows in (1, 2, 4, 8, 16, 64):
            yield _case(f"T{num_rows} E{num_experts} H{hidden} {name}", num_rows, num_experts, hidden, rule)


def _case(shape: str, num_rows: int, num_experts: int, hidden: int, rule: GateRule) -> Case:
    sizes, sigmoid = ((num_rows, hidden), (num_rows, hidden), (num_experts, hidden)), rule.scoring == "sigmoid"
    x, residual, weight = (torch.randn(size, device="cuda") for size in sizes)
    x, residual, weight = x.bfloat16(), residual.bfloat16(), (weight * hidden**-0.5).bfloat16()
    norm = (1 + torch.randn(hidden, device="cuda") * 0.1).bfloat16()
    bias = torch.randn(num_experts, device="cuda") * 0.1 if sigmoid else None
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    # `static_weight` promises that it is complete.
    torch.cuda.synchronize()
    config = op.tuning.choose(
        op.OP, op.shape_class(num_rows, num_experts, hidden), x, (op.GateConfig,), lambda: op.default_config(num_rows)
    )
    flags: dict[str, Any] = {"eps": 1e-6, "fp32_logits": sigmoid, "static_weight": True}
    given: tuple[Any, ...] = (x, residual, norm, weight, bias, rule)
    run = partial(op.norm_gate, *given, arrived=arrived, config=config, **flags)
    chain = partial(op.chain, *given, **flags)

    def prove() -> None:
        wanted = chain()
        for i in range(3):
            assert_bits(f"a launch for each, {i}", run(), wanted)
        assert_bits("the counter", arrived.cpu(), torch.zeros(1, dtype=torch.int32))
        alone = op.norm_gate(
            x[-1:].clone(), residual[-1:].clone(), *given[2:], arrived=arrived, config=op.default_config(1), **flags
        )
        assert_bits("row alone", alone, tuple(each[-1:] for each in wanted))
        moved: Any = (each if each is None or isinstance(each, GateRule) else each.cpu() for each in given)
        normed, total, weights, _ = reference.norm_gate(*moved, arrived=arrived.cpu(), **flags)
        assert_bits("sum", wanted[1].cpu(), total)
        assert torch.allclose(wanted[0].float().cpu(), normed.float(), rtol=2**-6), "not the reference's norm"
        # Experts whose logits are nearly equal may change places, and their weights with them.
        assert torch.allclose(wanted[2].sum(1).cpu(), weights.sum(1), rtol=1e-2), "not the reference's weights"

    return Case(
        op="norm_gate",
        shape=shape,
        run=run,
        prove=prove,
        num_bytes=2 * num_experts * hidden + 8 * num_rows * hidden + 12 * num_rows * rule.top_k,
        num_flops=2 * num_rows * num_experts * hidden,
        target=Target("speedup", 1.0) if num_rows * hidden <= op.FEW_VALUES else None,
        baseline=chain,
        baseline_name="add_rms_norm, linear, topk_gate",
        variants=[(each, partial(run, config=each)) for each in op.configs_for(num_rows)],
        tune_key=(op.OP, op.shape_class(num_rows, num_experts, hidden)),
    )
