"""The gates against the Hugging Face routers of four families, and the kernel against the reference."""

from functools import partial

import pytest
import torch
from kernel_cases.timing import capture
from tests.kernels.graphs import assert_replays
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moeyard_kernels import ops
from moeyard_kernels.experts import topk_gate as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 32
LONG = partial(torch.zeros, dtype=torch.int64)


def check(router: torch.nn.Module, **gate: object) -> None:
    """Compare `ops.topk_gate` with `router` on 64 random tokens, expert by expert."""
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(64, HIDDEN))
    ours, our_ids = ops.topk_gate(logits.float(), **gate)
    assert our_ids.dtype == torch.int64
    assert ours.dtype == torch.float32
    num_experts = logits.shape[1]
    dense = torch.zeros(64, num_experts).scatter_(1, ids, weights)
    our_dense = torch.zeros(64, num_experts).scatter_(1, our_ids, ours)
    torch.testing.assert_close(our_dense, dense, rtol=1e-6, atol=1e-8)
    assert torch.equal(our_ids.sort(-1).values, ids.sort(-1).values)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (5, 5), (3, 1)], ids=lambda n: str(n))
def test_mixtral(num_experts: int, top_k: int) -> None:
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=num_experts, num_experts_per_tok=top_k)
    check(MixtralTopKRouter(config), top_k=top_k, scoring="softmax", renormalize=True)


@pytest.mark.parametrize("renormalize", [False, True])
def test_qwen3_moe(renormalize: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=60, num_experts_per_tok=8, norm_topk_prob=renormalize)
    check(Qwen3MoeTopKRouter(config), top_k=8, scoring="softmax", renormalize=renormalize)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        n_routed_experts=24,
        num_experts_per_tok=6,
        topk_method=method,
        n_group=6,
        topk_group=3,
        routed_scaling_factor=16.0,
    )
    groups = {} if method == "greedy" else {"num_groups": 6, "topk_groups": 3}
    check(DeepseekV2TopkRouter(config), top_k=6, scoring="softmax", renormalize=False, scaling=16.0, **groups)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (8, 8)], ids=lambda n: str(n))
def test_deepseek_v3(num_groups: int, topk_groups: int, renormalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=32,
        num_experts_per_tok=6,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(torch.randn(32) * 0.2)
    check(
        router,
        top_k=6,
        scoring="sigmoid",
        renormalize=renormalize,
        bias=router.e_score_correction_bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score="top2sum",
        scaling=2.5,
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_descending_order_and_lowest_id_among_equals(scoring: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, -1.0, 0.0]]).repeat(33, 1)
    _, ids = ops.topk_gate(logits, top_k=6, scoring=scoring, renormalize=False)
    assert ids.tolist() == [[1, 3, 5, 2, 4, 0]] * 33
    _, ids = ops.topk_gate(
        torch.zeros(4, 8),
        top_k=3,
        scoring=scoring,
        renormalize=False,
        num_groups=4,
        topk_groups=2,
        group_score="top2sum",
    )
    assert ids.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [5, 16, 33, 256])
def test_rows_are_independent(num_experts: int, scoring: str) -> None:
    logits, bias = torch.randn(50, num_experts) * 3, torch.randn(num_experts)
    gate = {"top_k": 4, "scoring": scoring, "renormalize": True, "bias": bias}
    weights, ids = ops.topk_gate(logits, **gate)
    for count in (1, 2, 3, 17, 49):
        for start in (0, 50 - count):
            part, part_ids = ops.topk_gate(logits[start : start + count].clone(), **gate)
            assert torch.equal(part, weights[start : start + count])
            assert torch.equal(part_ids, ids[start : start + count])
    assert ops.topk_gate(logits[:0], **gate)[1].shape == (0, 4)


def run_kernel(logits: torch.Tensor, **gate: object) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in gate.items()}
    logits = logits.to(DEVICE)
    weights, ids = triton_kernel.topk_gate(logits, **on_device)
    return weights.cpu(), ids.cpu()


