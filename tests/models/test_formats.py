"""Quantised checkpoints are read as the bfloat16 checkpoints that they stand for, or refused by name."""

import json
import random
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_config, make_checkpoint
from tests.quantised import INT4_SCALES, LAYOUTS, PLAIN, SCALES, SMALL, TILED, make_pair, make_served, quantise
from tests.rank import Rank

from moeyard_kernels import ops
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda import footprint
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.types.matrix import ExpertViews, Matrix, blob_views, dequantize, tile_
from moeyard_kernels.types.weight_form import ExpertForm, FormPart, WeightForm, fp8_tiles, int4_tiles, plain_expert
from moeyard_worker.checkpoint.formats.compressed_tensors import PackedInt4Scheme
from moeyard_worker.checkpoint.formats.fp8 import Fp4Scheme, Fp8Scheme
from moeyard_worker.checkpoint.formats.gptq import AwqScheme, GptqScheme
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint, read_through
from moeyard_worker.checkpoint.quantizing import quantize as quantize_values
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.engine.assembly.local import greedy_tokens, runner_of
from moeyard_worker.layers.weights import Part, Weight
from moeyard_worker.models.families import load_model_config, parse_model_config, with_codes
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import SHAPES, served_model, shape_model
from moeyard_worker.models.spec import model_spec
from moeyard_worker.protocol import SamplingParams

FAMILIES = ("deepseek_v3", "qwen3_moe", "qwen3_next", "kimi_linear", "mixtral", "olmoe", "deepseek_v2")


def make(family: str, directory: Path) -> Path:
    return make_checkpoint(directory, family, dtype=torch.bfloat16)


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Return every parameter and expert as the server holds it, by name."""
    checkpoint = open_checkpoint(directory, load_model_config(directory))
    weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
    found = {}
    for weight in checkpoint.spec.dense():
        value = weights.load(weight)
        value = value.data if isinstance(value, Matrix) else value
        found[weight.parts[0].key] = value.to_dense() if value.is_mkldnn else value
    config = checkpoint.spec.config
    form = plain_expert(hidden=config.hidden_size, intermediate=config.moe_intermediate_size, dtype="bfloat16")
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
            weights.fill(layer, expert, views)
            found[f"{layer}.{expert}"] = torch.cat([views.gate_up.data.flatten(), views.down.data.flatten()])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", SMALL)
def test_weights_equal_the_bfloat16_checkpoint(layout: str, family: str, tmp_path: Path) -> None:
    quantised, plain = make_pair(partial(make, family), tmp_path, layout)
    found, wanted = loaded(quantised), loaded(plain)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("layout", dict.fromkeys((*TILED, *SCALES)))
def test_tiles_hold_the_values_of_the_bfloat16_checkpoint(layout: str, tmp_path: Path) -> None:
    """Experts whose codes stay in memory: their bytes are those of the form, and their values the same."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128}
    quantised, plain = make_pair(
        partial(make_checkpoint, family="qwen3_moe", dtype=torch.bfloat16, **sizes), tmp_path, layout
    )
    found = []
    for directory, packed in ((quantised, True), (plain, False)):
        model = load_model_config(directory)
        if packed:
            model = with_codes(model, directory, dense=True)
        form = model.expert_form("bfloat16")
        assert form.gate_up.tiled == form.down.tiled == packed
        if packed and layout in SCALES:
            assert form.gate_up == form.down == fp8_tiles(128, 128, scales=SCALES[layout])
        checkpoint = open_checkpoint(directory, model)
        weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
        views = blob_views(form, torch.full((form.blob_bytes,), 255, dtype=torch.uint8))
        weights.fill(1, 5, views)
        found.append((dequantize(views.gate_up), dequantize(views.down)))
        found.append((torch.cat([dequantize(views.gate), dequantize(views.up)]), dequantize(views.down)))
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("layout", ["fp8-128", "fp8-128-bf16", "ct-fp8", "ct-fp8-tensor", "fp8-tensor", "ct-int4-g32"])
def test_dense_matrices_keep_codes_of_fp8(layout: str, family: str, tmp_path: Path) -> None:
    """Their values, their bytes and their products are those that the bfloat16 checkpoint calls for.

    The heads are small, so that blocks of 128 rows cross the border of keys and values, and of latents in kv_a.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
    sizes |= {"q_lora_rank": 128} if family == "deepseek_v3" else {"num_key_value_heads": 1, "head_dim": 64}
    quantised, plain = make_pair(
        partial(make_checkpoint, family=family, dtype=torch.bfloat16, **sizes), tmp_path, layout
    )
    backend = CudaBackend(page_size=16, device=torch.device("cpu"))
    model = gpu_model(quantised, weights="codes")
    checkpoints = [open_checkpoint(quantised, model), open_checkpoint(plain, load_model_config(plain))]
    coded = set()
    loaders = [CheckpointWeights(each, backend=backend, dtype=torch.bfloat16) for each in checkpoints]
    for one, other in zip(*(each.spec.dense() for each in checkpoints), strict=True):
        found, wanted = loaders[0].load(one), loaders[1].load(other)
        if not one.matrix:
            assert torch.equal(found, wanted)
            continue
        assert torch.equal(dequantize(found), wanted.data), one
        size = sum(array.nbytes for array in found.arrays)
        assert size == checkpoints[0].spec.num_bytes(one, "bfloat16")
        if not found.form.tiled:
            continue
        coded |= {part.key.split(".", 3)[-1] for part in one.parts}
        assert found.scales.dtype == (torch.float32 if layout in ("fp8-128", "fp8-tensor") else torch.bfloat16)
        for count in (1, 64, 65):
            x, bias = torch.randn(count, one.columns).bfloat16(), torch.randn(one.rows).bfloat16()
            assert torch.equal(backend.linear(x, found, bias), backend.linear(x, wanted, bias))
    expected = checkpoints[0].spec.dense_bytes("bfloat16"), checkpoints[1].spec.dense_bytes("bfloat16")
    assert (expected[0] < expected[1]) == bool(coded) == (layout != "ct-int4-g32")
    assert not coded or "self_attn.o_proj.weight" in coded
    if layout.startswith("fp8-128"):
        # Rows of queries end at a block, rows of keys within one.
        assert "self_attn.q_proj.weight" not in coded
        assert ("self_attn.kv_a_proj_with_mqa.weight" in coded) == (family == "deepseek_v3")
    elif coded and family != "qwen3_next":  # it stores queries and gates head by head
        assert coded & {"self_attn.k_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"}
    for weights in ("auto", "bfloat16"):
        without = open_checkpoint(quantised, gpu_model(quantised, weights=weights)).spec
        assert not any(without.form(each, "bfloat16").tiled for each in without.dense())


@pytest.mark.parametrize(
    ("layout", "family"), [("fp8-128", "deepseek_v3"), ("fp8-128", "qwen3_moe"), ("fp8-128-bf16", "qwen3_moe")]
)
def test_answers_over_codes_with_the_backend_of_gpus(layout: str, family: str, tmp_path: Path) -> None:
    """The layers of a GPU over codes of experts, attention, shared experts and a dense MLP, on a CPU."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
    quantised, plain = make_pair(
        partial(make_checkpoint, family=family, dtype=torch.bfloat16, **sizes), tmp_path, layout
    )
    found = []
    for directory, model in ((quantised, gpu_model(quantised, weights="codes")), (plain, load_model_config(plain))):
        checkpoint = open_checkpoint(directory, model)
        backend = CudaBackend(page_size=16, device=torch.device("cpu"))
        weights = CheckpointWeights(checkpoint, backend=backend, dtype=torch.bfloat16)
        sizes = {"num_pages": 8, "num_slots": None, "policy": "slru", "num_state_slots": 0}
        runner = runner_of(weights, checkpoint.spec, backend=backend, dtype=torch.bfloat16, **sizes)
        found.append(greedy_tokens(runner, list(range(1, 80)), 4))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_memory_counts_the_values_of_one_matrix() -> None:
    """DeepSeek-V3's largest matrix of codes is that of a dense MLP, [36864, 7168]."""
    found = {}
    options: dict[str, Any] = {"shape": "DeepSeek-V3", "num_layers": 4, "load_format": "dummy", "device": "cuda"}
    for name in (None, "fp8"):
        config = EngineConfig(model_path=None, **options, quantization=name, weights="codes")
        spec = model_spec(served_model(config), ())
        found[name] = spec.resident_bytes("bfloat16", footprint) - spec.dense_bytes("bfloat16")
    assert found["fp8"] - found[None] == 36864 * 7168 * 2


