"""Each published shape is a model that can be served, and the bundled shape is that of the bundled model."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import blob_views, dequantize
from moeyard_worker.checkpoint.dummy import DummyWeights
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.shapes import SHAPES, served_model, shape_config, shape_model
from moeyard_worker.models.spec import model_spec

# Published parameters in billions: 30.5, 235, 46.7, 15.7, 671, 284, 1000 and more.
PARAMETERS = {
    "Qwen3-30B-A3B": (30.4, 30.6),
    "Qwen3-235B-A22B": (234.5, 235.5),
    "Qwen3-Next-80B-A3B": (79.5, 80.5),
    "Qwen3.5-35B-A3B": (34.4, 35.0),
    "Mixtral-8x7B": (46.5, 46.9),
    "DeepSeek-V2-Lite": (15.6, 15.8),
    "DeepSeek-V3": (670, 672),
    "Kimi-K2": (1000, 1060),
    "Kimi-Linear-48B-A3B": (48.5, 49.6),
    "DeepSeek-V4-Flash": (283, 286),
    "DeepSeek-V4-Flash-0731": (283, 286),
    "DeepSeek-V4-Pro": (1560, 1610),
    "moeyard-demo": (0.0055, 0.0056),
}


@pytest.mark.parametrize("name", SHAPES)
def test_number_of_parameters_is_as_published(name: str) -> None:
    model = shape_model(name)
    parts = (part for each in model_spec(model, ()).dense() for part in each.parts)
    dense = sum(part.shape[0] * (part.shape[1] if len(part.shape) > 1 else 1) for part in parts)
    total = dense + model.num_experts * len(model.moe_layers) * model.expert_form("bfloat16").blob_bytes // 2
    low, high = PARAMETERS[name]
    assert low <= total * 1e-9 <= high, total


@pytest.mark.parametrize("name", SHAPES)
def test_num_layers_keeps_the_first_layers(name: str) -> None:
    whole, cut = shape_model(name), shape_model(name, 4)
    assert cut.num_layers == 4
    assert cut.attention == whole.attention[:4]
    assert cut.moe_layers == tuple(i for i in whole.moe_layers if i < 4)
    assert cut.num_mtp_layers == whole.num_mtp_layers
    if cut.block_drafts is not None:
        assert cut.block_drafts.read_layers == (1, 2, 3)


def test_demo_shape_is_the_bundled_model() -> None:
    config, stored = shape_config("moeyard-demo"), json.loads((DEMO / "config.json").read_text())
    stored["rope_theta"] = stored["rope_parameters"]["rope_theta"]
    assert {key: stored[key] for key in config} == config
    ours, theirs = shape_model("moeyard-demo"), load_model_config(DEMO)
    assert ours.attention == theirs.attention
    assert ours.gate == theirs.gate


@pytest.mark.parametrize("name", SHAPES)
def test_int4_is_for_routed_experts_only(name: str) -> None:
    model = shape_model(name, 4, "int4-g32")
    assert isinstance(model.weights, QuantizedFormat)
    spec = model_spec(model.with_drafts() if model.num_mtp_layers else model, ())
    for part in spec.parts():
        quantised = model.weights.promised(part.key.removesuffix(".weight")) is not None
        assert quantised == (".experts." in part.key), part.key


@pytest.mark.parametrize("layers", [0, -1, 95])
def test_too_many_layers_are_refused(layers: int) -> None:
    with pytest.raises(ValueError, match=f"^num_layers {layers}: Qwen3-235B-A22B has 94, give 1 to that many$"):
        shape_model("Qwen3-235B-A22B", layers)


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^shape 'GPT-5' is not one of Qwen3-30B-A3B, .*"):
        shape_model("GPT-5")


def test_served_model() -> None:
    drawn = EngineConfig(model_path=None, load_format="dummy", shape="moeyard-demo", num_layers=3)
    assert served_model(drawn) == shape_model("moeyard-demo", 3)
    assert served_model(EngineConfig(model_path=str(DEMO))) == load_model_config(DEMO)


@pytest.mark.parametrize(
    ("name", "scale_bytes"),
    [("Qwen3-30B-A3B", 2), ("Qwen3.5-35B-A3B", 2), ("DeepSeek-V3", 4), ("DeepSeek-V4-Flash", 2)],
)
def test_random_fp8_weights_have_the_scales_of_releases(name: str, scale_bytes: int) -> None:
    """bf16 values in Qwen's, fp32 values in DeepSeek-V3's, powers of two in DeepSeek-V4's."""
    options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "quantization": "fp8"}
    model = served_model(EngineConfig(model_path=None, shape=name, num_layers=4, **options))
    values = model.hidden_size * model.moe_intermediate_size
    form = model.expert_form("bfloat16")
    assert form.blob_bytes == 3 * (values + values // 128**2 * scale_bytes)
    small = replace(model, hidden_size=256, moe_intermediate_size=128)
    form = small.expert_form("bfloat16")
    views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
    backend = CpuBackend(page_size=16)
    DummyWeights(model_spec(small, ()), backend=backend, dtype=torch.bfloat16).fill(small.moe_layers[0], 0, views)
    scales = views.up.scales.flatten()
    assert (scales > 0).all()
    assert (torch.frexp(scales.float()).mantissa == 0.5).all() == name.startswith("DeepSeek-V4")
    # The largest value is 448 times the scale, or up to half of that if the scale is rounded up to a power of two.
    largest = dequantize(views.up).float().view(1, 128, 2, 128).abs().amax((1, 3)).flatten() / scales.float()
    assert ((largest > (224 if name.startswith("DeepSeek-V4") else 444)) & (largest < 450)).all()


@pytest.mark.parametrize(
    "name", ["Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B", "Kimi-K2", "DeepSeek-V3", "DeepSeek-V4-Flash-0731"]
)
def test_norms_of_random_weights_are_ones(name: str) -> None:
    """This includes norms of MTP layers. A norm of zeros would make all later values equal."""
    model = shape_model(name, 4)
    spec = model_spec(model.with_drafts() if model.num_mtp_layers else model, ())
    weights = DummyWeights(spec, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
    norms = [each for each in spec.dense() if len(each.shape) == 1 and "norm" in each.parts[0].key]
    assert len(norms) >= 4 * 2
    assert (spec.draft is None) == (name == "Kimi-K2")
    for each in norms:
        assert (weights.load(each) == 1).all(), each.parts[0].key