GATES = {
    "mixtral": (8, {"top_k": 2, "scoring": "softmax", "renormalize": True}),
    "qwen3": (60, {"top_k": 8, "scoring": "softmax", "renormalize": True}),
    "v2-lite": (33, {"top_k": 5, "scoring": "softmax", "renormalize": False}),
    "v2": (
        40,
        {"top_k": 6, "scoring": "softmax", "renormalize": False, "scaling": 16.0, "num_groups": 8, "topk_groups": 3},
    ),
    "kimi": (384, {"top_k": 8, "scoring": "sigmoid", "renormalize": True, "scaling": 2.5}),
    "v3": (
        64,
        {
            **{"top_k": 8, "scoring": "sigmoid", "renormalize": True, "scaling": 2.5},
            **{"num_groups": 8, "topk_groups": 4, "group_score": "top2sum"},
        },
    ),
    "all": (5, {"top_k": 5, "scoring": "sigmoid", "renormalize": False}),
    "v4": (256, {"top_k": 6, "scoring": "sqrtsoftplus", "renormalize": True, "scaling": 1.5}),
}


@pytest.mark.parametrize("name", GATES)
def test_rows_may_be_slices_of_wider_ones(name: str) -> None:
    """Another logit of each row, which must have no effect, follows those of the experts."""
    num_experts, gate = GATES[name]
    wide = (torch.randn(6, num_experts + 3) * 3).to(DEVICE)
    for rows in (wide, wide.bfloat16(), wide[:0]):
        for run, given in ((run_kernel, rows), (ops.topk_gate, rows.cpu())):
            part = given[:, :num_experts]
            assert part.numel() == 0 or not part.is_contiguous()
            for got, wanted in zip(run(part, **gate), run(part.contiguous(), **gate), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", GATES)
def test_kernel_agrees_with_the_reference(name: str) -> None:
    num_experts, gate = GATES[name]
    if gate["scoring"] != "softmax":
        gate = {**gate, "bias": torch.randn(num_experts) * 0.2}
    logits = torch.randn(6 if DEVICE == "cpu" else 4096, num_experts) * 3
    weights, ids = run_kernel(logits, **gate)
    wanted, wanted_ids = ops.topk_gate(logits, **gate)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-30)
    for t in (0, 5):
        part, part_ids = run_kernel(logits[t : t + 1].clone(), **gate)
        assert torch.equal(part, weights[t : t + 1])
        assert torch.equal(part_ids, ids[t : t + 1])
    assert run_kernel(logits[:0], **gate)[1].shape == (0, gate["top_k"])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_kernel_takes_the_lowest_id_among_equals(scoring: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, -1.0, 0.0]])
    gate = {"scoring": scoring, "renormalize": False}
    assert run_kernel(logits, top_k=6, **gate)[1].tolist() == [[1, 3, 5, 2, 4, 0]]
    groups = {"num_groups": 4, "topk_groups": 2}
    for group_score in ("max", "top2sum"):
        _, ids = run_kernel(torch.zeros(1, 8), top_k=3, **gate, **groups, group_score=group_score)
        assert ids.tolist() == [[0, 1, 2]]
    # Scores underflow, and a bias reverses their order.
    logits = torch.tensor([[80.0, -80.0, -70.0, 0.0, -80.0]])
    bias = torch.tensor([-3.0, 0.5, 0.5, -0.5, 0.5])
    for chosen in ({}, {"bias": bias}):
        gate = {"top_k": 4, "scoring": scoring, "renormalize": False, **chosen}
        assert torch.equal(run_kernel(logits, **gate)[1], ops.topk_gate(logits, **gate)[1])


def test_scores_of_sqrtsoftplus_are_exact() -> None:
    """Logits range from tiny scores to those where softplus is the logit itself."""
    logits = torch.cat((torch.linspace(-60, 60, 241), torch.linspace(-1, 1, 15)))[None]
    gate = {"top_k": 256, "scoring": "sqrtsoftplus", "renormalize": False}
    weights, ids = run_kernel(logits, **gate)
    exact = torch.nn.functional.softplus(logits.double(), threshold=100).sqrt().gather(1, ids)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", GATES)
