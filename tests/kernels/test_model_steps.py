"""The bench's rows of models: sizes are those of the worker's architectures, and no launch of a step lacks a row."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases.model_steps import (
    DECODE_ROWS,
    DELTA_DIM,
    DIM_V,
    MODELS,
    NOPE,
    PROMPT_ROWS,
    RANK,
    ROPE,
    Delta,
    Grouped,
    Latent,
    ModelStep,
    Product,
)

from moeyard_kernels.types.expert_layout import FEW_PAIRS
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.kda import Kda
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.families import FAMILIES
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import shape_model
from moeyard_worker.models.spec import model_spec

# In a process of its own, which comes to believe in a GPU: op and shape of every row.
LIST = """
import json
from triton.runtime.jit import JITFunction
from compile_for_hopper import NoStorage, pretend
from kernel_times import Asked, all_cases

JITFunction.run = lambda *args, **kwargs: None
pretend()
with NoStorage():
    for model in MODELS:
        print(json.dumps([model, [(case.op, case.shape) for case in all_cases(Asked(models=[model]))]]))
"""


def served(name: str) -> ModelConfig:
    """With a layer that drafts, where there is one."""
    found = shape_model(name)
    return found.with_drafts() if found.num_mtp_layers else found


def of_worker(kind: Attention) -> Grouped | Latent | Delta:
    """As the bench has it; what it takes for granted is asserted."""
    if isinstance(kind, Gqa):
        assert (kind.rope is not None, kind.sliding_window, kind.bias, kind.qk_norm) in (
            (True, None, False, "head"),
            (True, None, False, None),
        )
        return Grouped(
            heads=kind.num_heads, kv_heads=kind.num_kv_heads, dim=kind.head_dim, rotated=kind.rope.dim,
            normed=kind.qk_norm is not None, gated=kind.output_gate,
        )  # fmt: skip
    if isinstance(kind, Mla):
        assert (kind.kv_lora_rank, kind.nope_dim, kind.rope_dim, kind.v_dim) == (RANK, NOPE, ROPE, DIM_V)
        interleaved = kind.rope is not None and kind.rope.interleaved
        return Latent(heads=kind.num_heads, query_rank=kind.q_lora_rank or 0, interleaved=interleaved)
    if isinstance(kind, Gdn):
        assert (kind.k_dim, kind.v_dim) == (DELTA_DIM, DELTA_DIM)
        return Delta(op="gdn_step", key_heads=kind.num_k_heads, heads=kind.num_v_heads)
    assert isinstance(kind, Kda)
    assert kind.head_dim == DELTA_DIM
    return Delta(op="kda_step", key_heads=kind.num_heads, heads=kind.num_heads)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_worker_s(name: str) -> None:
    model = served(name)
    dense = len(model.moe_layers) < len(model.attention)
    assert MODELS[name] == ModelStep(
        name=name, hidden=model.hidden_size, vocabulary=model.vocab_size, rule=model.gate.rule, bias=model.gate.bias,
        attention=tuple(map(of_worker, model.attention_kinds())), num_experts=model.num_experts,
        inner=model.moe_intermediate_size, shared=model.shared_intermediate_size, shared_gate=model.shared_gate,
        dense=model.intermediate_size if dense else 0, fp32_logits=model.gate.fp32_logits,
        fp32_norms=FAMILIES[model.family].names.norms_less_one, drafts=model.drafts, ranks=MODELS[name].ranks,
    )  # fmt: skip


def worker_products(name: str) -> set[Product]:
    """From the weights of the model: matrices, the decompression of keys and values, the gate with what it is given."""
    spec = model_spec(served(name), ())
    found = set()
    for layer in spec.layers:
        weights = {**layer.attention, **layer.mlp}
        shared_gate = weights.pop("shared_gate", None)
        for part, weight in weights.items():
            if weight.matrix:
                num_out, dim = weight.shape
                if shared_gate is not None and part == "gate":
                    num_out = -(-(num_out + shared_gate.shape[0]) // 16) * 16
                found.add(Product(dim=dim, num_out=num_out, fp32=weight.fp32))
            elif part == "kv_b":
                found.add(Product(dim=weight.shape[2], num_out=weight.shape[0] * weight.shape[1], of="prompts"))
    if spec.draft is not None:
        found.add(Product(dim=spec.draft.join.shape[1], num_out=spec.draft.join.shape[0]))
    head = spec.lm_head or spec.embed
    return found | {Product(dim=head.shape[1], num_out=head.shape[0], of="decode")}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_the_worker_s(name: str) -> None:
    assert set(MODELS[name].products()) == worker_products(name)


def expected(model: ModelStep) -> set[tuple[str, str]]:
    """(op, beginning of the row's name) of everything that a step launches."""
    rows = (*DECODE_ROWS, *PROMPT_ROWS)
    found = set()
    for product in worker_products(model.name):
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
    """Of one kind of attention at one number of rows."""
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
            ("mla_decode", f"B{t} Q1 H{kind.heads} L8192") if decodes
            else prefill(t, f"{kind.heads}/{kind.heads}", NOPE + ROPE, DIM_V)
        )  # fmt: skip
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
    """Of each model, as the bench makes them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    command = [sys.executable, "-c", f"MODELS = {list(MODELS)}\n{LIST}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = dict(map(json.loads, ended.stdout.splitlines()))
    return {name: set(map(tuple, cases)) for name, cases in found.items()}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", MODELS)
def test_no_launch_of_a_step_lacks_a_row(name: str, rows: dict[str, set[tuple[str, str]]]) -> None:
    lacking = {
        (op, shape) for op, shape in expected(MODELS[name])
        if not any(op == other and found.startswith(shape) for other, found in rows[name])
    }  # fmt: skip
    assert lacking == set()


def test_a_model_of_other_sizes_is_noticed() -> None:
    """What makes these tests fail: another head, another expert, another vocabulary."""
    model = MODELS["Mixtral-8x7B"]
    assert replace(model, vocabulary=32001) != model
    assert set(replace(model, vocabulary=32001).products()) != worker_products("Mixtral-8x7B")
    assert expected(replace(model, num_experts=16)) - expected(model)
