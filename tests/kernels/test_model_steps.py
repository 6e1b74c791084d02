"""The bench's rows of models: sizes match the worker's architectures, and every launch of a step has a row."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases.model_steps import (
    DECODE_ROWS,
    DIM_V,
    MODELS,
    NOPE,
    PROMPT_ROWS,
    ROPE,
    Delta,
    Grouped,
    Latent,
    ModelStep,
)

from moeyard_kernels.types.expert_layout import FEW_PAIRS

# Runs in its own process, which pretends to have a GPU. It prints op and shape of every row.
LIST = """
import json
from triton.runtime.jit import JITFunction
from compile_for_hopper import NoStorage, pretend
from kernel_times import Selection, all_cases

JITFunction.run = lambda *args, **kwargs: None
pretend()
with NoStorage():
    for model in MODELS:
        print(json.dumps([model, [(case.op, case.shape) for case in all_cases(Selection(models=[model]))]]))
"""


def expected(model: ModelStep) -> set[tuple[str, str]]:
    """Return (op, beginning of the row's name) of everything that a step launches."""
    rows = (*DECODE_ROWS, *PROMPT_ROWS)
    found = set()
    for product in model.products:
        for m in {"all": rows, "decode": DECODE_ROWS, "prompts": PROMPT_ROWS}[product.of]:
            found.add(("linear", f"M{m} {product.dim}x{product.num_out}{' fp32 sums' * product.fp32}"))
    top_k, hidden, here = model.rule.top_k, model.hidden, model.num_experts // model.ranks
    spread = f", 1 of {model.ranks} ranks" * (model.ranks > 1)
    for t in rows:
        found.add(("topk_gate", f"T{t} E{model.num_experts} K{top_k} {model.name}"))
        found.add(("grouped_gemm", f"{model.name}{spread} T={t}, "))
        if t * top_k > FEW_PAIRS:
            found.add(("expert_layout", f"{model.name}: {t * top_k} rows, E={here}"))
        found.add(("moe_reduce_add_norm", f"{model.name} T{t} K{top_k} H{hidden}"))
        found |= {("rms_norm", f"T{t} D{hidden}"), ("add_rms_norm", f"T{t} D{hidden}")}
        found |= {("silu_mul", f"T{t} I{width}") for width in (model.shared, model.dense) if width}
        for kind in model.attention:
            found |= attention_rows(kind, t, model)
    return found | {("sample", f"{t}x{model.vocabulary} float32 greedy") for t in DECODE_ROWS}


def attention_rows(kind: Grouped | Latent | Delta, t: int, model: ModelStep) -> set[tuple[str, str]]:
    """Return the rows of one kind of attention at one number of rows."""
    found, decodes = set(), t in DECODE_ROWS
    if isinstance(kind, Grouped):
        heads = f"{kind.heads}/{kind.kv_heads}"
        found.add(("rope_cache_write_gqa", f"T{t} N{heads} D{kind.dim}"))
        found.add(("gqa_decode", f"B{t} Q1 H{heads} L8192") if decodes else prefill(t, heads, kind.dim, kind.dim))
        if kind.gated:
            found.add(("sigmoid_mul", f"T{t} N{kind.heads * kind.dim}"))
        elif decodes:
            found.add(("rope_gqa_decode", f"B{t} H{heads} L192"))
    elif isinstance(kind, Latent):
        found.add(("rope_cache_write_mla", f"T{t} N{kind.heads} Dr64 R512"))
        found.add(
            ("mla_decode", f"B{t} Q1 H{kind.heads} L8192")
            if decodes
            else prefill(t, f"{kind.heads}/{kind.heads}", NOPE + ROPE, DIM_V)
        )
        if decodes:
            found |= {("head_linear", f"{model.name} T{t} H{kind.heads} {part}") for part in ("absorb", "expand")}
        if kind.query_rank:
            found.add(("mla_split_qkv_a_norm", f"T{t} Rq{kind.query_rank} R512 Dr64"))
    else:
        if decodes:
            found.add((kind.op, f"B{t} H{kind.key_heads}/{kind.heads} 128x128 C{kind.channels}"))
        if kind.op == "kda_step":
            found.add(("head_linear", f"{model.name} T{t} gates"))
    return found


def prefill(t: int, heads: str, dim_k: int, dim_v: int) -> tuple[str, str]:
    how = "decompressed" if dim_k != dim_v else "pages"
    return "attn_prefill_varlen", f"T{t} {how}: {heads} heads, {dim_k}/{dim_v}"


@pytest.fixture(scope="module")
def rows() -> dict[str, set[tuple[str, str]]]:
    """The rows of each model, as the bench makes them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    command = [sys.executable, "-c", f"MODELS = {list(MODELS)}\n{LIST}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = dict(map(json.loads, ended.stdout.splitlines()))
    return {name: set(map(tuple, cases)) for name, cases in found.items()}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", MODELS)
def test_every_launch_of_a_step_has_a_row(name: str, rows: dict[str, set[tuple[str, str]]]) -> None:
    lacking = {
        (op, shape)
        for op, shape in expected(MODELS[name])
        if not any(op == other and found.startswith(shape) for other, found in rows[name])
    }
    assert lacking == set()


def test_model_with_other_sizes_is_detected() -> None:
    """A model with another number of experts makes the test above fail."""
    model = MODELS["Mixtral-8x7B"]
    assert expected(replace(model, num_experts=16)) - expected(model)


def test_products_of_a_model() -> None:
    """Qwen3-30B-A3B, by hand: queries, keys and values, their output, the gate, the head."""
    assert {(product.dim, product.num_out, product.of) for product in MODELS["Qwen3-30B-A3B"].products} == {
        (2048, (32 + 2 * 4) * 128, "all"),
        (32 * 128, 2048, "all"),
        (2048, 128, "all"),
        (2048, 151936, "decode"),
    }
