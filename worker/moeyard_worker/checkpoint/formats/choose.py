"""The checkpoint formats by the name of their quantiser, and the refusal of all others. Pure."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.checkpoint.formats.format import Format
from moeyard_worker.checkpoint.formats.plain import PlainFormat
from moeyard_worker.config.fields import Fields

# By `quant_method`: makes the format from the object that config.json has of it.
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = MappingProxyType({})

# The keys and files in which a quantiser describes itself, and its name where it does not say that.
_KEYS = MappingProxyType(
    {"quantization_config": "an unnamed method", "compression_config": "compressed-tensors", "quantization": "MLX"}
)
QUANTISER_FILES = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
# Keys that one quantiser alone writes.
_TELLING_KEYS = MappingProxyType(
    {
        "config_groups": "compressed-tensors",
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "quant_algo": "modelopt",
        "w_bit": "awq",
        "desc_act": "gptq",
        "group_size": "MLX",
    }
)


def quantisers(config: Fields) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each key that describes quantised weights, with the words for its method and what stands there."""
    text = config.values.get("text_config")
    for values in (config.values, text if isinstance(text, dict) else {}):
        for key, default in _KEYS.items():
            if values.get(key) is not None:
                yield key, quantiser(values[key], default), values[key] if isinstance(values[key], dict) else {}


def choose_format(config: Fields) -> Format:
    """Return the format of a checkpoint. Raises CheckpointError for a quantiser that has none."""
    for key, words, settings in quantisers(config):
        if settings.get("quant_method") not in FORMATS:
            raise config.error(key, refusal(words))
        return FORMATS[settings["quant_method"]](settings)
    return PlainFormat()


def quantiser(said: Any, default: str) -> str:
    """Return a quantiser's name for its method, with its variant; `default` where nothing names one."""
    if not isinstance(said, dict):
        return default
    inner = said.get("quantization")
    said = {**said, **inner} if isinstance(inner, dict) else said
    producer = said.get("producer")
    found = said.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    found = found or next((name for key, name in _TELLING_KEYS.items() if key in said), default)
    bits = said.get("bits") or said.get("w_bit")
    variant = said.get("quant_algo") or said.get("format") or said.get("fmt") or (f"{bits} bits" if bits else None)
    return f"{found!s:.40}" + (f" ({variant})"[:40] if isinstance(variant, str) else "")


def refusal(words: str) -> str:
    """Return what is said of weights that are quantised by a method without a format."""
    supported = ", ".join(("float32 and bfloat16 weights", *FORMATS))
    return (
        f"is not supported: the weights are quantised by {words} (supported: {supported}); serve the checkpoint that "
        "it was made from"
    )
