"""Products over tiled codes have the bits of products over their bf16 values, for every form and number of rows."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases.grouped_packed import random_stack, values
from tests.checkpoints import make_checkpoint
from tests.quantised import TILED, make_pair
from tests.rank import Rank

from moeyard_kernels import ops
from moeyard_kernels.linear import linear_packed
from moeyard_kernels.types.expert_layout import ExpertPairs
from moeyard_kernels.types.gate import GateRule, TokenChoice
from moeyard_kernels.types.matrix import dequantize
from moeyard_kernels.types.weight_form import WeightForm, fp4_tiles, fp8_tiles, int4_tiles
from moeyard_worker.protocol import SamplingParams

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FORMS = {
    "fp8 blocks": fp8_tiles(128, 128, scales="bfloat16"),
    "fp8 blocks, fp32 scales": fp8_tiles(128, 128),
    "fp8 blocks of 64 rows": fp8_tiles(64, 128),
    "fp8 rows": fp8_tiles(1, None),
    "fp8 rows, bf16 scales": fp8_tiles(1, None, scales="bfloat16"),
    "int4 g128": int4_tiles(128, scales="bfloat16", zeros=False),
    "int4 g32": int4_tiles(32, scales="bfloat16", zeros=False),
    "int4 g64, zeros": int4_tiles(64, scales="bfloat16", zeros=True),
    "int4 g128, fp32 scales": int4_tiles(128, scales="float32", zeros=True),
    "fp4": fp4_tiles(32),
    "int4 rows": int4_tiles(None, scales="bfloat16", zeros=False),
}
_DENSE = (
    fp8_tiles(128, 128, scales="bfloat16"),
    fp8_tiles(64, 128),
    fp8_tiles(1, None, scales="bfloat16"),
    fp8_tiles(1, None),
)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (2048, 768), (640, 384)])
def test_experts(name: str, hidden: int, inner: int) -> None:
    """One token, a few tokens without a layout, and layouts of all block sizes, with padding and absent experts."""
    slots, top_k = 12, 4
    gate_up = random_stack(FORMS[name], slots, matrices=2, rows=inner, columns=hidden)
    down = random_stack(FORMS[name], slots, matrices=1, rows=hidden, columns=inner)
    plain = values(gate_up), values(down)
    slot_of = torch.randperm(slots, device=DEVICE).to(torch.int32)
    slot_of[3] = -1
    for num_tokens in (1, 3, 16, 40, 200):
        x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
        ids = torch.stack([torch.randperm(slots, device=DEVICE)[:top_k] for _ in range(num_tokens)])
        ids[num_tokens // 2, 1] = -1
        # A table by token ids may name an expert twice.
        ids[num_tokens // 2, 2] = ids[num_tokens // 2, 3]
        layouts = [
            ops.expert_layout(ids, slot_of, num_slots=slots, block_rows=rows)
            for rows in ((16, 32, 64, 128) if num_tokens > 3 else (16,))
        ]
        if num_tokens <= 16:
            layouts.append(ExpertPairs(topk_ids=ids, slot_of_expert=slot_of, num_slots=slots))
        wanted = torch.zeros(num_tokens * top_k, hidden, dtype=torch.bfloat16, device=DEVICE)
        ops.grouped_gemm(x, *plain, layouts[0], top_k=top_k, out=wanted)
        for layout in layouts:
            out = torch.zeros_like(wanted)
            ops.grouped_gemm_packed(x, gate_up, down, layout, top_k=top_k, out=out)
            assert torch.equal(out, wanted), (num_tokens, type(layout), getattr(layout, "block_rows", 0))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("scoring", "experts"), [("softmax", 128), ("sigmoid", 256), ("softmax", 24)])
def test_choice_within_the_products(name: str, scoring: Any, experts: int) -> None:
    """The products of one token choose its experts with the bits of the gate. Others, such as of 24, choose ahead."""
    hidden, inner, top_k = 512, 256, 6
    gate_up = random_stack(FORMS[name], experts, matrices=2, rows=inner, columns=hidden)
    down = random_stack(FORMS[name], experts, matrices=1, rows=hidden, columns=inner)
    slot_of = torch.randperm(experts, device=DEVICE).to(torch.int32)
    rule = GateRule(top_k=top_k, scoring=scoring, renormalize=True, scaling=2.5)
    bias = torch.randn(experts, device=DEVICE) * 0.1 if scoring == "sigmoid" else None
    counts, entries = torch.zeros(experts, dtype=torch.int64, device=DEVICE), torch.tensor([-1, 3], device=DEVICE)[1:]
    graph = torch.cuda.CUDAGraph()
    x, logits = torch.empty(1, hidden, device=DEVICE).bfloat16(), torch.empty(1, experts, device=DEVICE)
    weights, ids = (torch.empty(1, top_k, dtype=d, device=DEVICE) for d in (torch.float32, torch.int64))
    choice = TokenChoice(rule=rule, logits=logits, bias=bias, weights=weights, ids=ids, counts=counts, entries=entries)
    pairs = ExpertPairs(topk_ids=ids, slot_of_expert=slot_of, num_slots=experts, choice=choice)

    def run() -> torch.Tensor:
        return ops.grouped_gemm_packed(x.clone(), gate_up, down, pairs, top_k=top_k)

    x.normal_()
    run()
    with torch.cuda.graph(graph):
        out = run()
    for turn in range(5):
        x.normal_()
        logits.normal_()
        # Ties: the lowest expert wins.
        logits[:, 1::2] = logits[:, ::2].flip(1)
        if turn == 3:
            slot_of[int(logits.argmax())] = -1
        counts.zero_()
        graph.replay()
        wanted_counts = torch.zeros_like(counts)
        wanted_weights, wanted_ids = ops.topk_gate(
            logits, **asdict(rule), bias=bias, counts=wanted_counts, entries=entries
        )
        here = slot_of[wanted_ids[0]] >= 0
        given = ExpertPairs(topk_ids=wanted_ids, slot_of_expert=slot_of, num_slots=experts)
        wanted = ops.grouped_gemm_packed(x, gate_up, down, given, top_k=top_k)
        assert torch.equal(ids, wanted_ids)
        assert torch.equal(weights, wanted_weights)
        assert torch.equal(counts, wanted_counts)
        assert torch.equal(out[here], wanted[here])


@pytest.mark.parametrize("form", _DENSE, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (5120, 2048), (2112, 7168), (200, 192), (24, 64)])
def test_dense_products(form: WeightForm, rows: int, columns: int) -> None:
    """Few rows in every config, and the values that many rows read."""
    if columns % (form.parts[1].columns or 1):
        form = fp8_tiles(form.parts[1].rows, 64, scales=form.parts[1].dtype)
    weight = random_stack(form, 1, matrices=1, rows=rows, columns=columns)[0]
    plain = dequantize(weight)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(ops.write_values(out, weight), plain)
    bias = torch.randn(rows, device=DEVICE).bfloat16()
    for count in (1, 3, 8, 16, 17, 33, 64, 70):
        x = torch.randn(count, columns, device=DEVICE).bfloat16()
        for given in (None, bias):
            wanted = ops.linear(x, plain, given)
            assert torch.equal(ops.linear_packed(x, weight, given), wanted), count
            for config in linear_packed.CONFIGS:
                if columns // 64 % config.tiles == 0:
                    found = linear_packed.linear_packed(x, weight, given, config=config)
                    assert torch.equal(found, wanted), (count, config)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", TILED)
def test_answers(layout: str, family: str, tmp_path: Path) -> None:
    """Answers over codes are those of the bfloat16 checkpoint, with all experts in slots or a few, captured or not."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    if family == "deepseek_v3":
        sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    make = partial(make_checkpoint, family=family, dtype=torch.bfloat16, **sizes)
    quantised, plain = make_pair(make, tmp_path, layout)
    requests = {
        name: (list(range(1, 1 + length)), SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0))
        for name, length in (("a", 90), ("b", 7), ("c", 40))
    }
    options: dict[str, Any] = {"max_num_seqs": 4, "max_batch_tokens": 128, "max_model_len": 208}

    def answers(directory: Path, **more: Any) -> Any:
        with Rank(directory, device="cuda", **options, **more) as rank:
            return {name: reply.token_ids for name, reply in rank.run(requests)[0].items()}

    wanted = answers(plain)
    assert answers(quantised) == wanted
    assert answers(quantised, expert_slots=5, enforce_eager=True) == wanted
    assert answers(quantised, expert_slots=5, expert_host_store="none") == wanted
    assert answers(quantised, weights="codes") == wanted
    assert answers(quantised, weights="bfloat16") == wanted