def gpu_model(directory: Path, **options: Any) -> ModelConfig:
    return served_model(EngineConfig(model_path=str(directory), device="cuda", **options))


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A checkpoint with a layer of multi-token prediction, and sizes that products over codes read."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    return make_checkpoint(tmp_path / "wide", "deepseek_v3", dtype=torch.bfloat16, num_nextn_predict_layers=1, **sizes)


def scales_of(model: ModelConfig) -> str:
    """Return the dtype of the scales of experts in memory."""
    return model.expert_form("bfloat16").gate_up.parts[1].dtype


def test_scales_are_bf16_only_if_all_stored_ones_are(wide: Path, tmp_path: Path) -> None:
    """The headers of all shards decide, and a served model differs in nothing else."""
    quantise(wide, "fp8-128-bf16")
    narrow = gpu_model(wide)
    assert scales_of(narrow) == "bfloat16"
    stored = load_file(wide / "model.safetensors")
    (wide / "model.safetensors").unlink()
    assert scales_of(gpu_model(wide)) == "float32", "the weights are not downloaded yet"
    key = f"{EXPERT}.weight_scale_inv"
    shards = {"a.safetensors": stored, "b.safetensors": {key: stored.pop(key).float()}}
    weight_map = {each: name for name, tensors in shards.items() for each in tensors}
    (wide / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensors in shards.items():
        save_file(tensors, wide / name, metadata={"format": "pt"})
    assert scales_of(gpu_model(wide)) == "float32"
    assert gpu_model(wide) == narrow
    open_checkpoint(wide, narrow)


@pytest.mark.parametrize("layout", INT4_SCALES)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_scales_of_int4_codes_have_any_dtype(layout: str, dtype: str | None, tmp_path: Path) -> None:
    """The headers decide how memory holds them, whatever config.json says of the dtype of the model."""
    pair = make_pair(
        partial(make_checkpoint, family="qwen3_moe", hidden_size=128, moe_intermediate_size=128), tmp_path, layout
    )
    edit_config(pair[0], dtype=dtype)
    found, wanted = (loaded(directory) for directory in pair)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    model = gpu_model(pair[0], dtype="bfloat16")
    assert scales_of(model) == ("bfloat16" if layout == "ct-int4-g32" else "float32")
    form = model.expert_form("bfloat16")
    views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
    checkpoint = open_checkpoint(pair[0], model)
    CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16).fill(1, 3, views)
    held = torch.cat([dequantize(views.gate_up).flatten(), dequantize(views.down).flatten()])
    assert torch.equal(held, wanted["1.3"])


