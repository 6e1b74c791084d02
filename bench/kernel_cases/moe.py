"""The routed experts: the layout of a step's pairs, both products over it, and both for few pairs without one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import ModelStep
from moeyard_kernels import ops
from moeyard_kernels.elementwise import silu_mul
from moeyard_kernels.experts import expert_layout, grouped_gemm, topk_gate
from moeyard_kernels.experts.grouped_configs import slices_of_choice
from moeyard_kernels.linear import linear
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, expert_block_rows
from moeyard_kernels.types.gate import GateRule, SharedRow, TokenChoice

OPS = ("expert_layout", "grouped_gemm")
TOP_K = 8
# Name, experts, hidden size, intermediate size of an expert.
MODELS = (("Qwen3-30B-A3B", 128, 2048, 768), ("Kimi-Linear", 256, 2304, 1024))
_RULES = MappingProxyType(
    {
        "Qwen3-30B-A3B": GateRule(top_k=TOP_K, scoring="softmax", renormalize=True),
        "Kimi-Linear": GateRule(top_k=TOP_K, scoring="sigmoid", renormalize=True, scaling=2.446),
    }
)


def cases() -> Iterator[Case]:
    """Yield layouts, then each model's experts at 1 to 64 decode rows and at prompts."""
    for num_tokens, num_experts in ((64, 128), (64, 256), (64, 384), (4096, 128), (32768, 128)):
        yield _layout_case(num_tokens, num_experts)
    for name, num_experts, hidden, inner in MODELS:
        weights = _normal(num_experts, 2 * inner, hidden), _normal(num_experts, hidden, inner)
        for num_tokens in (1, 8, 64, 1024, 4096, 8192):
            yield from _expert_cases(f"{name} T={num_tokens}", num_tokens, *weights)
        for num_tokens in (1, 2, 4, 8):
            yield _few_case(f"{name} T={num_tokens}", num_tokens, *weights)
        kind = torch.float32 if name == "Kimi-Linear" else torch.bfloat16
        yield _choice_case(name, _RULES[name], kind, *weights)
        if name == "Kimi-Linear":
            yield _choice_case(name, _RULES[name], kind, *weights, shared=True)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield each model's experts as a step has them, for few pairs without a layout.

    If ranks share the experts, the case is one rank. It has as many pairs as the tokens of all ranks choose among its
    experts.
    """
    for model in models:
        top_k, here = model.rule.top_k, model.num_experts // model.ranks
        weights = _normal(here, 2 * model.inner, model.hidden), _normal(here, model.hidden, model.inner)
        spread = f", 1 of {model.ranks} ranks" if model.ranks > 1 else ""
        for num_tokens in rows:
            shape = f"{model.name}{spread} T={num_tokens}"
            if num_tokens * top_k <= FEW_PAIRS:
                yield _few_case(shape, num_tokens, *weights, top_k)
            else:
                yield _layout_case(num_tokens, here, top_k, of=f"{model.name}: ")
            yield from _expert_cases(shape, num_tokens, *weights, top_k, judged=model.name == "Qwen3-30B-A3B")
        cut = slices_of_choice(top_k, hidden=model.hidden, inner=model.inner)
        if 1 in rows and model.ranks == 1 and cut is not None and model.shared in (0, model.inner):
            kind = torch.float32 if model.fp32_logits else torch.bfloat16
            yield _choice_case(model.name, model.rule, kind, *weights, shared=model.shared > 0)


def _normal(*shape: int) -> torch.Tensor:
    """Return standard normal activations, or weights scaled to keep variance (three dimensions)."""
    std = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, std)


def _route(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Return [T, top_k] int64 on the GPU: random distinct experts per token, the same in every run of the bench."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    return torch.rand(num_tokens, num_experts, device="cuda", generator=generator).argsort(1)[:, :top_k].contiguous()


def _slots(num_experts: int) -> torch.Tensor:
    """Return a map of every expert to the slot of its own number."""
    return torch.arange(num_experts, dtype=torch.int32, device="cuda")


def _lay_out(topk_ids: torch.Tensor, slots: torch.Tensor, block_rows: int | None = None) -> ExpertLayout:
    num_slots = len(slots)
    block_rows = block_rows or expert_block_rows(topk_ids.numel(), num_slots)
    return expert_layout.expert_layout(topk_ids, slots, num_slots=num_slots, block_rows=block_rows)


def _sort_chain(topk_ids: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    in_order, pairs = torch.sort(slots[topk_ids.flatten()], stable=True)
    return pairs, torch.searchsorted(in_order, slots)


def _layout_case(num_tokens: int, num_experts: int, top_k: int = TOP_K, *, of: str = "") -> Case:
    topk_ids = _route(num_tokens, num_experts, top_k)
    slots = _slots(num_experts)
    num_pairs = topk_ids.numel()
    block_rows = expert_block_rows(num_pairs, num_experts)

    def prove() -> None:
        got = _lay_out(topk_ids, slots)
        wanted = ops.expert_layout.reference(topk_ids.cpu(), slots.cpu(), num_slots=num_experts, block_rows=block_rows)
        used = int(wanted.num_blocks)
        assert_bits("num_blocks", got.num_blocks.cpu(), wanted.num_blocks)
        assert_bits("counts", got.counts.cpu(), wanted.counts)
        assert_bits("slot_of_block", got.slot_of_block[:used].cpu(), wanted.slot_of_block[:used])
        assert_bits("pairs", got.pairs[: used * block_rows].cpu(), wanted.pairs[: used * block_rows])

    return Case(
        op="expert_layout",
        shape=f"{of}{num_pairs} rows, E={num_experts}",
        run=partial(_lay_out, topk_ids, slots),
        prove=prove,
        num_bytes=num_pairs * 12 + num_experts * 8,
        target=Target("us", 6) if num_pairs == 512 and not of else None,
        baseline=partial(_sort_chain, topk_ids, slots),
        baseline_name="torch sort, no padding",
        early=False,
    )


def _laid_out(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return grouped_gemm.grouped_gemm(x, gate_up, down, _lay_out(topk_ids, slots), top_k=topk_ids.shape[1])


def _few_case(shape: str, num_tokens: int, gate_up: torch.Tensor, down: torch.Tensor, top_k: int = TOP_K) -> Case:
    """Compare experts without a layout with the layout's launch and the products over it."""
    num_slots, hidden, inner = down.shape
    x, topk_ids, slots = _normal(num_tokens, hidden), _route(num_tokens, num_slots, top_k), _slots(num_slots)
    pairs = ExpertPairs(topk_ids=topk_ids, slot_of_expert=slots, num_slots=num_slots)
    assert pairs.num_pairs <= FEW_PAIRS
    run = partial(grouped_gemm.grouped_gemm, x, gate_up, down, pairs, top_k=top_k)
    chain = partial(_laid_out, x, gate_up, down, topk_ids, slots)
    active = int((_lay_out(topk_ids, slots).counts > 0).sum())

    def prove() -> None:
        assert_bits("over a layout", run(), chain())

    return Case(
        op="grouped_gemm",
        shape=f"{shape}, {active} experts, no layout",
        run=run,
        prove=prove,
        num_bytes=active * 6 * inner * hidden,
        num_flops=topk_ids.numel() * 6 * inner * hidden,
        target=Target("speedup", 1.0),
        baseline=chain,
        baseline_name="expert_layout, grouped_gemm",
        early=False,
    )


