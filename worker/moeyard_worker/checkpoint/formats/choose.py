"""Choose the format of a checkpoint by its quantisation method, and refuse methods without a format. Pure."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard_worker.checkpoint.formats.compressed_tensors import parse_compressed_tensors
from moeyard_worker.checkpoint.formats.format import Format
from moeyard_worker.checkpoint.formats.fp8 import parse_fp8
from moeyard_worker.checkpoint.formats.gptq import parse_awq, parse_gptq
from moeyard_worker.checkpoint.formats.plain import PlainFormat
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import Fields, read_json

# By `quant_method`: makes the format from the quantisation settings in config.json.
FORMATS: Mapping[str, Callable[[Fields, str], QuantizedFormat]] = MappingProxyType(
    {"fp8": parse_fp8, "compressed-tensors": parse_compressed_tensors, "gptq": parse_gptq, "awq": parse_awq}
)

# Keys of config.json that hold quantisation settings, and the method if the settings name none.
_CONFIG_KEYS = MappingProxyType(
    {"quantization_config": "an unnamed method", "compression_config": "compressed-tensors", "quantization": "MLX"}
)
_METHODS = MappingProxyType({"compression_config": "compressed-tensors"})
# Files that hold such settings when config.json has none.
_SETTINGS_FILES = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
# Keys within the settings that only one method writes.
_METHOD_KEYS = MappingProxyType(
    {
        "config_groups": "compressed-tensors",
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "quant_algo": "modelopt",
        "w_bit": "awq",
        "zero_point": "awq",
        "desc_act": "gptq",
        "sym": "gptq",
        "weight_block_size": "fp8",
        "group_size": "MLX",
    }
)


def quantisations(config: Fields) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (key, name of the method with its variant, settings) for each key of config.json that describes quantised
    weights."""
    text = config.values.get("text_config")
    for values in (config.values, text if isinstance(text, dict) else {}):
        for key, default in _CONFIG_KEYS.items():
            found = values.get(key)
            if found is not None:
                settings = found if isinstance(found, dict) else {}
                yield key, _method_name(settings, default), settings


def choose_format(config: Fields) -> Format:
    """Return the format of a checkpoint. Raises CheckpointError for a quantisation method without a format."""
    for key, name, settings in quantisations(config):
        method = settings.get("quant_method", _METHODS.get(key))
        make = FORMATS.get(method) if isinstance(method, str) else None
        if make is None:
            raise config.error(key, _refusal(name) if method is not None else _unnamed(settings, key, name))
        dtype = config.values.get("dtype") or config.values.get("torch_dtype")
        return make(Fields(f"{config.file}: {key}", settings), str(dtype))
    return PlainFormat()


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a bfloat16 checkpoint of the same model."""
    # DeepSeek-V4 has the form of its experts at the top level.
    left_out = (*_CONFIG_KEYS, "expert_dtype", "dtype", "torch_dtype")
    found = {key: value for key, value in values.items() if key not in left_out}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = plain_config(text)
    return {**found, "dtype": "bfloat16"}


def check_settings_files(config: Fields, directory: Path) -> None:
    """Raise CheckpointError if only a file beside config.json describes quantised weights.

    No format reads such a file, and the weights must not pass for plain ones.
    """
    for name, default in _SETTINGS_FILES.items():
        path = directory / name
        if path.exists() and not any(quantisations(config)):
            settings = read_json(path)
            method, name = _method(settings, default), _method_name(settings, default)
            if method not in FORMATS:
                raise CheckpointError(f"{path}: {_refusal(name)}")
            spelt = ' and "bits", "group_size" for "w_bit", "q_group_size"' if "w_bit" in settings else ""
            raise CheckpointError(
                f"{path}: config.json has no quantization_config; copy these settings of {name} into it, with "
                f'"quant_method": "{method}"{spelt}'
            )


def _flat(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = settings.get("quantization")
    return {**settings, **inner} if isinstance(inner, dict) else settings


def _method(settings: Mapping[str, Any], default: str) -> str:
    """Return the quantisation method that settings name, or the one whose keys they have."""
    settings = _flat(settings)
    producer = settings.get("producer")
    name = settings.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    return str(name or next((method for key, method in _METHOD_KEYS.items() if key in settings), default))


def _method_name(settings: Mapping[str, Any], default: str) -> str:
    """Return the name of a quantisation method with its variant, for an error message."""
    name, settings = _method(settings, default), _flat(settings)
    bits = settings.get("bits") or settings.get("w_bit")
    variant = settings.get("quant_algo") or settings.get("format") or settings.get("fmt")
    variant = variant or (f"{bits} bits" if bits else None)
    return f"{name:.40}" + (f" ({variant})"[:40] if isinstance(variant, str) else "")


def _unnamed(settings: Mapping[str, Any], key: str, name: str) -> str:
    """Return the refusal of settings without `quant_method`."""
    method = _method(settings, _CONFIG_KEYS[key])
    if method in FORMATS:
        return f'has no quant_method: its keys are those of {name}; add "quant_method": "{method}"'
    if method == _CONFIG_KEYS["quantization_config"]:
        return f"has no quant_method (supported: {', '.join(FORMATS)})"
    return _refusal(name)


def _refusal(name: str) -> str:
    supported = ", ".join(("float32 and bfloat16 weights", *FORMATS))
    return (
        f"is not supported: the weights are quantised by {name} (supported: {supported}); serve the checkpoint that "
        "it was made from"
    )