def test_given_ids_get_weights_and_are_counted(name: str) -> None:
    """The ids that a gate chooses have its weights; others have their scores."""
    num_experts, gate = GATES[name]
    logits, entries = torch.randn(100, num_experts) * 3, [3, -1, 0, 7, 9] * 20
    weights, ids = run_kernel(logits, **gate)
    assert torch.equal(run_kernel(logits, **gate, ids=ids)[0], weights)
    given = torch.rand(100, num_experts).argsort(1)[:, : gate["top_k"]].contiguous()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=DEVICE)
    weights, same = run_kernel(logits, **gate, ids=given, counts=counts, entries=torch.tensor(entries))
    assert torch.equal(same, given)
    assert torch.equal(counts.cpu(), chosen_by(given, entries, num_experts))
    torch.testing.assert_close(weights, ops.topk_gate(logits, **gate, ids=given)[0], rtol=1e-6, atol=1e-30)
    assert torch.equal(run_kernel(logits[3:4].clone(), **gate, ids=given[3:4])[0], weights[3:4])
    assert run_kernel(logits[:0], **gate, ids=given[:0])[0].shape == (0, gate["top_k"])


@pytest.mark.parametrize("name", ["qwen3", "v2", "v3"])
def test_bf16_logits_equal_the_same_values_in_fp32(name: str) -> None:
    num_experts, gate = GATES[name]
    logits = (torch.randn(3, num_experts) * 3).bfloat16()
    for run in (run_kernel, ops.topk_gate):
        weights, ids = run(logits, **gate)
        wanted, wanted_ids = run(logits.float(), **gate)
        assert torch.equal(weights, wanted)
        assert torch.equal(ids, wanted_ids)


def chosen_by(ids: torch.Tensor, entries: list[int], num_experts: int) -> torch.Tensor:
    """Return [E], counted by hand: the number of stored rows with each expert among their ids."""
    counts = [0] * num_experts
    for row, entry in zip(ids.tolist(), entries, strict=True):
        for expert in row if entry >= 0 else ():
            counts[expert] += 1
    return torch.tensor(counts)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", GATES)
def test_counts_cover_real_rows_and_change_no_bit(name: str) -> None:
    """Two padding rows, three rows with equal choices, and two calls with the same counts. Entry 0 is a valid entry."""
    num_experts, gate = GATES[name]
    if gate["scoring"] == "sigmoid":
        gate = {**gate, "bias": torch.randn(num_experts) * 0.2}
    logits, entries = torch.randn(7, num_experts) * 3, [5, 0, -1, 700, 64, 65, -1]
    logits[4:6] = logits[3]
    for run, device in ((run_kernel, DEVICE), (ops.topk_gate, "cpu")):
        counts, places = torch.zeros(num_experts, dtype=torch.int64, device=device), torch.tensor(entries)
        weights, ids = run(logits, **gate)
        wanted = chosen_by(ids, entries, num_experts)
        assert wanted.max() >= 3
        for times in (1, 2):
            counted = run(logits, **gate, counts=counts, entries=places)
            assert torch.equal(counted[0], weights)
            assert torch.equal(counted[1], ids)
            assert torch.equal(counts.cpu(), times * wanted)
        run(logits, **gate, counts=counts, entries=torch.full((7,), -1))
        run(logits[:0], **gate, counts=counts, entries=places[:0])
        assert torch.equal(counts.cpu(), 2 * wanted)


def test_entries_may_begin_anywhere() -> None:
    """A plan's entries follow its other numbers, and so do rows of a wider product."""
    num_experts, gate = GATES["qwen3"]
    logits, entries = torch.randn(4, num_experts + 1)[:, :num_experts], torch.tensor([-1, 3, -1, 9, 2])
    counts = torch.zeros(num_experts, dtype=torch.int64, device=DEVICE)
    on_device = entries.to(DEVICE)
    _, ids = triton_kernel.topk_gate(logits.to(DEVICE), **gate, counts=counts, entries=on_device[1:])
    assert torch.equal(counts.cpu(), chosen_by(ids.cpu(), entries[1:].tolist(), num_experts))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 500])
