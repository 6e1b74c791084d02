"""The check of new weights: a rank that reads files to find faults names the first tensor with NaN or infinity."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import edit_tensors, make_checkpoint, publish_v4
from tests.quantised import SMALL, publish_codes, quantise

from moeyard_worker.checkpoint.loading import open_checkpoint, read_through
from moeyard_worker.checkpoint.reading import all_finite
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.models.families import load_model_config

NAN, INF = float("nan"), float("inf")
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_at_any_place_is_found(dtype: torch.dtype) -> None:
    """Vectors of a processor treat the middle and the end of an array by different instructions."""
    for size in (1, 7, 64, 131):
        limits = torch.finfo(dtype)
        sound = torch.linspace(-1, 1, size).to(dtype)
        sound[0] = limits.max if size % 2 else limits.min
        assert all_finite(sound)
        for place in range(size):
            for value in (NAN, INF, -INF):
                spoilt = sound.clone()
                spoilt[place] = value
                assert not all_finite(spoilt), f"{value} at {place} of {size}"


def test_exponents_of_nan_are_found() -> None:
    """Codes are checked where they are decoded."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert all_finite(codes)
    exponents = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert [i for i in range(256) if not all_finite(exponents[i : i + 1])] == [255]
    assert all_finite(torch.tensor([-1, 0, 127], dtype=torch.int8))


def read(directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Read a checkpoint as a rank that overwrites its weights in place."""
    checkpoint = open_checkpoint(directory, load_model_config(directory))
    model = checkpoint.spec.config
    experts = [(layer, expert) for layer in model.moe_layers for expert in range(model.num_experts)]
    read_through(checkpoint, dtype, experts)


def spoil(directory: Path, key: str, value: float) -> str:
    """Write one value into a tensor. Return a pattern of the error that names it."""
    tensor = load_file(directory / "model.safetensors")[key]
    coded = tensor.dtype == torch.float8_e4m3fn
    place = tensor.view(torch.uint8).flatten() if coded else tensor.flatten()
    place[-1] = value
    edit_tensors(directory, add={key: tensor})
    why = "a code that is NaN; the file is damaged" if coded else "values that are not finite"
    return rf"{directory}/model\.safetensors: {re.escape(key)} holds {why}$"


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", EXPERT])
@pytest.mark.parametrize("value", [NAN, INF])
def test_weights_overwritten_in_place_are_read_and_checked_first(key: str, value: float, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    read(directory)
    named = spoil(directory, key, value)
    with pytest.raises(CheckpointError, match=named):
        read(directory)


def test_a_value_above_the_served_dtype_is_refused(tmp_path: Path) -> None:
    """The largest fp32 values round to infinity in bfloat16."""
    directory = make_checkpoint(tmp_path, "qwen3_moe")
    named = spoil(directory, EXPERT, torch.finfo(torch.float32).max)
    read(directory, torch.float32)
    with pytest.raises(CheckpointError, match=named):
        read(directory)


@pytest.mark.parametrize("layout", SMALL)
def test_quantised_checkpoints_pass(layout: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    quantise(directory, layout)
    read(directory)


def test_codes_of_a_release_pass(tmp_path: Path) -> None:
    """DeepSeek-V4 has e2m1 codes, e4m3 codes and scales that are exponents."""
    directory = publish_v4(make_checkpoint(tmp_path, "deepseek_v4", dtype=torch.bfloat16))
    publish_codes(directory)
    read(directory)


def test_codes_and_plain_tensors_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    quantise(directory, "fp8")
    read(directory)
    for key, value in ((EXPERT, 255), ("model.norm.weight", NAN)):
        before = load_file(directory / "model.safetensors")[key]
        with pytest.raises(CheckpointError, match=spoil(directory, key, value)):
            read(directory)
        edit_tensors(directory, add={key: before})
