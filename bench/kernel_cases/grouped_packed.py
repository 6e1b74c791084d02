"""The routed experts over tiled codes, beside the same experts in bf16."""

from collections.abc import Iterator
from functools import partial
from types import MappingProxyType

import torch

from kernel_cases.case import Case, Target, assert_bits
from moeyard_kernels.experts import expert_layout, grouped_gemm, grouped_packed, topk_gate
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs, expert_block_rows
from moeyard_kernels.types.gate import GateRule, TokenChoice
from moeyard_kernels.types.matrix import Matrix, dequantize
from moeyard_kernels.types.weight_form import WeightForm, fp4_tiles, fp8_tiles, int4_tiles

OPS = ("grouped_gemm_packed",)
TOP_K = 8
# Qwen3-30B-A3B: experts, hidden size, intermediate size of an expert.
_EXPERTS, _HIDDEN, _INNER = 128, 2048, 768
_RULE = GateRule(top_k=TOP_K, scoring="softmax", renormalize=True)
FORMS = MappingProxyType(
    {
        "fp8": fp8_tiles(128, 128, scales="bfloat16"),
        "fp8, fp32 scales": fp8_tiles(128, 128),
        "int4 g128": int4_tiles(128, scales="bfloat16", zeros=False),
        "fp4": fp4_tiles(32),
        "int4 g32, zeros": int4_tiles(32, scales="float32", zeros=True),
    }
)


def random_stack(form: WeightForm, count: int, *, matrices: int, rows: int, columns: int) -> Matrix:
    """Return `count` stacks of `matrices` matrices [rows, columns], on the GPU, with random codes of every value."""
    arrays = []
    for part in form.parts:
        shape = (count, *part.tiled_shape(matrices, rows, columns))
        if part.name == "codes":
            array = torch.randint(-32768, 32768, shape, dtype=torch.int16, device="cuda")
            if form.name == "fp8" and form.parts[1].dtype == "bfloat16":
                # A code is NaN if all its bits but the sign are set. The masks have these bits of both slices.
                for mask in (0x07F0, 0x700F):
                    array = torch.where(array & mask == mask, array & ~0x0010 & ~0x0001, array)
            elif form.name == "fp8":
                # A code of which all bits but the sign are set is NaN.
                array = torch.where((array & 0x7F == 0x7F) | (array & 0x7F00 == 0x7F00), 0x3838, array)
        elif form.name == "fp4":
            array = torch.randint(116, 121, shape, dtype=torch.uint8, device="cuda")
        elif part.name == "zeros":
            array = torch.randint(0, 17, shape, dtype=torch.uint8, device="cuda")
        else:
            array = torch.rand(shape, device="cuda") + 0.5
            array = (array * (1e-4 if form.name == "fp8" else 4e-3)).to(getattr(torch, part.dtype))
        arrays.append(array)
    return Matrix(form, (count, matrices * rows, columns), tuple(arrays))


def values(stack: Matrix) -> torch.Tensor:
    """Return the bf16 values [S, N, K] of a stack."""
    return torch.stack([dequantize(stack[i]) for i in range(stack.shape[0])])


def cases() -> Iterator[Case]:
    """Yield each form at 1, 8 and 64 decode rows and at prompts."""
    for name, form in FORMS.items():
        gate_up = random_stack(form, _EXPERTS, matrices=2, rows=_INNER, columns=_HIDDEN)
        down = random_stack(form, _EXPERTS, matrices=1, rows=_HIDDEN, columns=_INNER)
        plain = values(gate_up), values(down)
        for num_tokens in (1, 8, 64, 8192):
            yield _case(name, num_tokens, gate_up, down, plain)
        yield _choice_case(name, gate_up, down)


def _case(name: str, num_tokens: int, gate_up: Matrix, down: Matrix, plain: tuple[torch.Tensor, torch.Tensor]) -> Case:
    x = torch.empty(num_tokens, _HIDDEN, dtype=torch.bfloat16, device="cuda").normal_()
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    ids = torch.rand(num_tokens, _EXPERTS, device="cuda", generator=generator).argsort(1)[:, :TOP_K].contiguous()
    slots = torch.arange(_EXPERTS, dtype=torch.int32, device="cuda")
    layout: ExpertLayout | ExpertPairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=_EXPERTS)
    rows = expert_block_rows(ids.numel(), _EXPERTS)
    laid_out = expert_layout.expert_layout(ids, slots, num_slots=_EXPERTS, block_rows=rows)
    if num_tokens > 8:
        layout = laid_out
    active = int((laid_out.counts > 0).sum())
    run = partial(grouped_packed.grouped_gemm_packed, x, gate_up, down, layout, top_k=TOP_K)
    baseline = partial(grouped_gemm.grouped_gemm, x, *plain, layout, top_k=TOP_K)

    def prove() -> None:
        assert_bits("values in bf16", run(), baseline())

    decodes = num_tokens <= 64
    return Case(
        op="grouped_gemm_packed",
        shape=f"Qwen3-30B-A3B {name} T={num_tokens}, {active} experts",
        run=run,
        prove=prove,
        num_bytes=active * sum(array[0].nbytes for array in (*gate_up.arrays, *down.arrays)),
        num_flops=ids.numel() * 6 * _INNER * _HIDDEN,
        target=Target("speedup", 1.0) if decodes else None,
        baseline=baseline,
        baseline_name="grouped_gemm in bf16",
        early=False,
    )


def _chosen(
    x: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    entries: torch.Tensor,
    *,
    ahead: bool,
) -> tuple[torch.Tensor, ...]:
    """Return weights, ids and results of one token. ahead: the choice has a launch of its own."""
    weights, ids = (logits.new_empty(1, TOP_K, dtype=d) for d in (torch.float32, torch.int64))
    choice = TokenChoice(rule=_RULE, logits=logits, bias=None, weights=weights, ids=ids, counts=counts, entries=entries)
    if ahead:
        topk_gate.make_choice(choice)
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slots, num_slots=len(slots), choice=None if ahead else choice)
    return weights, ids, grouped_packed.grouped_gemm_packed(x, gate_up, down, pairs, top_k=TOP_K)


def _choice_case(name: str, gate_up: Matrix, down: Matrix) -> Case:
    """Return one token's experts with their choice, beside the choice's launch and the products."""
    x = torch.empty(1, _HIDDEN, dtype=torch.bfloat16, device="cuda").normal_()
    logits = torch.randn(1, _EXPERTS, device="cuda").bfloat16()
    counts, entries = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (_EXPERTS, 1))
    slots = torch.arange(_EXPERTS, dtype=torch.int32, device="cuda")
    arguments = x, gate_up, down, logits, slots, counts, entries
    run, chain = (partial(_chosen, *arguments, ahead=ahead) for ahead in (False, True))

    def prove() -> None:
        assert_bits("chosen ahead", run(), chain())

    return Case(
        op="grouped_gemm_packed",
        shape=f"Qwen3-30B-A3B {name} T=1, {TOP_K} experts and their choice",
        run=run,
        prove=prove,
        num_bytes=TOP_K * sum(array[0].nbytes for array in (*gate_up.arrays, *down.arrays)),
        num_flops=TOP_K * 6 * _INNER * _HIDDEN,
        target=Target("speedup", 1.0),
        baseline=chain,
        baseline_name="chosen ahead",
        early=False,
    )
