"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention; dense layers first, then MoE with shared experts.

V3's sigmoid gate has a correction bias, V2's softmax gate has none. Multi-token-prediction layers follow the last layer
under the same names.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_mla, parse_sigmoid_gate

_IMAGES = "reads images, which are not supported"


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
    attention = parse_mla(config, interleaved=config.boolean("rope_interleave", True))
    return _blocks(config, attention, parse_sigmoid_gate(config))


def _parse_v2(config: Fields) -> Mapping[str, Any]:
    config.require("scoring_func", ("softmax",), "softmax")
    method = config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # With True, the authors' code normalises the weights and transformers does not. No published checkpoint sets it.
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


_V2 = Family(
    parse=_parse_v2, reference="DeepseekV2ForCausalLM", spellings=MappingProxyType({"n_routed_experts": "num_experts"})
)
_V3 = Family(
    parse=_parse_v3,
    reference="DeepseekV3ForCausalLM",
    spellings=MappingProxyType({"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}),
)
# Kimi-K2.5 and K2.6: the text model of Kimi-K2 inside a model that also reads images.
_K25 = replace(
    _V3,
    text_config=True,
    names=replace(
        Names(),
        embed="language_model.model.embed_tokens.weight",
        norm="language_model.model.norm.weight",
        lm_head="language_model.lm_head.weight",
        layer="language_model.model.layers.{i}.",
        draft_layer="language_model.model.layers.{i}.",
        draft_parts="language_model.model.layers.{i}.",
        skipped=tuple((prefix, _IMAGES) for prefix in ("vision_tower.", "mm_projector.")),
    ),
)
FAMILIES = MappingProxyType({"deepseek_v3": _V3, "kimi_k2": _V3, "kimi_k25": _K25, "deepseek_v2": _V2})
