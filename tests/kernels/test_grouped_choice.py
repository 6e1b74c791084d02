"""One token's experts, chosen by the experts' kernel: ids, weights and results equal those of a separate choice.

On a CPU, or if a shape does not fit, the choice is separate there too. On a GPU the programs of both products make it.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.launch import LARGER_VIEWS
from moeyard_kernels.experts import grouped_gemm as experts
from moeyard_kernels.experts.grouped_choice import can_choose
from moeyard_kernels.experts.grouped_configs import SLICE, slice_fits, slices_of_choice
from moeyard_kernels.experts.topk_gate import topk_gate
from moeyard_kernels.types.expert_layout import ExpertPairs, can_share
from moeyard_kernels.types.gate import GateRule, SharedRow, TokenChoice

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = SimpleNamespace(grouped_gemm=experts.grouped_gemm, topk_gate=topk_gate)
SOFTMAX = GateRule(top_k=8, scoring="softmax", renormalize=True)
SIGMOID = GateRule(top_k=8, scoring="sigmoid", renormalize=True, scaling=2.446)
# Experts, hidden and intermediate size, rule, bias of scores, dtype of logits, of models and of unusual shapes.
BF16, FP32 = torch.bfloat16, torch.float32
REAL = {
    "qwen3-30b": (128, 2048, 768, SOFTMAX, False, BF16),
    "qwen3.5": (256, 2048, 512, SOFTMAX, False, BF16),
    "qwen3-next": (512, 2048, 512, replace(SOFTMAX, top_k=10), False, BF16),
    "kimi-linear": (256, 2304, 1024, SIGMOID, True, FP32),
    "v2-lite": (64, 2048, 1408, replace(SOFTMAX, top_k=6, renormalize=False), False, FP32),
    "160 of fp32": (160, 1024, 256, replace(SOFTMAX, top_k=3, scaling=16.0), False, FP32),
    "16, all": (16, 256, 64, replace(SIGMOID, top_k=16), False, BF16),
    "384": (384, 1024, 128, SIGMOID, True, BF16),
}


class Layer:
    """One layer's experts in slots of any order, with one row after the other. `limit`: of all gates and ups."""

    limit: float | None = None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inner: int,
        rule: GateRule,
        biased: bool,
        dtype: torch.dtype,
        *,
        exact: bool,
    ) -> None:
        E, H, I = num_experts, hidden, inner  # noqa: E741
        self.rule, self.num_experts, self.exact = rule, E, exact
        self.generator = torch.Generator(DEVICE).manual_seed(E * I)
        shapes = ((E, 2 * I, H), (E, H, I))
        self.gate_up, self.down = (torch.empty(shape, dtype=BF16, device=DEVICE) for shape in shapes)
        if exact:
            self.gate_up.random_(-1, 2, generator=self.generator).div_(64)
            self.down.zero_()[..., 0] = 0.5
        else:
            self.gate_up.normal_(0, H**-0.5, generator=self.generator)
            self.down.normal_(0, I**-0.5, generator=self.generator)
        self.slots = torch.randperm(E, generator=self.generator, device=DEVICE).int()
        self.bias = self._normal(E) * 0.1 if biased else None
        # A shared expert's gate leaves the logits in wider rows.
        self.wide = torch.zeros(1, E + 16, dtype=dtype, device=DEVICE)
        self.x = torch.zeros(1, H, dtype=BF16, device=DEVICE)
        self.counts, self.entries = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (E, 1))
        # A shared expert: the results of its first and of its second product.
        self.row = torch.zeros(1, 2 * I, dtype=dtype, device=DEVICE)
        self.shared = self.down[-1].flip(1).contiguous()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    @property
    def logits(self) -> torch.Tensor:
        return self.wide[:, : self.num_experts]

    def draw(self) -> None:
        """Draw another row. Every second logit equals a later one."""
        self.x.copy_(self._normal(*self.x.shape).sign() if self.exact else self._normal(*self.x.shape))
        logits = self._normal(self.num_experts) * 2
        logits[1::2] = logits[::2].flip(0)
        self.wide[0, : self.num_experts] = logits
        self.row.copy_(self._normal(*self.row.shape))

    def choice(self, *, counted: bool = False, shared: bool = False) -> TokenChoice:
        weights, ids = (torch.full((1, self.rule.top_k), -7, dtype=d, device=DEVICE) for d in (FP32, torch.int64))
        more: dict[str, Any] = {"counts": self.counts, "entries": self.entries} if counted else {}
        if shared:
            out = torch.full_like(self.x, -7)
            more["shared"] = SharedRow(gate_up=self.row, down=self.shared, out=out, limit=self.limit)
        return TokenChoice(rule=self.rule, logits=self.logits, bias=self.bias, weights=weights, ids=ids, **more)

    def pairs(self, ids: torch.Tensor, choice: TokenChoice | None = None) -> ExpertPairs:
        return ExpertPairs(topk_ids=ids, slot_of_expert=self.slots, num_slots=self.num_experts, choice=choice)

    def run(
        self, op: Any = ops.grouped_gemm, *, counted: bool = False, shared: bool = False
    ) -> tuple[torch.Tensor, ...]:
        choice = self.choice(counted=counted, shared=shared)
        pairs = self.pairs(choice.ids, choice)
        y = op(self.x, self.gate_up, self.down, pairs, top_k=self.rule.top_k, limit=self.limit)
        results = choice.weights, choice.ids, y
        return results if choice.shared is None else (*results, choice.shared.out)

    def shared_ahead(self) -> torch.Tensor:
        """Return the shared expert's result from separate launches."""
        return ops.linear(ops.silu_mul(self.row.to(BF16), self.limit), self.shared)

    def ahead(self, op: Any = ops.grouped_gemm, gate: Any = ops.topk_gate) -> tuple[torch.Tensor, ...]:
        rule = {name: getattr(self.rule, name) for name in ("top_k", "scoring", "renormalize", "scaling")}
        weights, ids = gate(self.logits, bias=self.bias, **rule)
        given = {"top_k": self.rule.top_k, "limit": self.limit}
        return weights, ids, op(self.x, self.gate_up, self.down, self.pairs(ids), **given)


