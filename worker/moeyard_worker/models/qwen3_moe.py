"""Qwen3-MoE: grouped-query attention with normalised queries and keys; MoE everywhere except in named layers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import MAX_POSITIONS, Fields
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_gqa


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, step = count_layers(config), config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers")
    window = (
        config.optional_integer("sliding_window", maximum=MAX_POSITIONS)
        if config.boolean("use_sliding_window", False)
        else None
    )
    attention = parse_gqa(
        config,
        default_theta=10_000.0,
        sliding_window=window,
        bias=config.boolean("attention_bias", False),
        qk_norm="head",
    )
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.boolean("norm_topk_prob", False),
    )
    return {
        "attention": (attention,) * num_layers,
        "gate": GateConfig(rule=rule),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": 0,
    }


_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
})  # fmt: skip
FAMILIES = MappingProxyType(
    {
        "qwen3_moe": Family(
            parse=_parse,
            reference="Qwen3MoeForCausalLM",
            defaults=_DEFAULTS,
            # transformers 5 writes num_local_experts where the hub's files say num_experts.
            spellings=(("num_experts", "num_local_experts"),),
        )
    }
)