def test_new_scales_that_tiles_of_int4_codes_cannot_hold_are_refused(wide: Path) -> None:
    """The weights of the start have BF16 scales, and others have F32 scales. Those that are bf16 values fit."""
    quantise(wide, "ct-int4-g32")
    model = gpu_model(wide)
    form = model.expert_form("bfloat16")
    views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
    scales = load_file(wide / "model.safetensors")[f"{EXPERT}.weight_scale"].float()

    def fill() -> None:
        change(wide, **{f"{EXPERT}.weight_scale": scales})
        weights = CheckpointWeights(
            open_checkpoint(wide, model), backend=CpuBackend(page_size=16), dtype=torch.bfloat16
        )
        weights.fill(1, 3, views)

    fill()
    scales[0, 1] = 1.001
    with pytest.raises(
        CheckpointError, match=rf"{EXPERT}.weight_scale holds a scale that is no bfloat16 value.*--weights"
    ):
        fill()


@pytest.mark.parametrize(
    ("layout", "code", "scale", "message"),
    [
        ("fp8-128-bf16", 0x7E, 127.5, None),
        (
            "fp8-128-bf16",
            0x7E,
            128.0,
            "weight_scale_inv cannot be put in tiles: a scale of e4m3 codes is no bfloat16 value below 128",
        ),
        (
            "fp8-128-ue8m0",
            0x7E,
            1.001,
            "weight_scale_inv cannot be put in tiles: a scale of e4m3 codes is no bfloat16 value below 128",
        ),
        ("fp8-128", 0xFE, 129.1, None),
    ],
)
def test_values_that_tiles_cannot_hold_are_refused_by_name(
    layout: str, code: int, scale: float, message: str | None, wide: Path
) -> None:
    quantise(wide, layout)
    tensors = load_file(wide / "model.safetensors")
    codes, scales = tensors[f"{EXPERT}.weight"], tensors[f"{EXPERT}.weight_scale_inv"]
    codes.view(torch.uint8)[5, 9] = code
    scales[0, 1] = scale
    change(wide, **{f"{EXPERT}.weight": codes, f"{EXPERT}.weight_scale_inv": scales})
    wanted = (codes.float() * scales.float().repeat_interleave(128, 1)).bfloat16()

    def up(model: ModelConfig) -> torch.Tensor:
        form = model.expert_form("bfloat16")
        views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
        checkpoint = open_checkpoint(wide, model)
        CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16).fill(1, 3, views)
        return dequantize(views.up)

    assert torch.equal(up(gpu_model(wide, weights="bfloat16")), wanted)
    if message is None:
        assert torch.equal(up(gpu_model(wide)), wanted)
    else:
        with pytest.raises(
            CheckpointError,
            match=rf"{wide}/model.safetensors: {EXPERT}.{message}.* serve the checkpoint with --weights bfloat16",
        ):
            up(gpu_model(wide))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "fp8" in name])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_nan_are_refused_by_name(layout: str, code: int, wide: Path) -> None:
    """In matrices that become bfloat16, and in experts and dense matrices that keep their codes."""
    quantise(wide, layout)
    path = wide / "model.safetensors"
    for key in (f"{EXPERT}.weight", "model.layers.0.self_attn.o_proj.weight"):
        before = load_file(path)[key]
        codes = before.clone()
        codes.view(torch.uint8)[-1, 9] = code
        change(wide, **{key: codes})
        for weights in ("bfloat16", "codes"):
            checkpoint = open_checkpoint(wide, gpu_model(wide, weights=weights))
            experts = [(1, 3)] if "experts" in key else []
            with pytest.raises(CheckpointError, match=f"^{path}: {key} holds a code that is NaN"):
                read_through(checkpoint, torch.bfloat16, experts)
        change(wide, **{key: before})
    read_through(open_checkpoint(wide, gpu_model(wide)), torch.bfloat16, [(1, 3)])


@pytest.mark.parametrize("layer", [2, 3], ids=["layer", "draft layer"])
def test_experts_of_different_schemes_become_bfloat16(layer: int, wide: Path) -> None:
    """One form serves all layers. The layer of multi-token prediction counts if it is served."""
    quantise(wide, "fp8-128")
    settings(wide, modules_to_not_convert=[*PLAIN, f"model.layers.{layer}"])
    model = gpu_model(wide)
    assert model.expert_form("bfloat16").gate_up.tiled == (layer == 3)
    assert isinstance(model.weights, QuantizedFormat)
    reason = None if layer == 3 else "config.json gives some of them another scheme or none"
    assert model.weights.decoded == reason
    assert not gpu_model(wide, speculate="mtp").expert_form("bfloat16").gate_up.tiled


