"""The text part of Qwen3.5-MoE: the layers of Qwen3-Next with separate projections, and MoE in every layer.

The published checkpoint also reads images: the settings of its text part are under `text_config` of config.json, and
the tensors under `model.language_model`. Without images its rotation in three sections is the usual one.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.qwen3_next import NAMES, parse_attention, parse_experts


def _parse(config: Fields) -> Mapping[str, Any]:
    return {
        **parse_experts(config, renormalize=True),
        "attention": parse_attention(config, by_key_head=False),
        # No layer is dense.
        "intermediate_size": config.integer("moe_intermediate_size"),
        "moe_layers": tuple(range(count_layers(config))),
    }


_TEXT = replace(NAMES, skipped=(("model.visual.", "reads images, which are not supported"),))
_WHOLE = replace(
    _TEXT,
    embed="model.language_model.embed_tokens.weight",
    norm="model.language_model.norm.weight",
    layer="model.language_model.layers.{i}.",
)
_FAMILY = Family(
    parse=_parse,
    reference="Qwen3_5MoeForCausalLM",
    names=_WHOLE,
    other_names=(_TEXT,),
    text_config=True,
    spellings=MappingProxyType({"num_nextn_predict_layers": "mtp_num_hidden_layers"}),
)
FAMILIES = MappingProxyType({"qwen3_5_moe": _FAMILY, "qwen3_5_moe_text": _FAMILY})
