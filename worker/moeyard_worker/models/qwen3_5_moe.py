"""Qwen3.5-MoE, its text part: the layers of Qwen3-Next with projections of their own, MoE everywhere.

The published checkpoint is of text and images: its config.json has what is read here under `text_config`, and its
tensors sit under `model.language_model`. Without images a rotation in three sections is one of positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.models import qwen3_next
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.qwen3_next import parse_experts, parse_mixers


def _parse(config: Fields) -> Mapping[str, Any]:
    return {
        **parse_experts(config, renormalize=True),
        "attention": parse_mixers(config, by_key_head=False),
        # No layer is dense.
        "intermediate_size": config.integer("moe_intermediate_size"),
        "moe_layers": tuple(range(count_layers(config))),
    }


_TEXT = replace(qwen3_next.NAMES, skipped=(("model.visual.", "reads images, which are not served"),))
_WHOLE: Names = replace(
    _TEXT,
    embed="model.language_model.embed_tokens.weight",
    norm="model.language_model.norm.weight",
    layer="model.language_model.layers.{i}.",
)
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **qwen3_next.DEFAULTS,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }
)
_FAMILY = Family(
    parse=_parse, reference="Qwen3_5MoeForCausalLM", defaults=_DEFAULTS, names=_WHOLE, other_names=(_TEXT,),
    text_config=True, spellings=(("num_nextn_predict_layers", "mtp_num_hidden_layers"),),
)  # fmt: skip
FAMILIES = MappingProxyType({"qwen3_5_moe": _FAMILY, "qwen3_5_moe_text": _FAMILY})