@pytest.mark.parametrize("expert", [0, 5])
def test_a_plain_expert_among_codes_is_refused(expert: int, wide: Path) -> None:
    """The settings exclude one expert of a layer."""
    quantise(wide, "fp8-128", excluded=(*PLAIN, f"layers.1.mlp.experts.{expert}.up_proj"))
    model = gpu_model(wide)
    if expert == 0:
        assert not model.expert_form("bfloat16").gate_up.tiled
        return
    with pytest.raises(CheckpointError, match=r"experts.5.up_proj.weight is not stored like .* --weights bfloat16"):
        open_checkpoint(wide, model)
    open_checkpoint(wide, gpu_model(wide, weights="bfloat16"))


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({}, ()),
        ({"activation_scheme": "dynamic"}, ("activations",)),
        ({"input_activations": {"num_bits": 8}}, ("activations",)),
        ({"kv_cache_scheme": {"num_bits": 8}}, ("the KV cache",)),
        ({"input_activations": {"num_bits": 8}, "kv_cache_scheme": {"num_bits": 8}}, ("activations", "the KV cache")),
    ],
)
def test_what_is_never_quantised_is_named(settings: dict[str, Any], plain: tuple[str, ...], wide: Path) -> None:
    """Neither changes a weight, so weights with other settings may replace these."""
    method = "fp8-128" if "activation_scheme" in settings else "ct-fp8"
    quantise(wide, method)
    before = load_model_config(wide)
    config = json.loads((wide / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization.pop("activation_scheme", None)
    for group in quantization.get("config_groups", {}).values():
        group["input_activations"] = settings.get("input_activations")
    quantization |= {key: value for key, value in settings.items() if key != "input_activations"}
    (wide / "config.json").write_text(json.dumps(config))
    found = load_model_config(wide)
    assert found.weights.left_plain == plain
    assert found.weights == before.weights


def test_tiles_of_other_codes_are_not_written() -> None:
    out = Matrix.empty(fp8_tiles(64, 64), 128, 128, torch.device("cpu"))
    with pytest.raises(AssertionError, match="does not fit"):
        tile_(out, quantize_values(torch.randn(128, 128), fp8_tiles(128, 64)))


@pytest.mark.parametrize(
    ("scheme", "columns", "why"),
    [
        *((Fp8Scheme(128, 128), 2048, None), (Fp8Scheme(None, None), 192, None), (PackedInt4Scheme(256), 768, None)),
        *((PackedInt4Scheme(32), 8192, None), (PackedInt4Scheme(None), 640, None), (Fp4Scheme(), 8192, None)),
        (Fp8Scheme(128, 192), 768, "blocks of 192 columns are no power of two from 64 on"),
        (Fp8Scheme(128, 32), 2048, "blocks of 32 columns are no power of two from 64 on"),
        (Fp8Scheme(1, None), 96, "their 96 columns are not a multiple of 64"),
        (Fp4Scheme(), 192, "their 192 columns are not a multiple of 128"),
        (Fp4Scheme(), 8320, "their 8320 columns have 260 blocks of scales, more than 256"),
        (PackedInt4Scheme(384), 768, "blocks of 384 columns are no power of two from 32 on"),
        (PackedInt4Scheme(32), 192, "their 192 columns are not a multiple of 128"),
        (PackedInt4Scheme(32), 8320, "their 8320 columns have 260 blocks of scales, more than 256"),
        (PackedInt4Scheme(16), 768, "blocks of 16 columns are no power of two from 32 on"),
        (AwqScheme(32), 192, "their 192 columns are not a multiple of 128"),
        (GptqScheme(128, zero_less_one=True, ordered=True, symmetric=True), 768, None),
        (GptqScheme(128, zero_less_one=True, ordered=False, symmetric=True), 768, "desc_act permutes their columns"),
    ],
)
def test_only_blocks_that_products_read_keep_codes(scheme: Any, columns: int, why: str | None) -> None:
    """Steps of a product begin and end with blocks, or lie within one. Others have a reason for the log."""
    assert scheme.untiled(columns) == why
    assert (scheme.tiles(columns) is None) == (why is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """`ReceivedRows` of one rank."""

    rows: torch.Tensor
    experts: torch.Tensor
    prompt: torch.Tensor | None = None
    deferred_choice: None = None
    result_window: None = None
    num_owners: int = 1


def test_experts_of_a_gpu_read_tiles() -> None:
    """The slots of a GPU's experts and the references of its products, on a CPU."""
    form = shape_model("Qwen3-30B-A3B", 1, "int4-g32").expert_form("bfloat16")
    form = replace(form, gate_up=int4_tiles(32, scales="bfloat16", zeros=False), down=fp8_tiles(128, 128))
    form = replace(form, hidden=256, intermediate=128)
    plain = plain_expert(hidden=256, intermediate=128, dtype="bfloat16")
    values = torch.randn(3, 3, 256 * 128) / 16
    rows, ids = torch.randn(5, 256).bfloat16(), torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1], [2, 0]])

    def computed(stored: ExpertForm) -> torch.Tensor:
        slots = CudaExpertSlots(num_slots=3, form=stored, device=torch.device("cpu"))
        for slot in range(3):
            slots.write(slot, lambda views, slot=slot: fill_views(views, values[slot], form))
        run = slots.begin(Received(rows=rows, experts=ids), num_experts=3)
        run.compute(slots.slot_table([0, 1, 2]))
        return run.result().view(10, 256)[ids.flatten() >= 0]

    assert torch.equal(computed(form), computed(plain))
    wanted = [expert(rows[t], values[e], form) for t in range(5) for e in ids[t] if e >= 0]
    torch.testing.assert_close(computed(plain), torch.stack(wanted))


