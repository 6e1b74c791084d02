"""Mixtral: grouped-query attention, optionally in a sliding window; MoE in every layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import MAX_POSITIONS, Fields
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.parsing import parse_gqa, parse_softmax_gate


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, width = count_layers(config), config.integer("intermediate_size")
    attention = parse_gqa(
        config,
        default_theta=1_000_000.0,
        sliding_window=config.optional_integer("sliding_window", maximum=MAX_POSITIONS),
    )
    return {
        "attention": (attention,) * num_layers,
        "gate": parse_softmax_gate(config, renormalize=True),
        "intermediate_size": width,
        "moe_layers": tuple(range(num_layers)),
        "num_experts": config.integer("num_local_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": 0,
    }


_FAMILY = Family(
    parse=_parse,
    reference="MixtralForCausalLM",
    names=Names(moe=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2")),
    spellings=MappingProxyType({"num_local_experts": "num_experts"}),
)
FAMILIES = MappingProxyType({"mixtral": _FAMILY})
