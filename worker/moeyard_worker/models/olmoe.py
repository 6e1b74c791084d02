"""OLMoE: grouped-query attention whose norms run over all heads together; MoE in every layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_gqa


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, hidden = count_layers(config), config.integer("hidden_size")
    if config.values.get("clip_qkv") is not None:
        raise config.error("clip_qkv", "is not supported (supported: null)")
    # transformers hands a window to the attention function and leaves it out of the mask: some functions heed it.
    if config.values.get("sliding_window") is not None:
        raise config.error("sliding_window", "is not supported (supported: null)")
    attention = parse_gqa(
        config,
        default_theta=10_000.0,
        sliding_window=None,
        bias=config.boolean("attention_bias", False),
        qk_norm="all",
    )
    # The norm of all query heads has one weight for each of hidden_size values.
    if attention.num_heads * attention.head_dim != hidden:
        raise config.error("head_dim", f"is {attention.head_dim}: {attention.num_heads} heads are not {hidden} wide")
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.boolean("norm_topk_prob", False),
    )
    width = config.integer("intermediate_size")
    return {
        "attention": (attention,) * num_layers,
        "gate": GateConfig(rule=rule),
        "intermediate_size": width,
        "moe_layers": tuple(range(num_layers)),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": 0,
    }


_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "eos_token_id": 50279,
})  # fmt: skip
FAMILIES = MappingProxyType(
    {
        "olmoe": Family(
            parse=_parse,
            reference="OlmoeForCausalLM",
            defaults=_DEFAULTS,
            spellings=(("num_experts", "num_local_experts"),),
        )
    }
)