def quantised_values(values: torch.Tensor, form: ExpertForm) -> list[Matrix]:
    gate, up, down = values
    return [
        quantize_values(gate.view(128, 256), form.gate_up),
        quantize_values(up.view(128, 256), form.gate_up),
        quantize_values(down.view(256, 128), form.down),
    ]


def fill_views(views: ExpertViews, values: torch.Tensor, form: ExpertForm) -> None:
    for target, matrix in zip((views.gate, views.up, views.down), quantised_values(values, form), strict=True):
        if target.form.tiled:
            tile_(target, matrix)
        else:
            target.data.copy_(dequantize(matrix))


def expert(row: torch.Tensor, values: torch.Tensor, form: ExpertForm) -> torch.Tensor:
    gate, up, down = (dequantize(matrix) for matrix in quantised_values(values, form))
    both = ops.linear.reference(row[None], torch.cat([gate, up]))
    return ops.linear.reference(ops.silu_mul.reference(both), down)[0]


def answers(directory: Path, **options: Any) -> Any:
    requests = {
        name: (list(range(i, 20 + i)), SamplingParams(max_tokens=8, temperature=0.0))
        for i, name in ((1, "a"), (7, "b"))
    }
    with Rank(directory, **options) as rank:
        return {name: reply.token_ids for name, reply in rank.run(requests)[0].items()}


@pytest.mark.parametrize("slots", [None, 3], ids=["all resident", "3 slots"])
@pytest.mark.parametrize(("layout", "family"), [("fp8", "deepseek_v3"), ("ct-int4", "qwen3_next"), ("awq", "olmoe")])
def test_answers_equal_the_bfloat16_checkpoint(layout: str, family: str, slots: int | None, tmp_path: Path) -> None:
    """Some matrices are quantised and others are not, even within one stacked product (q with k and v)."""
    quantised, plain = make_pair(partial(make, family), tmp_path, layout, excluded=(*PLAIN, "q_proj"))
    assert answers(quantised, expert_slots=slots) == answers(plain, expert_slots=slots)


def check(directory: Path) -> None:
    open_checkpoint(directory, load_model_config(directory))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return make("qwen3_moe", tmp_path / "qwen")


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace stored tensors by key. None removes one."""
    path = directory / "model.safetensors"
    stored = load_file(path) | {key: value for key, value in tensors.items() if value is not None}
    save_file({k: v for k, v in stored.items() if tensors.get(k, v) is not None}, path, metadata={"format": "pt"})


def settings(directory: Path, **changes: Any) -> None:
    """Change keys of the quantisation settings."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit_config(directory, quantization_config={**config, **changes})


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("fp8", f"{EXPERT}.weight_scale_inv"),
        ("ct-fp8", f"{EXPERT}.weight_scale"),
        ("ct-int4", f"{EXPERT}.weight_scale"),
        ("gptq", f"{EXPERT}.g_idx"),
        ("awq", f"{EXPERT}.qzeros"),
    ],
)
def test_a_missing_tensor_is_named(layout: str, key: str, qwen: Path) -> None:
    quantise(qwen, layout)
    change(qwen, **{key: None})
    with pytest.raises(CheckpointError, match=f"no tensor {key} of"):
        check(qwen)


def test_float_values_in_place_of_codes_are_refused(qwen: Path) -> None:
    quantise(qwen, "fp8")
    change(qwen, **{f"{EXPERT}.weight": torch.zeros(32, 64, dtype=torch.bfloat16), f"{EXPERT}.weight_scale_inv": None})
    with pytest.raises(CheckpointError, match=rf"{EXPERT}.weight(_scale_inv| is BF16)"):
        check(qwen)


@pytest.mark.parametrize("layout", SMALL)
def test_codes_of_an_excluded_module_are_refused(layout: str, qwen: Path) -> None:
    quantise(qwen, layout)
    name = EXPERT if LAYOUTS[layout].listed != "dynamic" else {f"-:.*{EXPERT}": {}}
    settings(qwen, **{LAYOUTS[layout].listed: [*PLAIN, EXPERT] if isinstance(name, str) else name})
    with pytest.raises(CheckpointError, match=f"{EXPERT} is quantised .* but config.json excludes it"):
        check(qwen)


