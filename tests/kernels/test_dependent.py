"""Launches that begin before the one ahead has ended give the bits of separate launches."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases.case import assert_bits
from kernel_cases.timing import capture
from tests.kernels.decode_cases import paged
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.dependent import dependent
from moeyard_kernels.experts.grouped_choice import can_choose
from moeyard_kernels.linear import linear
from moeyard_kernels.linear.linear_configs import CONFIGS, LinearConfig, Skinny
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs
from moeyard_kernels.types.gate import GateRule, TokenChoice

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 1024, 256, 16, 4, 6


def rows(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def layer_weights() -> dict[str, torch.Tensor]:
    spread = HIDDEN**-0.5
    return {
        "norm": rows(HIDDEN),
        "up": rows(2 * INNER, HIDDEN, scale=spread),
        "down": rows(HIDDEN, INNER, scale=INNER**-0.5),
        "gate": rows(EXPERTS, HIDDEN, scale=spread),
        "experts_up": rows(EXPERTS, 2 * INNER, HIDDEN, scale=spread),
        "experts_down": rows(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
    }


def chain(
    x: torch.Tensor, layers: list[dict[str, torch.Tensor]], between: Callable[[], None], *, late: bool = False
) -> tuple[torch.Tensor, ...]:
    """Run layers of a model, where each launch reads the results of the last few. Call `between` after every op.

    late: the experts' kernel chooses the experts of the single row.
    """
    slots = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    seen = []

    def done(value):  # type: ignore[no-untyped-def]
        between()
        return value

    for w in layers:
        normed = done(ops.rms_norm(x, w["norm"], 1e-6))
        first, second = done(ops.linear_pair(normed, w["up"][:INNER], w["up"][INNER:], static_weight=True))
        shared = done(ops.silu_mul(torch.cat((first, second), 1)))
        shared = done(ops.linear(shared, w["down"], static_weight=True))
        logits = done(ops.linear(normed, w["gate"], static_weight=True))
        choice = None
        if late:
            weights, ids = (logits.new_empty(1, TOP_K, dtype=dtype) for dtype in (torch.float32, torch.int64))
            rule = GateRule(top_k=TOP_K, scoring="softmax", renormalize=True)
            choice = TokenChoice(rule=rule, logits=logits, bias=None, weights=weights, ids=ids)
            assert can_choose(choice, w["experts_up"], w["experts_down"])
        else:
            weights, ids = done(ops.topk_gate(logits, top_k=TOP_K, scoring="softmax", renormalize=True))
        layout: ExpertLayout | ExpertPairs
        layout = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=EXPERTS, choice=choice)
        if ids.numel() > FEW_PAIRS:
            layout = done(ops.expert_layout(ids, slots, num_slots=EXPERTS, block_rows=16))
        routed = done(ops.grouped_gemm(normed, w["experts_up"], w["experts_down"], layout, top_k=TOP_K))
        routed = done(ops.moe_weighted_reduce(routed.view(len(x), TOP_K, HIDDEN), weights, shared))
        x = done(ops.add_rms_norm(routed, x, w["norm"], 1e-6))[1]
        seen += [weights, ids, x]
    return tuple(seen)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "late"), [(1, False), (1, True), (8, False), (64, False), (500, False)])
def test_chain_of_launches_equals_separate_launches(num_rows: int, late: bool) -> None:
    """For one row the late choice equals the early one."""
    layers = [layer_weights() for _ in range(LAYERS)]
    x = rows(num_rows, HIDDEN)
    results = []
    graph = capture(lambda: results.append(chain(x, layers, lambda: None, late=late)))
    for i in range(20):
        x.copy_(rows(num_rows, HIDDEN))
        wanted = chain(x, layers, torch.cuda.synchronize)
        assert_bits(f"eager {i}", chain(x, layers, lambda: None, late=late), wanted)
        # A launch that does not wait reads this.
        for value in results[-1]:
            value.zero_()
        graph.replay()
        assert_bits(f"replay {i}", results[-1], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 500])
def test_weight_of_the_launch_before_is_complete(num_rows: int) -> None:
    """`static_weight` would promise that no earlier launch writes the weight."""
    x, weight, scale = rows(num_rows, 2048), rows(5120, 2048), rows(5120)
    for config in (None, *linear.configs_for(num_rows)):

        def step(config: LinearConfig | None = config) -> tuple[torch.Tensor, ...]:
            scaled = ops.scale_rows_(weight.clone(), scale)
            return scaled, linear.linear(x, scaled, config=config)

        assert_replays(step, lambda: x.copy_(rows(num_rows, 2048)))


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True], ids=["any", "static"])
@pytest.mark.parametrize("config", [c for c in CONFIGS if isinstance(c, Skinny)], ids=str)
def test_rows_of_the_launch_before_are_complete(config: LinearConfig, static: bool) -> None:
    for num_rows, num_out, dim in ((1, 2112, 7168), (7, 5120, 2048), (64, 520, 1000)):
        x, y, weight = rows(num_rows, dim), rows(num_rows, dim), rows(num_out, dim, scale=dim**-0.5)
        torch.cuda.synchronize()
        assert_bits("alone", linear.linear(x, weight, config=config, static_weight=static), linear.linear(x, weight))

        def step(x: torch.Tensor = x, y: torch.Tensor = y, weight: torch.Tensor = weight) -> tuple[torch.Tensor, ...]:
            total = ops.sigmoid_mul(x, y)
            return total, linear.linear(total, weight, config=config, static_weight=static)

        assert_replays(step, lambda x=x: x.copy_(torch.randn_like(x)))  # type: ignore[misc]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, *(c for c in CONFIGS if isinstance(c, Skinny))], ids=str)
def test_pair_of_static_weights_is_read_early(config: LinearConfig | None) -> None:
    x, y, first, second = rows(5, 2048), rows(5, 2048), rows(520, 2048), rows(300, 2048)
    torch.cuda.synchronize()

    def step() -> tuple[torch.Tensor, ...]:
        total = ops.sigmoid_mul(x, y)
        return total, *linear.linear_pair(total, first, second, config=config, static_weight=True)

    assert_replays(step, lambda: x.copy_(torch.randn_like(x)))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_sequences", "length"), [(64, 2500), (200, 700)], ids=["merged", "one split"])
def test_next_launch_finds_results_of_latent_decode(num_sequences: int, length: int) -> None:
    """Its programs have several items each and trigger the next launch before their last results."""
    lens = [length - i for i in range(num_sequences)]
    held = paged(lens, 64, heads=1, dims=(576,), dtype=torch.bfloat16)
    tables, cache = held.tables(torch.tensor(lens)), held.caches[0][0]
    q, rope = rows(num_sequences, 16, 512), rows(num_sequences, 16, 64)
    weight = rows(64, 16 * 512, scale=0.01)
    torch.cuda.synchronize()

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = ops.mla_decode(q, rope, cache, tables=tables, scale=576**-0.5)
        return out, lse, ops.linear(out.flatten(1), weight, static_weight=True)

    assert_replays(step, lambda: q.copy_(torch.randn_like(q)))


def test_no_launch_options_without_a_gpu() -> None:
    assert dict(dependent(torch.zeros(1))) == {}