def test_graph_counts_in_every_replay(num_tokens: int) -> None:
    logits, counts = torch.randn(num_tokens, 128, device=DEVICE), torch.zeros(128, dtype=torch.int64, device=DEVICE)
    entries, gate = torch.arange(num_tokens, device=DEVICE), GATES["qwen3"][1]
    results = []
    graph = capture(lambda: results.append(ops.topk_gate(logits, **gate, counts=counts, entries=entries)))
    counts.zero_()
    wanted = torch.zeros(128, dtype=torch.int64)
    for replay in range(5):
        logits.normal_()
        entries.copy_(torch.arange(num_tokens) - replay % 2)
        graph.replay()
        wanted += chosen_by(results[-1][1].cpu(), entries.tolist(), 128)
        assert torch.equal(counts.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_graph_replay(num_tokens: int) -> None:
    logits, bias = torch.randn(num_tokens, 256, device=DEVICE), torch.randn(256, device=DEVICE) * 0.2
    grouped = {"num_groups": 8, "topk_groups": 4, "group_score": "top2sum", "scaling": 2.5}

    def step() -> tuple[torch.Tensor, ...]:
        return (
            *ops.topk_gate(logits, top_k=8, scoring="sigmoid", renormalize=True, bias=bias, **grouped),
            *ops.topk_gate(logits, top_k=8, scoring="softmax", renormalize=True),
        )

    assert_replays(step, lambda: (logits.normal_(), bias.normal_()))


def test_bad_arguments_are_named() -> None:
    logits = torch.zeros(2, 8)
    good = {"top_k": 2, "scoring": "softmax", "renormalize": True}
    for change, message in [
        ({"top_k": 9}, r"top_k 9, E 8 of logits float32 \[2, 8\], expected 1 <= top_k <= E"),
        ({"scoring": "tanh"}, r"scoring tanh, expected scoring in \('softmax', 'sigmoid', 'sqrtsoftplus'\)"),
        ({"bias": torch.zeros(7)}, r"bias float32 \[7\], expected float32 \[8\] for logits float32 \[2, 8\]"),
        ({"counts": LONG(8)}, r"counts int64 \[8\], entries None, expected \(counts is None\) == \(entries is None\)"),
        (
            {"counts": LONG(7), "entries": LONG(2)},
            r"counts int64 \[7\], expected int64 \[8\] for logits float32 \[2, 8\]",
        ),
        ({"counts": LONG(8).int(), "entries": LONG(2)}, r"counts int32 \[8\], expected int64 \[8\]"),
        (
            {"counts": LONG(8), "entries": LONG(3)},
            r"entries int64 \[3\], expected int64 \[2\] for logits float32 \[2, 8\]",
        ),
        ({"counts": LONG(8), "entries": LONG(4)[::2]}, r"entries int64 \[2\] with strides \(2,\) is not contiguous"),
        ({"num_groups": 3}, "8 experts in 3 groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups 5 of 4 groups"),
        ({"num_groups": 8, "topk_groups": 1}, "top_k 2 exceeds 1 groups of 1"),
        ({"num_groups": 4, "topk_groups": 2, "group_score": "sum"}, "group_score 'sum' is neither"),
        ({"num_groups": 8, "topk_groups": 4, "group_score": "top2sum"}, "'top2sum' of groups of 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.topk_gate(logits, **(good | change))
    with pytest.raises(ValueError, match=r"logits float16 \[2, 8\], expected float32 or bfloat16 \[T, E\]"):
        ops.topk_gate(logits.half(), **good)
    with pytest.raises(ValueError, match=r"logits float32 \[8, 2\] with strides \(1, 8\) is not contiguous in its"):
        triton_kernel.topk_gate(logits.T, **good)
