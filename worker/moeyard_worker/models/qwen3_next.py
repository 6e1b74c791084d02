"""Qwen3-Next: Gated DeltaNet in most layers, gated grouped-query attention in the others; a gated shared expert.

Norms are stored less one, but for the one behind Gated DeltaNet. A layer of multi-token prediction, with full
attention, sits apart, and config.json need not tell of it. It reads the model's hidden state behind the last norm, and
then its own (vLLM's `qwen3_next_mtp.py`; llama.cpp #24025 and LightLLM #1402 measured that it was trained on that).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.model_config import GateConfig
from moeyard_worker.models.parsing import parse_gqa, parse_layer_types

_LINEAR, _FULL = "linear_attention", "full_attention"


def parse_gdn(config: Fields, *, by_key_head: bool) -> Gdn:
    """Gated DeltaNet under Qwen's keys."""
    num_k_heads, num_v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", f"is {num_v_heads}, no multiple of {num_k_heads} key heads")
    return Gdn(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=config.integer("linear_key_head_dim"),
        v_dim=config.integer("linear_value_head_dim"),
        conv_size=config.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=config.number("rms_norm_eps"),
        by_key_head=by_key_head,
    )


def parse_mixers(config: Fields, *, by_key_head: bool) -> tuple[Attention, ...]:
    """Both kinds of attention, layer by layer."""
    full = parse_gqa(
        config, default_theta=10_000.0, sliding_window=None, bias=config.boolean("attention_bias", False),
        qk_norm="head", partial_rope=0.25, gated=True,
    )  # fmt: skip
    kinds: dict[str, Attention] = {_LINEAR: parse_gdn(config, by_key_head=by_key_head), _FULL: full}
    interval = config.integer("full_attention_interval", 4)
    names = [_FULL if i % interval == 0 else _LINEAR for i in range(1, count_layers(config) + 1)]
    return tuple(kinds[name] for name in parse_layer_types(config, tuple(kinds), names))


def parse_experts(config: Fields, *, renormalize: bool) -> Mapping[str, Any]:
    """The experts of an MoE layer, and the gated one that all rows share."""
    rule = GateRule(top_k=config.integer("num_experts_per_tok"), scoring="softmax", renormalize=renormalize)
    return {
        "gate": GateConfig(rule=rule),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": config.integer("shared_expert_intermediate_size", minimum=0),
        "shared_gate": True,
    }


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, step = count_layers(config), config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers")
    return {
        **parse_experts(config, renormalize=config.boolean("norm_topk_prob", True)),
        "attention": parse_mixers(config, by_key_head=True),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    }


DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
})  # fmt: skip
NAMES = Names(
    shared="shared_expert.",
    draft_layer="mtp.layers.{i}.",
    draft_parts="mtp.",
    drafts_apart=True,
    token_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    join="fc.weight",
    draft_norm="norm.weight",
    norms_less_one=True,
)
_FAMILY = Family(parse=_parse, reference="Qwen3NextForCausalLM", defaults=DEFAULTS, names=NAMES)
FAMILIES = MappingProxyType({"qwen3_next": _FAMILY})
