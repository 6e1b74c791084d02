"""Mixtral: grouped-query attention, optionally in a sliding window; MoE in every layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import MAX_POSITIONS, Fields
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_gqa


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, width = count_layers(config), config.integer("intermediate_size")
    attention = parse_gqa(
        config,
        default_theta=1_000_000.0,
        sliding_window=config.optional_integer("sliding_window", maximum=MAX_POSITIONS),
        bias=False,
        qk_norm=None,
    )
    rule = GateRule(top_k=config.integer("num_experts_per_tok"), scoring="softmax", renormalize=True)
    return {
        "attention": (attention,) * num_layers,
        "gate": GateConfig(rule=rule),
        "intermediate_size": width,
        "moe_layers": tuple(range(num_layers)),
        "num_experts": config.integer("num_local_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": 0,
    }


_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
})  # fmt: skip
FAMILIES = MappingProxyType(
    {
        "mixtral": Family(
            parse=_parse,
            reference="MixtralForCausalLM",
            defaults=_DEFAULTS,
            names=Names(moe=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2")),
            spellings=(("num_local_experts", "num_experts"),),
        )
    }
)