def _chosen_within(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    rule: GateRule,
    counts: torch.Tensor,
    entries: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    weights, ids = (logits.new_empty(1, rule.top_k, dtype=d) for d in (torch.float32, torch.int64))
    counted = {"counts": counts, "entries": entries}
    beside = None if shared is None else SharedRow(gate_up=shared[0], down=shared[1], out=torch.empty_like(x))
    choice = TokenChoice(rule=rule, logits=logits, bias=bias, weights=weights, ids=ids, shared=beside, **counted)
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=len(slots), choice=choice)
    results = weights, ids, grouped_gemm.grouped_gemm(x, gate_up, down, pairs, top_k=rule.top_k)
    return results if beside is None else (*results, beside.out)


def _chosen_ahead(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    rule: GateRule,
    counts: torch.Tensor,
    entries: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    weights, ids = topk_gate.topk_gate(logits, **asdict(rule), bias=bias, counts=counts, entries=entries)
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=len(slots))
    results = weights, ids, grouped_gemm.grouped_gemm(x, gate_up, down, pairs, top_k=rule.top_k)
    if shared is None:
        return results
    rows = silu_mul.silu_mul(shared[0].to(x.dtype))
    return *results, linear.linear(rows, shared[1], static_weight=True)


def _choice_case(
    name: str, rule: GateRule, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor, *, shared: bool = False
) -> Case:
    """Compare one token's experts with their choice to the choice's launch and the products. dtype: of the logits.

    shared: a shared expert's second product is computed with them, and follows them in the chain.
    """
    num_slots, hidden, inner = down.shape
    logits = torch.randn(1, num_slots, device="cuda").to(dtype)
    bias = torch.randn(num_slots, device="cuda") * 0.1 if rule.scoring == "sigmoid" else None
    counts, entries = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (num_slots, 1))
    arguments: tuple[Any, ...] = (_normal(1, hidden), gate_up, down, logits, bias, _slots(num_slots), rule)
    beside = (torch.randn(1, 2 * inner, device="cuda").to(dtype), _normal(1, hidden, inner)[0]) if shared else None
    arguments += (counts, entries, beside)
    run, chain = partial(_chosen_within, *arguments), partial(_chosen_ahead, *arguments)

    def prove() -> None:
        assert_bits("chosen ahead", run(), chain())

    return Case(
        op="grouped_gemm",
        shape=f"{name} T=1, {rule.top_k} experts and their choice" + (", beside a shared one" if shared else ""),
        run=run,
        prove=prove,
        num_bytes=(rule.top_k * 6 + 2 * shared) * inner * hidden,
        num_flops=(rule.top_k * 6 + 2 * shared) * inner * hidden,
        target=Target("speedup", 1.0),
        baseline=chain,
        baseline_name="topk_gate, grouped_gemm" + (", silu_mul, linear" if shared else ""),
        early=False,
    )


