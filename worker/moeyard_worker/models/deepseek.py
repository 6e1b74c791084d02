"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention; dense layers first, then MoE with shared experts.

The sigmoid gate of V3 carries a correction bias, V2's softmax gate does not. Multi-token-prediction layers sit behind
the last layer under the same names.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_mla


def _blocks(config: Fields, attention: Mla, gate: GateConfig) -> dict[str, Any]:
    if config.values.get("mlp_bias"):
        raise config.error("mlp_bias", "is not supported")
    first = config.integer("first_k_dense_replace", minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    num_layers = count_layers(config)
    width = config.integer("moe_intermediate_size")
    return {
        "attention": (attention,) * num_layers,
        "gate": gate,
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": tuple(i for i in range(num_layers) if i >= first and i % frequency == 0),
        "num_experts": config.integer("n_routed_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": width * config.integer("n_shared_experts", 0, minimum=0),
    }


def _parse_v3(config: Fields) -> Mapping[str, Any]:
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        num_groups=config.integer("n_group", 1),
        topk_groups=config.integer("topk_group", 1),
        group_score="top2sum",
        scaling=config.number("routed_scaling_factor"),
    )
    attention = parse_mla(config, interleaved=config.boolean("rope_interleave", True))
    return _blocks(config, attention, GateConfig(rule=rule, bias=True, fp32_logits=True))


def _parse_v2(config: Fields) -> Mapping[str, Any]:
    config.require("scoring_func", ("softmax",), "softmax")
    method = config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # Its authors' code normalises the weights then, transformers does not; no published checkpoint sets it.
    config.require("norm_topk_prob", (False,), False)
    grouped = method == "group_limited_greedy"
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="softmax",
        renormalize=False,
        num_groups=config.integer("n_group") if grouped else 1,
        topk_groups=config.integer("topk_group") if grouped else 1,
        scaling=config.number("routed_scaling_factor"),
    )
    return _blocks(config, parse_mla(config, interleaved=True), GateConfig(rule=rule, fp32_logits=True))


_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
})  # fmt: skip
_V3_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    **_DEFAULTS, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
})  # fmt: skip
_V2_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    **_DEFAULTS, "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407,
    "num_hidden_layers": 32, "num_attention_heads": 32, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "max_position_embeddings": 2048, "bos_token_id": 1,
    "eos_token_id": 2,
})  # fmt: skip
_V3 = Family(
    parse=_parse_v3,
    reference="DeepseekV3ForCausalLM",
    defaults=_V3_DEFAULTS,
    spellings=(("n_routed_experts", "num_local_experts"), ("num_nextn_predict_layers", "num_mtp_layers")),
)
FAMILIES = MappingProxyType(
    {
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "deepseek_v2": Family(
            parse=_parse_v2,
            reference="DeepseekV2ForCausalLM",
            defaults=_V2_DEFAULTS,
            spellings=(("n_routed_experts", "num_experts"),),
        ),
    }
)
