"""Rotary position embedding: the settings of a checkpoint in one normal form. Pure.

Formulas: YaRN from Peng et al. 2023 (arXiv 2309.00071), with the magnitude terms (mscale) that DeepSeek added to it;
llama3 as in Meta's reference code for Llama 3.1. Checked against transformers 5.17.
"""

import math
from dataclasses import dataclass
from typing import Any

from moeyard_worker.config.fields import MAX_POSITIONS, Fields

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotation for all layers.

    `dim` is the rotated width of a head, `theta` the base. `attention_factor` multiplies cos and sin. `interleaved`:
    a pair is (2i, 2i + 1), otherwise (i, i + dim / 2). Fields below `factor` matter for the kinds that read them.
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


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_fields(config: Fields, default_theta: float) -> Fields:
    """The rope settings of a config.json: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values: Any = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, f"is {values!r:.80}, expected an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise config.error(key, "differs per layer type, which is not supported (supported: one rotation)")
    merged = dict(values)
    merged["rope_type"] = values.get("rope_type") or values.get("type") or "default"
    merged.setdefault("rope_theta", config.values.get("rope_theta") or default_theta)
    merged.setdefault("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    return Fields(f"{config.file}: {key}", merged)


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
    # Dynamic scaling starts beyond max_position_embeddings, which is where serving ends: a rotation that depended on
    # how long a sequence gets would change tokens that were already computed.
    if kind in ("default", "dynamic"):
        return RopeConfig(kind="default", dim=dim, theta=theta, interleaved=interleaved)
    original = rope.integer("original_max_position_embeddings", max_position, maximum=MAX_POSITIONS)
    factor = rope.number("factor", max_position / original if kind == "yarn" else None)
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