@pytest.mark.parametrize("layout", ["fp8", "ct-int4", "gptq"])
def test_a_quantised_router_gate_is_refused(layout: str, qwen: Path) -> None:
    quantise(qwen, layout, excluded=("embed_tokens", "lm_head"))
    with pytest.raises(CheckpointError, match=r"mlp.gate is quantised .* served in bfloat16 only"):
        check(qwen)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("layout", "name"),
    [("fp8", "weight_scale_inv"), ("ct-fp8", "weight_scale"), ("ct-int4", "weight_scale"), ("awq", "scales")],
)
def test_unusable_scales_are_refused_by_name(layout: str, name: str, value: float, qwen: Path) -> None:
    quantise(qwen, layout)
    scales = load_file(qwen / "model.safetensors")[f"{EXPERT}.{name}"]
    scales[0, -1] = value
    change(qwen, **{f"{EXPERT}.{name}": scales})
    file = qwen / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"^{file}: {EXPERT}.{name} holds a scale that is 0 or not finite"):
        loaded(qwen)


def test_a_packed_shape_that_disagrees_is_refused(qwen: Path) -> None:
    quantise(qwen, "ct-int4")
    change(qwen, **{f"{EXPERT}.weight_shape": torch.tensor([32, 128])})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {EXPERT}.weight_shape is \[32, 128\]"):
        loaded(qwen)


@pytest.mark.parametrize(
    ("index", "message"),
    [(torch.full((64,), 8, dtype=torch.int32), "names a group"), (torch.zeros(64, dtype=torch.int32), "permutes")],
)
def test_a_wrong_group_index_is_refused(index: torch.Tensor, message: str, qwen: Path) -> None:
    quantise(qwen, "gptq")
    change(qwen, **{f"{EXPERT}.g_idx": index})
    with pytest.raises(CheckpointError, match=f"model.safetensors: {EXPERT}.g_idx {message}"):
        loaded(qwen)


def test_zero_points_of_symmetric_codes_are_8(qwen: Path) -> None:
    quantise(qwen, "gptq")
    zeros = load_file(qwen / "model.safetensors")[f"{EXPERT}.qzeros"]
    change(qwen, **{f"{EXPERT}.qzeros": zeros + 1})
    with pytest.raises(CheckpointError, match=f"model.safetensors: {EXPERT}.qzeros holds zero points other than 8"):
        loaded(qwen)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8", {"modules_to_not_convert": "lm_head"}, "not a list of module names"),
        ("ct-int4", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        ("ct-int4", {"config_groups": {}}, "config_groups"),
        ("ct-int4", {"ignore": ["re:(a+)+$"]}, "too complex"),
        ("ct-int4", {"ignore": ["re:" + ".?" * 24 + "!"]}, "too complex"),
        ("ct-int4", {"ignore": ["re:" + "(?:.|.)" * 24 + "!"]}, "too complex"),
        ("ct-int4", {"ignore": [f"re:a{i}" for i in range(65)]}, "has 65 patterns, at most 64"),
        ("ct-int4", {"ignore": ["re:(["]}, "pattern"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ("gptq", {"bits": 8}, "bits 8 is not supported"),
        ("gptq", {"group_size": 7}, "64 columns are not a multiple of the group size 7"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
        ("awq", {"quant_method": "quip"}, "quantised by quip"),
    ],
)
def test_settings_are_refused_by_name(layout: str, changes: dict[str, Any], message: str, qwen: Path) -> None:
    quantise(qwen, layout)
    settings(qwen, **changes)
    with pytest.raises(CheckpointError, match=message):
        check(qwen)


def group_settings(directory: Path, key: str, **changes: Any) -> None:
    """Change the only group of compressed-tensors, or with `key` its settings of weights."""
    groups = json.loads((directory / "config.json").read_text())["quantization_config"]["config_groups"]
    (groups["group_0"][key] if key else groups["group_0"]).update(changes)
    settings(directory, config_groups=groups)


def test_a_permutation_by_groups_is_refused(qwen: Path) -> None:
    quantise(qwen, "ct-int4")
    group_settings(qwen, "weights", actorder="group")
    with pytest.raises(CheckpointError, match="actorder 'group' is not supported"):
        check(qwen)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["Qwen3MoeMLP"], "no target names it: of classes only Linear is supported (targets: Qwen3MoeMLP)"),
        (["re:.*experts.*"], "no target of config.json names it"),
    ],
)
def test_codes_of_a_module_without_target_are_refused(targets: list[str], message: str, qwen: Path) -> None:
    quantise(qwen, "ct-int4")
    group_settings(qwen, "", targets=targets)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check(qwen)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("fp8", {"weight_block_size": [8, 8]}, "(a scale per block of 8 x 8)"),
        ("fp8", {"weight_block_size": None}, ".weight_scale of shape [1, 1], which config.json calls for (one scale "),
        ("ct-int4", {"group_size": 16}, "(a scale per 16 columns of a row)"),
        ("ct-int4", {"strategy": "channel"}, "(a scale per row)"),
        ("ct-int4", {"symmetric": False}, "no tensor model.layers.0.self_attn.q_proj.weight_zero_point"),
        ("ct-int4", {"symmetric": False}, "(symmetric: false, and a scale per 8 columns of a row)"),
        ("ct-int4-zeros", {"symmetric": True}, ".weight_zero_point: config.json says that codes have no zero points"),
        ("gptq", {"group_size": 16}, "(zero points and a scale per 16 columns of a row)"),
        ("awq", {"group_size": 16}, "(zero points and a scale per 16 columns of a row)"),
    ],
)
def test_tensors_that_contradict_settings_are_refused_with_them(
    layout: str, changes: dict[str, Any], message: str, qwen: Path
) -> None:
    quantise(qwen, layout)
    if layout.startswith("ct"):
        group_settings(qwen, "weights", **changes)
    else:
        settings(qwen, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check(qwen)


@pytest.mark.parametrize("layout", ["fp8", "ct-fp8", "ct-int4", "gptq", "awq", "v4"])
def test_codes_without_settings_are_refused(layout: str, tmp_path: Path, qwen: Path) -> None:
    if layout == "v4":
        qwen = make_served("fp4", tmp_path)[0]
    else:
        quantise(qwen, layout)
    edit_config(qwen, quantization_config=None, expert_dtype=None)
    with pytest.raises(CheckpointError, match=r"unexpected tensor .*: .* but config.json has no quantization_config"):
        check(qwen)


@pytest.mark.parametrize("layout", SMALL)
def test_a_quantised_output_head(layout: str, tmp_path: Path) -> None:
    """All methods read one. That of GPTQ needs its setting."""
    plain_but_head = tuple(name for name in PLAIN if name != "lm_head")
    quantised, plain = make_pair(partial(make, "qwen3_moe"), tmp_path, layout, excluded=plain_but_head)
    if layout.startswith("gptq"):
        with pytest.raises(CheckpointError, match=r'lm_head is quantised .* but config.json lacks "lm_head": true'):
            check(quantised)
        settings(quantised, lm_head=True)
    assert "lm_head.weight" not in load_file(quantised / "model.safetensors") or "fp8" in layout
    found, wanted = loaded(quantised), loaded(plain)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("names", "excluded"),
    [
        (["model.layers.1"], ("layers.1",)),
        (["re:.*self_attn.*"], ("self_attn",)),
        (["self_attn"], ("self_attn",)),
        (["model.layers.0.self_attn.qkv_proj", "gate_up_proj"], ("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")),
        ([r"re:.*\.layers\.[02]\.mlp\.experts\.\d+\.(gate|up)_proj$"], ("layers.0.mlp.experts",)),
    ],
    ids=["prefix", "pattern", "middle", "fused", "long pattern"],
)
def test_excluded_modules_may_be_named_in_several_ways(names: list[str], excluded: tuple[str, ...], qwen: Path) -> None:
    """A list that excludes quantised modules is a contradiction, so the error shows which modules it names."""
    quantise(qwen, "ct-int4")
    settings(qwen, ignore=[*PLAIN, *names])
    with pytest.raises(CheckpointError, match="|".join(excluded)) as error:
        check(qwen)
    assert "excludes it" in str(error.value)


