"""Kimi-Linear: Kimi Delta Attention in most layers, latent attention without rotation in the others; DeepSeek-V3's MoE.

The published config.json numbers its layers from 1 under `linear_attn_config`; transformers writes `layer_types`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.kda import Kda
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.parsing import parse_layer_types, parse_mla, parse_sigmoid_gate

_LINEAR, _FULL = "linear_attention", "full_attention"
# transformers' key of a setting of linear attention, and the published file's key under `linear_attn_config`.
_LINEAR_KEYS = MappingProxyType(
    {
        "linear_head_dim": "head_dim",
        "linear_num_heads": "num_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
)


def _linear(config: Fields) -> Fields:
    """Return `config` with the settings of linear attention under transformers' keys."""
    values = config.values.get("linear_attn_config")
    if values is None:
        return config
    if not isinstance(values, dict):
        raise config.error("linear_attn_config", f"is {values!r:.80}, expected an object")
    found = {key: values[published] for key, published in _LINEAR_KEYS.items() if published in values}
    return Fields(f"{config.file}: linear_attn_config", {**config.values, **values, **found})


def _kinds(config: Fields, linear: Fields) -> list[str]:
    """Return the kind of each layer. The published lists number layers from 1."""
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
    # With True, transformers keeps a separate head and the authors' code does not. No published checkpoint sets it.
    config.require("tie_word_embeddings", (False,), False)
    linear = _linear(config)
    kda = Kda(
        num_heads=linear.integer("linear_num_heads"),
        head_dim=linear.integer("linear_head_dim"),
        conv_size=linear.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=config.number("rms_norm_eps"),
    )
    kinds: dict[str, Attention] = {_LINEAR: kda, _FULL: parse_mla(config, interleaved=True, rotated=False)}
    width = config.integer("moe_intermediate_size")
    return {
        "attention": tuple(kinds[name] for name in parse_layer_types(config, tuple(kinds), _kinds(config, linear))),
        "gate": parse_sigmoid_gate(config),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": _moe_layers(config),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": width * config.integer("n_shared_experts", minimum=0),
    }


_SPELLINGS = MappingProxyType(
    {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
)
_FAMILY = Family(
    parse=_parse,
    reference="KimiLinearForCausalLM",
    names=Names(linear="self_attn.", moe=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2")),
    spellings=_SPELLINGS,
)
FAMILIES = MappingProxyType({"kimi_linear": _FAMILY})
