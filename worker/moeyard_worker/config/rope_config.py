"""Rotary position embedding: the settings of a checkpoint in one normal form. Pure.

Formulas: YaRN from Peng et al. 2023 (arXiv 2309.00071), with the magnitude terms (mscale) that DeepSeek added to it;
llama3 as in Meta's reference code for Llama 3.1. Checked against transformers 5.17.
"""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import MAX_POSITIONS, Fields, shown

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Other names of a kind. The three sections of mrope have equal positions in a text.
_ALIASES = MappingProxyType({"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"})
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotation for all layers.

    `dim` is the rotated width of a head, `theta` the base. `attention_factor` multiplies cos and sin. `interleaved`:
    a pair is (2i, 2i + 1), otherwise (i, i + dim / 2). Fields below `factor` matter for the kinds that read them.
    `divisors` [dim / 2] divide the angle of each pair of "longrope".

    Two kinds depend on the length of a sequence. One rotation must serve all positions, because those in the cache
    cannot be computed again. So `longer` is the one for sequences that may have more than `max_length` tokens.
    """

    kind: str
    dim: int
    theta: float
    interleaved: bool
    attention_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    divisors: tuple[float, ...] = ()
    max_length: int = 0
    longer: "RopeConfig | None" = None


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_fields(config: Fields, default_theta: float) -> Fields:
    """Return the rope settings of a config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values: Any = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, f"is {values!r:.80}, expected an object")
    if any(isinstance(value, dict) for value in values.values()):
        values = _of_rotated_layers(config, key, values)
    merged = dict(values)
    kind = values.get("rope_type") or values.get("type") or "default"
    merged["rope_type"] = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    merged.setdefault("rope_theta", config.values.get("rope_theta") or default_theta)
    merged.setdefault("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    original = config.values.get("original_max_position_embeddings")
    if original is not None:
        merged["original_max_position_embeddings"] = original
    return Fields(f"{config.file}: {key}", merged)


def _of_rotated_layers(config: Fields, key: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a form with one object per layer type, which must agree for all types that are rotated."""
    kinds = config.values.get("layer_types")
    present = kinds if isinstance(kinds, list) else list(values)
    rotated = [values[name] for name in values if name in present and name != "linear_attention"]
    known = all(name in _LAYER_TYPES for name in values)
    if not known or not rotated or not isinstance(rotated[0], dict) or any(each != rotated[0] for each in rotated):
        raise config.error(key, "differs per layer type, which is not supported (supported: one rotation)")
    return rotated[0]


def context_length(rope: Fields, max_position: int) -> int:
    """Return the longest sequence to serve, which vLLM derives from the same settings (`_get_and_verify_max_len`).

    `max_position` is max_position_embeddings. Only longrope and llama3 files have the stretched length there.
    """
    kind = rope.values["rope_type"]
    if kind not in ("linear", "dynamic", "yarn"):
        return max_position
    original = rope.integer("original_max_position_embeddings", max_position, maximum=MAX_POSITIONS)
    length = (original if kind == "yarn" else max_position) * _factor(rope, max_position, original)
    if not 1 <= length <= MAX_POSITIONS:
        raise rope.error("factor", f"makes a context of {length:g} tokens, expected 1 to {MAX_POSITIONS}")
    return int(length)


def _factor(rope: Fields, max_position: int, original: int) -> float:
    kind = rope.values["rope_type"]
    return rope.number("factor", max_position / original if kind in ("yarn", "longrope") else None)


def parse_rope(
    rope: Fields, *, dim: int, interleaved: bool, max_position: int, partial: float | None = None
) -> RopeConfig:
    """Normalise `rope_fields` of heads of width `dim`; raises CheckpointError on what is not supported.

    `partial`: of a family that rotates the first part of a head, how large that is if nothing is said of it.
    """
    kind = rope.require("rope_type", KINDS, "default")
    if partial is None:
        rope.require("partial_rotary_factor", (1.0,), 1.0)
    else:
        factor = rope.number("partial_rotary_factor", partial)
        if factor > 1:
            raise rope.error("partial_rotary_factor", f"is {factor}, a part is at most 1")
        dim = int(dim * factor)
    if dim % 2 or not dim:
        raise rope.error("head_dim", f"is {dim}: a rotated head needs an even width")
    theta = rope.number("rope_theta")
    plain = RopeConfig(kind="default", dim=dim, theta=theta, interleaved=interleaved)
    if kind == "default":
        return plain
    original = rope.integer("original_max_position_embeddings", max_position, maximum=MAX_POSITIONS)
    factor = _factor(rope, max_position, original)
    context_length(rope, max_position)  # Refuse a factor that is out of bounds before it is used.
    if kind == "dynamic":
        # vLLM rotates all sequences as transformers does one that fills the whole stretched context.
        stretch = (factor * factor - (factor - 1)) ** (dim / (dim - 2)) if dim > 2 else 1.0
        return replace(plain, max_length=max_position, longer=replace(plain, theta=theta * stretch))
    if kind == "longrope":
        short, long = (_divisors(rope, name, dim // 2) for name in ("short_factor", "long_factor"))
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        scale = rope.number("attention_factor", scale)
        within = replace(plain, kind=kind, attention_factor=scale, divisors=short)
        return replace(within, max_length=original, longer=replace(within, divisors=long))
    if kind == "linear":
        return RopeConfig(kind=kind, dim=dim, theta=theta, interleaved=interleaved, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            dim=dim,
            theta=theta,
            interleaved=interleaved,
            factor=factor,
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        kind=kind,
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        attention_factor=_yarn_attention_factor(rope, factor),
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    """Return a list of positive numbers, one per rotated pair."""
    values = rope.values.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise rope.error(key, f"is {shown(values)}, expected a list of {count} numbers, one per rotated pair")
    return tuple(Fields(f"{rope.file}: {key}", {str(i): value}).number(str(i)) for i, value in enumerate(values))


def mla_softmax_scale(rope: Fields, head_dim: int) -> float:
    """1 / sqrt(head_dim), times DeepSeek's squared mscale when a scaled rotation sets `mscale_all_dim`."""
    scale = float(head_dim**-0.5)
    if rope.values["rope_type"] != "default" and rope.values.get("mscale_all_dim"):
        mscale = yarn_mscale(rope.number("factor"), rope.number("mscale_all_dim"))
        scale = scale * mscale * mscale
    return scale


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(factor, rope.number("mscale_all_dim"))
    return yarn_mscale(factor, 1.0)
