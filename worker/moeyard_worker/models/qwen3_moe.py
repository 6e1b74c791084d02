"""Qwen3-MoE: grouped-query attention with normalised queries and keys; MoE in all layers but those that are named."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import MAX_POSITIONS, Fields
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.parsing import parse_gqa, parse_softmax_gate, parse_sparse_layers


def _parse(config: Fields) -> Mapping[str, Any]:
    windowed = config.boolean("use_sliding_window", False)
    attention = parse_gqa(
        config,
        sliding_window=config.optional_integer("sliding_window", maximum=MAX_POSITIONS) if windowed else None,
        bias=config.boolean("attention_bias", False),
        qk_norm="head",
    )
    return {
        "attention": (attention,) * count_layers(config),
        "gate": parse_softmax_gate(config, renormalize=config.boolean("norm_topk_prob", False)),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": parse_sparse_layers(config),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": 0,
    }


# transformers 5 writes num_local_experts, and files on the hub have num_experts.
_FAMILY = Family(
    parse=_parse, reference="Qwen3MoeForCausalLM", spellings=MappingProxyType({"num_experts": "num_local_experts"})
)
FAMILIES = MappingProxyType({"qwen3_moe": _FAMILY})
