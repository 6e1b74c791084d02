"""Published architectures by name, for random weights (`--load-format dummy --shape NAME`). Pure: loads no torch.

`shapes.json` has the keys of each config.json that decide sizes and arithmetic, from the hub (2026-11). `moeyard-demo`
is the bundled model (deploy/demo).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.models.families import load_model_config, parse_model_config, with_codes
from moeyard_worker.models.model_config import ModelConfig

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads(Path(__file__).with_name("shapes.json").read_text("utf-8"))
)


# Quantisation settings as published checkpoints have them: fp8 of DeepSeek-V3, int4 of the experts of Kimi-K2.5, fp8
# with fp4 of the experts of DeepSeek-V4.
_INT4 = MappingProxyType({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"})
# Every module but routed experts, whatever a family calls it. vLLM also asks for all experts of a layer: "...experts".
_IGNORED = (r"re:(?!.*\.experts).*",)
WRITTEN = ("fp8", "int4-g32", "int4-g128")
# Shapes whose fp8 checkpoints store bf16 scales. config.json does not say so.
_BF16_SCALES = ("Qwen", "moeyard-demo")
# fp4 has no writer: other software reads it of one model only.
QUANTIZATIONS = (*WRITTEN, "fp4")


def quantization_config(name: str) -> dict[str, Any]:
    """Return the quantisation settings of one of `QUANTIZATIONS`. Raises ValueError for another name."""
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r} is not one of {', '.join(QUANTIZATIONS)}")
    if name in ("fp8", "fp4"):
        found = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        return found if name == "fp8" else {**found, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    weights = {**_INT4, "group_size": int(name.removeprefix("int4-g"))}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": list(_IGNORED),
        "config_groups": {"experts": {"targets": ["Linear"], "weights": weights}},
    }


def shape_config(name: str, num_layers: int | None = None, quantization: str | None = None) -> dict[str, Any]:
    """Return the config.json of a named architecture with its first `num_layers`, quantised as `quantization` says.

    Raises ValueError for an unknown name or too many layers.
    """
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if num_layers is not None:
        if not 1 <= num_layers <= config["num_hidden_layers"]:
            raise ValueError(f"num_layers {num_layers}: {name} has {config['num_hidden_layers']}, give 1 to that many")
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
        if "dspark_target_layer_ids" in config:
            # The drafter reads the last layers, and has as many of its own.
            read = len(config["dspark_target_layer_ids"])
            config["dspark_target_layer_ids"] = list(range(max(0, num_layers - read), num_layers))
    if quantization is not None:
        settings = quantization_config(quantization)
        if quantization == "fp8" and config["model_type"] == "deepseek_v4":
            settings["scale_fmt"] = "ue8m0"
        config |= {"quantization_config": settings, "dtype": "bfloat16"}
    return config


def shape_model(name: str, num_layers: int | None = None, quantization: str | None = None) -> ModelConfig:
    """Return the model of a named architecture. Raises ValueError for another name or too many layers."""
    source = name if num_layers is None else f"{num_layers} layers of {name}"
    model = parse_model_config(Fields(source, shape_config(name, num_layers, quantization)), Fields(source, {}))
    if quantization == "fp8" and name.startswith(_BF16_SCALES):
        assert isinstance(model.weights, QuantizedFormat)
        return replace(model, weights=replace(model.weights, scales="bfloat16"))
    return model


def _check_slots(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError for row limits that are too small for state per sequence."""
    together = model.state_spec(1).chunk_alignment
    for name in ("prefill_chunk", "max_batch_tokens", "mixed_prefill_tokens"):
        if (rows := getattr(config, name)) is not None and rows < together:
            raise ValueError(
                f"--{name.replace('_', '-')} {rows}: {model.family} computes {together} positions of a prompt "
                "together, use at least that value"
            )


def _with_drafts(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with the drafter that `config` names. Raises ValueError if it has none or cannot run it."""
    block = model.block_drafts
    if (config.speculate == "dspark") != (block is not None):
        if block is not None:
            raise ValueError("the drafter of this model is DSpark, use --speculate dspark")
        raise ValueError("this model has no drafter DSpark (config.json: dspark_block_size)")
    if block is not None and (rows := config.max_num_seqs * block.size) > config.max_batch_tokens:
        raise ValueError(
            f"--max-num-seqs {config.max_num_seqs} with blocks of {block.size} drafts needs {rows} rows of a step, "
            f"--max-batch-tokens is {config.max_batch_tokens}"
        )
    return model.with_drafts()


def served_model(config: EngineConfig) -> ModelConfig:
    """Return the model that `config` serves, from a checkpoint or a shape. Raises ValueError with the reason."""
    if config.shape is not None:
        model = shape_model(config.shape, config.num_layers, config.quantization)
    else:
        assert config.model_path is not None, "EngineConfig demands one of both"
        model = load_model_config(config.model_path, config.max_model_len, gguf=config.gguf is not None)
    if model.has_slots:
        _check_slots(config, model)
    if config.speculate is not None:
        try:
            model = _with_drafts(config, model)
        except ValueError as error:
            raise ValueError(f"--speculate {config.speculate}: {config.model_path or config.shape}: {error}") from None
    keeps = config.device != "cpu" and config.weights != "bfloat16" and model.served_dtype(config.dtype) == "bfloat16"
    return with_codes(model, config.model_path, dense=config.weights == "codes") if keeps else model