def _grouped_mm_chain(
    in_order: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    first, second = F.grouped_mm(in_order, gate_up.mT, offs=ends).chunk(2, dim=1)
    return F.grouped_mm(F.silu(first) * second, down.mT, offs=ends)


def _expert_cases(
    shape: str, num_tokens: int, gate_up: torch.Tensor, down: torch.Tensor, top_k: int = TOP_K, *, judged: bool = True
) -> Iterator[Case]:
    """Yield the op, then each of its launches with the configs to choose from."""
    num_slots, hidden, inner = down.shape
    x, topk_ids, slots = _normal(num_tokens, hidden), _route(num_tokens, num_slots, top_k), _slots(num_slots)
    layout = _lay_out(topk_ids, slots)
    num_pairs = topk_ids.numel()
    active = int((layout.counts > 0).sum())
    h, out = x.new_empty(layout.pairs.shape[0], inner), x.new_empty(num_pairs, hidden)

    def of(x: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return grouped_gemm.grouped_gemm(x, gate_up, down, layout, top_k=top_k)

    def prove() -> None:
        whole = of(x, layout)
        for block_rows in (16, 64, 128):
            assert_bits(f"blocks of {block_rows}", of(x, _lay_out(topk_ids, slots, block_rows)), whole)
        for t in (0, num_tokens - 1):
            one = of(x[t : t + 1], _lay_out(topk_ids[t : t + 1].contiguous(), slots))
            assert_bits(f"token {t} alone", one, whole[t * top_k : (t + 1) * top_k])

    order = topk_ids.flatten().argsort(stable=True)
    in_order = x[order // top_k]
    ends = layout.counts.cumsum(0).int()
    step_bytes = {"gate_up": active * 2 * inner * hidden * 2, "down": active * hidden * inner * 2}
    step_flops = {"gate_up": num_pairs * 4 * inner * hidden, "down": num_pairs * 2 * inner * hidden}
    targets = (
        {}
        if not judged
        else {1: Target("copy", 0.7), 8: Target("copy", 0.85), 64: Target("copy", 0.85), 4096: Target("speedup", 1.25)}
    )
    yield Case(
        op="grouped_gemm",
        shape=f"{shape}, {active} experts",
        run=partial(grouped_gemm.grouped_gemm, x, gate_up, down, layout, top_k=top_k),
        prove=prove,
        num_bytes=sum(step_bytes.values()),
        num_flops=sum(step_flops.values()),
        # The project's target for prompts of Qwen3-30B-A3B.
        target=Target("tflops", 600) if (num_tokens, inner) == (8192, 768) else targets.get(num_tokens),
        baseline=partial(_grouped_mm_chain, in_order, gate_up, down, ends),
        baseline_name="torch grouped_mm",
    )

    launches = {
        "gate_up": partial(grouped_gemm.gate_up_rows, x, gate_up, layout, top_k=top_k, out=h),
        "down": partial(grouped_gemm.down_pairs, h, down, layout, out=out),
    }

    def prove_steps() -> None:
        prove()
        launches["gate_up"]()
        assert_bits("launch by launch", launches["down"](), of(x, layout))

    # The second launch needs these rows. Without them it would multiply uninitialised memory.
    launches["gate_up"]()
    for step, num_out, dim in (("gate_up", inner, hidden), ("down", hidden, inner)):
        name = grouped_gemm.shape_class(step, layout, num_out, dim)
        yield Case(
            op="grouped_gemm",
            shape=f"{shape}, {step}",
            run=launches[step],
            prove=prove_steps,
            num_bytes=step_bytes[step],
            num_flops=step_flops[step],
            variants=[
                (config, partial(launches[step], config=config))
                for config in grouped_gemm.candidates(step, layout.block_rows, x.dtype)
            ],
            tune_key=("grouped_gemm", name),
        )