def assert_same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    names = ("weights", "ids", "results", "shared")
    for name, ours, theirs in zip(names[: len(found)], found, wanted, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("through", [ops, KERNELS], ids=["ops", "kernels"])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_on_every_device(through: Any, biased: bool) -> None:
    layer = Layer(16, 64, 32, replace(SOFTMAX, top_k=3), biased, FP32, exact=True)
    for _ in range(3):
        layer.draw()
        assert_same(layer.run(through.grouped_gemm), layer.ahead(through.grouped_gemm, through.topk_gate))


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_programs_choose_like_the_gate(name: str) -> None:
    layer = Layer(*REAL[name], exact=False)
    # The unusual shape's rows are too short for copies in flight.
    assert can_choose(layer.choice(), layer.gate_up, layer.down) == (name != "16, all")
    for _ in range(8):
        layer.draw()
        assert_same(layer.run(), layer.ahead())
    assert_replays(layer.run, layer.draw)


@pytest.mark.parametrize("through", [ops, KERNELS], ids=["ops", "kernels"])
def test_fused_shared_expert(through: Any) -> None:
    layer = Layer(16, 64, 64, replace(SOFTMAX, top_k=3), False, FP32, exact=True)
    for _ in range(3):
        layer.draw()
        found = layer.run(through.grouped_gemm, shared=True)
        assert_same(found[:3], layer.ahead(through.grouped_gemm, through.topk_gate))
        torch.testing.assert_close(found[3], layer.shared_ahead(), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_fused_shared_expert_equals_separate_launches(name: str) -> None:
    layer = Layer(*REAL[name], exact=False)

    def run() -> tuple[torch.Tensor, ...]:
        return layer.run(shared=True)

    for _ in range(8):
        layer.draw()
        assert_same(run(), (*layer.ahead(), layer.shared_ahead()))
    assert_replays(run, layer.draw)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_limit_in_fused_products(name: str) -> None:
    layer = Layer(*REAL[name], exact=False)
    layer.draw()
    free = layer.run(shared=True)
    layer.limit = 0.25
    found = layer.run(shared=True)
    assert_same(found, (*layer.ahead(), layer.shared_ahead()))
    assert not torch.equal(found[2], free[2])
    assert not torch.equal(found[3], free[3])


def test_sizes_of_a_fused_shared_expert() -> None:
    """The inner values must fit whole into a multiprocessor's shared memory."""
    sizes = range(0, 4096, 32)
    assert [n for n in sizes if can_share(n)] == [n for n in sizes if n and slice_fits(n, SLICE[0].BN)]


@pytest.mark.parametrize("name", ["qwen3-30b", "kimi-linear"] if GPU else ["16, all"])
def test_choices_are_counted_once(name: str) -> None:
    layer, wanted = Layer(*REAL[name], exact=True), 0
    for entry in (3, -1, 0):
        layer.draw()
        layer.entries.fill_(entry)
        _, ids, _ = layer.run(counted=True)
        if entry >= 0:
            wanted = wanted + torch.bincount(ids[0], minlength=layer.num_experts)
        assert torch.equal(layer.counts, torch.as_tensor(wanted, device=DEVICE))


def test_choices_that_need_their_own_launch() -> None:
    """Groups of experts, fp32 weights, and a number of experts that is no multiple of 16. On a CPU all do."""
    layer = Layer(32, 512, 64, replace(SOFTMAX, num_groups=4, topk_groups=2), False, FP32, exact=True)
    assert not can_choose(layer.choice(), layer.gate_up, layer.down)
    layer.rule = SOFTMAX
    assert can_choose(layer.choice(), layer.gate_up, layer.down) == GPU
    assert not can_choose(layer.choice(), layer.gate_up.float(), layer.down.float())


def test_slices_of_the_first_product() -> None:
    """All programs run at once, two per multiprocessor, or nothing is cut."""
    cut = {
        name: slices_of_choice(top_k, hidden=hidden, inner=inner)
        for name, top_k, hidden, inner in (
            ("qwen3-30b", 8, 2048, 768),
            ("qwen3.5", 8, 2048, 512),
            ("kimi-linear", 8, 2304, 1024),
            ("v2-lite", 6, 2048, 1408),
            ("mixtral", 2, 4096, 14336),
            ("kimi-k2", 8, 7168, 2048),
            ("odd", 8, 2048, 40),
        )
    }
    assert {name for name, tile in cut.items() if tile is None} == {"mixtral", "kimi-k2", "odd"}
    assert {name: (tile.columns, tile.stages) for name, tile in cut.items() if tile is not None} == {
        "qwen3-30b": (32, 5),
        "qwen3.5": (16, 9 if LARGER_VIEWS else 5),
        "kimi-linear": (32, 4),
        "v2-lite": (32, 5),
    }


def test_wrong_choices_are_refused() -> None:
    layer = Layer(16, 64, 32, replace(SOFTMAX, top_k=3), False, FP32, exact=True)
    good = layer.choice()

    def run(choice: TokenChoice, ids: torch.Tensor) -> None:
        ops.grouped_gemm(layer.x, layer.gate_up, layer.down, layer.pairs(ids, choice), top_k=3)

    with pytest.raises(ValueError, match=r"logits .*\[1, 15\].* expected a row of 16"):
        run(replace(good, logits=layer.logits[:, :15]), good.ids)
    with pytest.raises(ValueError, match=r"a choice of 4 into .*\[1, 3\], expected \[1, 3\]"):
        run(replace(good, rule=replace(good.rule, top_k=4)), good.ids)
    with pytest.raises(ValueError, match=r"bias float64 \[16\], expected float32 \[16\]"):
        run(replace(good, bias=layer.logits[0].double()), good.ids)
    with pytest.raises(
        ValueError, match=r"counts int64 \[16\], entries None, expected \(counts is None\) == \(entries is None\)"
    ):
        run(replace(good, counts=layer.counts), good.ids)
    with pytest.raises(ValueError, match="writes the pairs' own topk_ids"):
        run(good, good.ids.clone())
    shared = SharedRow(gate_up=layer.row, down=layer.shared, out=torch.empty_like(layer.x))
    for wrong, said in (
        (replace(shared, down=layer.shared[:32]), r"a shared down .*\[32, 32\] for x"),
        (replace(shared, gate_up=layer.row[:, :32]), r"a shared gate_up .*\[1, 32\] for down"),
        (replace(shared, out=layer.x.float()), "a shared out"),
    ):
        with pytest.raises(ValueError, match=said):
            run(replace(good, shared=wrong), good.ids)
    with pytest.raises(ValueError, match="weights"):
        run(replace(good, weights=good.weights.double()), good.ids)
