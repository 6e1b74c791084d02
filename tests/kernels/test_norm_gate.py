"""Norm, router product and choice in one launch: the bits of a launch for each, with every config."""

from typing import Any

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.bench.case import assert_bits
from moeyard_kernels.experts import norm_gate as triton_kernel
from moeyard_kernels.experts.norm_gate import CONFIGS, FEW_VALUES, GateConfig
from moeyard_kernels.types.gate import GateRule

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU_ONLY = pytest.mark.skipif(not CUDA, reason="sizes for a GPU")
SOFTMAX = GateRule(top_k=8, scoring="softmax", renormalize=True)
SIGMOID = GateRule(top_k=8, scoring="sigmoid", renormalize=True, scaling=2.5)
GROUPS = GateRule(
    top_k=8, scoring="sigmoid", renormalize=True, scaling=2.5, num_groups=8, topk_groups=4, group_score="top2sum"
)
# Experts, rule.
RULES = {
    "qwen3": (40, GateRule(top_k=4, scoring="softmax", renormalize=True)),
    "v2-lite": (33, GateRule(top_k=6, scoring="softmax", renormalize=False)),
    "v2": (40, GateRule(top_k=6, scoring="softmax", renormalize=False, scaling=16.0, num_groups=8, topk_groups=3)),
    "v3": (64, GROUPS),
    "kimi": (50, SIGMOID),
    "mixtral": (8, GateRule(top_k=2, scoring="softmax", renormalize=True)),
}


class Gate:
    """One layer's gate and rows for it, on DEVICE; sigmoid gates have a bias and fp32 logits."""

    def __init__(self, T: int, E: int, H: int, rule: GateRule, dtype: torch.dtype = torch.bfloat16) -> None:
        self.x, self.residual = (torch.randn(T, H).to(DEVICE, dtype) for _ in range(2))
        self.norm = (1 + torch.randn(H) * 0.1).to(DEVICE, dtype)
        self.weight = (torch.randn(E, H) * H**-0.5).to(DEVICE, dtype)
        sigmoid = rule.scoring == "sigmoid"
        self.bias = torch.randn(E, device=DEVICE) * 0.2 if sigmoid else None
        self.rule, self.flags = rule, {"eps": 1e-6, "fp32_logits": sigmoid}
        self.arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        if CUDA:
            # `static_weight` promises that it is complete.
            torch.cuda.synchronize()

    def given(self, rows: slice = slice(None)) -> tuple[Any, ...]:
        return (self.x[rows].clone(), self.residual[rows].clone(), self.norm, self.weight, self.bias, self.rule)

    def chain(self) -> tuple[torch.Tensor, ...]:
        return triton_kernel.chain(*self.given(), **self.flags)

    def run(
        self, config: GateConfig | None, rows: slice = slice(None), *, static_weight: bool = True
    ) -> tuple[torch.Tensor, ...]:
        given = self.given(rows)
        # What the allocator hands out next is no result.
        poison = [torch.full((n,), float("nan"), device=DEVICE) for n in (given[0].numel(), self.weight.shape[0])]
        del poison
        results = triton_kernel.norm_gate(
            *given, arrived=self.arrived, config=config, static_weight=static_weight, **self.flags
        )
        assert self.arrived.item() == 0, "the next launch finds no arrivals"
        return results


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("T", [1, 5])
def test_one_launch_gives_the_bits_of_a_launch_for_each(name: str, T: int) -> None:
    num_experts, rule = RULES[name]
    gate = Gate(T, num_experts, 384, rule)
    wanted = gate.chain()
    for config in (CONFIGS[0], CONFIGS[5]):
        for static in (True, False):
            assert_bits(f"{config}", gate.run(config, static_weight=static), wanted)
    assert_bits("the default", gate.run(None), wanted)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.as_dict().values())))
def test_every_config_gives_them(config: GateConfig) -> None:
    for T in {1, config.BM}:
        gate = Gate(T, 24, 640, GateRule(top_k=3, scoring="softmax", renormalize=True))
        wanted = gate.chain()
        assert_bits(f"{T} rows", gate.run(config), wanted)
        alone = gate.run(config, slice(T - 1, T))
        assert_bits("row alone", alone, tuple(x[T - 1 :] for x in wanted))


@pytest.mark.parametrize("T", [2, 9])
def test_rows_share_tiles_of_a_small_norm(T: int) -> None:
    """Of 256 values, eight rows are a tile of the norm."""
    gate = Gate(T, 16, 256, GateRule(top_k=2, scoring="softmax", renormalize=True))
    assert_bits("chain", gate.run(triton_kernel.default_config(T)), gate.chain())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("T", [0, 3, 70])
