"""Kimi-Linear: Kimi Delta Attention in most layers, latent attention without rotation in the others; DeepSeek-V3's MoE.

The published config.json numbers its layers from 1 under `linear_attn_config`; transformers writes `layer_types`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.kda import Kda
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_layer_types, parse_mla

_LINEAR, _FULL = "linear_attention", "full_attention"


def _linear(config: Fields) -> Fields:
    """What the published file says of linear attention, under transformers' names; the rest of the file otherwise."""
    values = config.values.get("linear_attn_config")
    if values is None:
        return config
    if not isinstance(values, dict):
        raise config.error("linear_attn_config", f"is {values!r:.80}, expected an object")
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    found = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    return Fields(f"{config.file}: linear_attn_config", {**config.values, **values, **found})


def _kinds(config: Fields, linear: Fields) -> list[str]:
    """The kind of each layer; layers of the published lists are numbered from 1."""
    num_layers = count_layers(config)
    full, others = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if not full and not others:
        return [_FULL if i and i % 4 == 0 else _LINEAR for i in range(num_layers)]
    if sorted(full + others) != list(range(1, num_layers + 1)):
        raise linear.error("kda_layers", f"and full_attn_layers do not name each of {num_layers} layers once, from 1")
    return [_FULL if i in full else _LINEAR for i in range(1, num_layers + 1)]


def _moe_layers(config: Fields) -> tuple[int, ...]:
    num_layers, first = count_layers(config), config.integer("first_k_dense_replace", 1, minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    default = ["sparse" if i >= first and i % frequency == 0 else "dense" for i in range(num_layers)]
    kinds = parse_layer_types(config, ("dense", "sparse"), default, key="mlp_layer_types")
    return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")


def _parse(config: Fields) -> Mapping[str, Any]:
    config.require("moe_router_activation_func", ("sigmoid",), "sigmoid")
    config.require("mla_use_nope", (True,), True)
    # transformers keeps a head of its own then, the authors' code does not; no published checkpoint sets it.
    config.require("tie_word_embeddings", (False,), False)
    linear = _linear(config)
    kda = Kda(
        num_heads=linear.integer("linear_num_heads"),
        head_dim=linear.integer("linear_head_dim"),
        conv_size=linear.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=config.number("rms_norm_eps"),
    )
    kinds: dict[str, Attention] = {_LINEAR: kda, _FULL: parse_mla(config, interleaved=True, rotated=False)}
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        num_groups=config.integer("n_group", 1),
        topk_groups=config.integer("topk_group", 1),
        group_score="top2sum",
        scaling=config.number("routed_scaling_factor"),
    )
    width = config.integer("moe_intermediate_size")
    return {
        "attention": tuple(kinds[name] for name in parse_layer_types(config, tuple(kinds), _kinds(config, linear))),
        "gate": GateConfig(rule=rule, bias=True, fp32_logits=True),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": _moe_layers(config),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": width * config.integer("n_shared_experts", minimum=0),
    }


_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 1, "num_experts": 256, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446, "norm_topk_prob": True, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
    "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "bos_token_id": 163584,
    "eos_token_id": 163586,
})  # fmt: skip
# The key that is read here, and another that files have for it.
_SPELLINGS = (
    ("max_position_embeddings", "model_max_length"),
    ("norm_topk_prob", "moe_renormalize"),
    ("n_group", "num_expert_group"),
    ("num_experts", "num_local_experts"),
    ("num_experts_per_tok", "num_experts_per_token"),
    ("n_shared_experts", "num_shared_experts"),
)
FAMILIES = MappingProxyType(
    {
        "kimi_linear": Family(
            parse=_parse,
            reference="KimiLinearForCausalLM",
            defaults=_DEFAULTS,
            names=Names(linear="self_attn.", moe=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2")),
            spellings=_SPELLINGS,
        )
    }
)