def test_several_groups_in_one_model(tmp_path: Path) -> None:
    """Experts have int4 codes and attention fp8 codes."""
    quantised, plain = make("qwen3_moe", tmp_path / "int4"), make("qwen3_moe", tmp_path / "plain")
    other = make("qwen3_moe", tmp_path / "fp8")
    tensors = quantise(quantised, "ct-int4", excluded=(*PLAIN, "q_proj", "k_proj", "v_proj", "o_proj"))
    of_fp8 = quantise(other, "ct-fp8")
    attention = {key: value for key, value in load_file(other / "model.safetensors").items() if "self_attn" in key}
    change(quantised, **attention)
    groups = {
        "experts": {"targets": [r"re:.*experts.*"], **_group("pack-quantized", quantised)},
        "attention": {"targets": ["Linear"], **_group("float-quantized", other)},
    }
    settings(quantised, ignore=list(PLAIN), config_groups=groups, format="mixed-precision")
    tensors |= {key: value for key, value in of_fp8.items() if "self_attn" in key}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    found, wanted = loaded(quantised), loaded(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _group(kind: str, directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    return {"format": kind, "weights": config["config_groups"]["group_0"]["weights"]}


@pytest.mark.parametrize("layout", ["fp8", "ct-int4", "awq"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_scales_of_the_kv_cache_are_skipped_by_name(layout: str, prefix: str, qwen: Path) -> None:
    quantise(qwen, layout)
    names = ["k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale", "k_zero_point", "k_proj.k_scale"]
    names += [f"{one}_proj.output_scale" for one in "qkv"] + ["v_proj.output_zero_point"]
    keys = [f"{prefix}model.layers.0.self_attn.{name}" for name in names]
    change(qwen, **{key: torch.ones(1) for key in keys})
    checkpoint = open_checkpoint(qwen, load_model_config(qwen))
    assert {key for key, reason in checkpoint.skipped.items() if "KV cache" in reason} == set(keys)
    change(qwen, **{"model.layers.0.self_attn.o_proj.output_scale": torch.ones(1)})
    checkpoint = open_checkpoint(qwen, load_model_config(qwen))
    assert "activations" in checkpoint.skipped["model.layers.0.self_attn.o_proj.output_scale"]


@pytest.mark.parametrize("name", ["kv_scales", "k_scale.weight", "xk_scale"])
def test_other_unknown_scales_are_refused(name: str, qwen: Path) -> None:
    quantise(qwen, "fp8")
    change(qwen, **{f"model.layers.0.self_attn.{name}": torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor model.layers.0.self_attn.{name}"):
        check(qwen)


BLOCKS = WeightForm("blocks", (FormPart("codes", "uint8"), FormPart("scales", "float32", 4, 8)))
NIBBLES = WeightForm(
    "nibbles",
    (FormPart("codes", "int32", 1, 8), FormPart("scales", "bfloat16", 1, 4), FormPart("index", "int32", None, 1)),
)


def test_bytes_of_forms_with_several_parts() -> None:
    """Blocks at the edges are partial. The index has one row for all rows."""
    assert [part.shape(6, 20) for part in BLOCKS.parts] == [(6, 20), (2, 3)]
    assert BLOCKS.num_bytes(6, 20) == 6 * 20 + 2 * 3 * 4
    assert [part.shape(6, 20) for part in NIBBLES.parts] == [(6, 3), (6, 5), (1, 20)]
    assert NIBBLES.num_bytes(6, 20) == 6 * 3 * 4 + 6 * 5 * 2 + 20 * 4


def test_views_of_an_expert_cover_its_blob_without_overlap() -> None:
    form = ExpertForm(hidden=20, intermediate=6, gate_up=BLOCKS, down=NIBBLES)
    blob = torch.zeros(form.blob_bytes, dtype=torch.uint8)
    views = blob_views(form, blob)
    matrices = (views.gate, views.up, views.down)
    assert [matrix.shape for matrix in matrices] == [(6, 20), (6, 20), (20, 6)]
    arrays = [array for matrix in matrices for array in matrix.arrays]
    assert [tuple(array.shape) for array in arrays] == [
        *((6, 20), (2, 3)),
        *((6, 20), (2, 3)),
        *((20, 1), (20, 2), (1, 6)),
    ]
    for array in arrays:
        array.add_(1)
    assert all(torch.equal(array, torch.ones_like(array)) for array in arrays)
    spare = form.blob_bytes - sum(array.nbytes for array in arrays)
    assert 0 <= spare < 16 * len(arrays), "rounded up to where the next array may begin"
    assert [len(part) for part in blob.split(form.region_bytes)] == list(form.region_bytes)


def test_rows_of_a_matrix_with_blocks() -> None:
    matrix = Matrix.empty(BLOCKS, 10, 16, torch.device("cpu"))
    rows = matrix.rows(4, 6)
    assert rows.shape == (6, 16)
    assert [tuple(array.shape) for array in rows.arrays] == [(6, 16), (2, 2)]
    with pytest.raises(AssertionError, match="lies inside a block of 4 rows"):
        matrix.rows(3, 2)


def test_form_without_a_product_is_refused() -> None:
    with pytest.raises(ValueError, match="no products of blocks weights"):
        CpuBackend(page_size=16).matrix(Matrix.empty(BLOCKS, 8, 8, torch.device("cpu")))


def test_mutated_settings_end_in_one_line_or_are_served() -> None:
    """2,000 mutations of the settings, with stored tensors that fit or do not."""
    chance = random.Random(0)
    values: list[Any] = [
        *(None, True, -1, 0, 1, 4, 8, 128, 2**40, 10**30, 1e300, "", "fp8", "gptq", "x" * 9999, [], {}, [[]]),
        *([128, 128], [0, 1], [1], ["re:(a*)*b"], ["re:" + "a" * 600], ["re:.*" * 9], [None], {"": {}}, {"+:.*": {}}),
        *({"-:(": 1}, {"group_0": None}, {"group_0": {"targets": [1]}}, {"group_0": {"targets": ["Linear"]}}),
    ]
    keys = [f"{EXPERT}.{name}" for name in ("weight", "weight_scale", "weight_scale_inv", "weight_packed", "qweight")]
    parts = [Part(f"{EXPERT}.weight", (32, 64)), Part("model.layers.0.mlp.gate.weight", (8, 64)), Part("n", (64,))]
    served, messages = 0, []
    for _ in range(2000):
        settings = json.loads(json.dumps(dict(LAYOUTS[chance.choice(list(LAYOUTS))].config)))
        for _ in range(chance.randint(1, 3)):
            target = settings
            for _ in range(chance.randrange(4)):
                inner = [value for value in target.values() if isinstance(value, dict) and value]
                target = chance.choice(inner) if inner else target
            key = chance.choice([*target, "ignore", "dynamic", "modules_to_not_convert", "scale_fmt", "desc_act"])
            target[key] = chance.choice(values)
        config = {**SHAPES["Qwen3-30B-A3B"], "quantization_config": settings}
        try:
            model = parse_model_config(Fields("config.json", config), Fields("", {}))
            stored = set(chance.sample(keys, chance.randrange(len(keys))))
            codes = with_codes(model, None, dense=True)
            codes.expert_form("bfloat16")
            for part in parts:
                codes.weights.scheme(part, stored).stored(part)
                codes.weights.form(Weight(part.shape, (part,), matrix=True), "bfloat16", stored)
            served += 1
        except CheckpointError as error:
            messages.append(str(error))
    assert all(len(message) < 500 and "\n" not in message for message in messages)
    assert 200 < served < 1800