def test_other_rows_take_the_chain(T: int, dtype: torch.dtype) -> None:
    gate = Gate(T, 16, 256, GateRule(top_k=2, scoring="sigmoid", renormalize=True), dtype)
    results = gate.run(None)
    assert [tuple(x.shape) for x in results] == [(T, 256), (T, 256), (T, 2), (T, 2)]
    assert_bits("chain", results, gate.chain())
    # A weight whose values are not bf16's.
    gate.weight = torch.randn(16, 256, device=DEVICE)
    gate.flags["fp32_logits"] = True
    assert_bits("fp32 weight", gate.run(None), gate.chain())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_reference_is_the_chain_of_references(name: str, dtype: torch.dtype) -> None:
    num_experts, rule = RULES[name]
    x, residual, norm, weight = (torch.randn(*n).to(dtype) for n in ((4, 48), (4, 48), (48,), (num_experts, 48)))
    arrived = torch.zeros(1, dtype=torch.int32)
    for fp32 in (False, True):
        found = ops.norm_gate(x, residual, norm, weight, None, rule, eps=1e-6, arrived=arrived, fp32_logits=fp32)
        normed, total = ops.add_rms_norm(x, residual, norm, 1e-6)
        logits = ops.linear(normed, weight, out_dtype=torch.float32 if fp32 else None).float()
        wanted = ops.topk_gate(
            logits, top_k=rule.top_k, scoring=rule.scoring, renormalize=rule.renormalize, num_groups=rule.num_groups,
            topk_groups=rule.topk_groups, group_score=rule.group_score, scaling=rule.scaling,
        )  # fmt: skip
        assert_bits("chain", found, (normed, total, *wanted))


@GPU_ONLY
@pytest.mark.parametrize(
    ("E", "H", "rule"),
    [(128, 2048, SOFTMAX), (64, 2048, SOFTMAX), (256, 7168, GROUPS), (384, 7168, SIGMOID)],
    ids=["Qwen3-30B-A3B", "DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2"],
)
@pytest.mark.parametrize("T", [1, 2, 8, 16, 64])
def test_real_shapes(T: int, E: int, H: int, rule: GateRule) -> None:
    gate = Gate(T, E, H, rule)
    wanted = gate.chain()
    for config in triton_kernel.configs_for(T):
        for i in range(20):
            assert_bits(f"{config}, run {i}", gate.run(config), wanted)


@GPU_ONLY
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("T", [1, 8])
def test_a_graph_replays_it_behind_other_launches(T: int, config: GateConfig | None) -> None:
    gate = Gate(T, 128, 2048, SOFTMAX)

    def step() -> tuple[torch.Tensor, ...]:
        x = ops.residual_add_scaled(gate.x, gate.residual, gate.residual, 0.5)
        first = triton_kernel.norm_gate(
            x, gate.residual, gate.norm, gate.weight, gate.bias, gate.rule, arrived=gate.arrived, config=config,
            static_weight=True, **gate.flags,
        )  # fmt: skip
        # Of the same counter, and of rows that the first has just written.
        again = triton_kernel.norm_gate(
            first[0], first[1], gate.norm, gate.weight, gate.bias, gate.rule, arrived=gate.arrived, config=config,
            static_weight=True, **gate.flags,
        )  # fmt: skip
        return x, *first, *again, ops.silu_mul(again[0])

    assert_replays(step, lambda: (gate.x.normal_(), gate.residual.normal_()))
    x, *first = step()[:5]
    assert_bits(
        "chain",
        tuple(first),
        triton_kernel.chain(x, gate.residual, gate.norm, gate.weight, None, SOFTMAX, **gate.flags),
    )


def test_bad_arguments_are_named() -> None:
    gate = Gate(2, 16, 128, GateRule(top_k=2, scoring="softmax", renormalize=True))
    x, residual, norm, weight, bias, rule = gate.given()
    good = {"x": x, "residual": residual, "norm": norm, "weight": weight, "bias": bias, "rule": rule}
    for change, message in [
        ({"norm": norm[:5]}, r"norm_gate: weight bfloat16 \[5\] does not fit x bfloat16 \[2, 128\]"),
        ({"residual": residual[:1]}, r"norm_gate: residual bfloat16 \[1, 128\] is not like x bfloat16 \[2, 128\]"),
        ({"weight": weight[:, :5]}, r"norm_gate: weight bfloat16 \[16, 5\] does not fit x bfloat16 \[2, 128\]"),
        ({"arrived": gate.arrived.long()}, r"norm_gate: arrived must be int32 \[1\], got int64 \[1\]"),
        ({"bias": torch.zeros(3, device=DEVICE)}, r"norm_gate: bias must be fp32 \[16\], got float32 \[3\]"),
        ({"rule": GateRule(top_k=17, scoring="softmax", renormalize=True)}, "norm_gate: top_k 17 of 16 experts"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.norm_gate(**(good | {"arrived": gate.arrived} | change), eps=1e-6)
    with pytest.raises(ValueError, match=r"norm_gate: x .* is not contiguous"):
        triton_kernel.norm_gate(x.T.contiguous().T, *gate.given()[1:], eps=1e-6, arrived=gate.arrived)
    with pytest.raises(ValueError, match=r"torch.bfloat16 \[17, 128\] does not fit GateConfig"):
        Gate(17, 16, 128, rule).run(CONFIGS[0])
    assert FEW_VALUES >= 2048, "a decode step of one row is one launch"
