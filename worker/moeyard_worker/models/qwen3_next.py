"""Qwen3-Next: Gated DeltaNet in most layers, gated grouped-query attention in the others; a gated shared expert.

Norms are stored less one, except the norm behind Gated DeltaNet. The layer of multi-token prediction has full attention
and separate names, and config.json need not mention it. It reads the model's hidden state behind the last norm. For
further tokens it reads its own output, as in vLLM (`qwen3_next_mtp.py`). Measurements show that it was trained that way
(llama.cpp #24025, LightLLM #1402).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.models.family import Family, Names, count_layers
from moeyard_worker.models.parsing import parse_gqa, parse_layer_types, parse_softmax_gate, parse_sparse_layers

_LINEAR, _FULL = "linear_attention", "full_attention"


def parse_gdn(config: Fields, *, by_key_head: bool) -> Gdn:
    """Parse Gated DeltaNet under Qwen's keys."""
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


def parse_attention(config: Fields, *, by_key_head: bool) -> tuple[Attention, ...]:
    """Parse the attention of each layer, of either kind."""
    bias = config.boolean("attention_bias", False)
    full = parse_gqa(config, bias=bias, qk_norm="head", partial_rope=0.25, gated=True)
    kinds: dict[str, Attention] = {_LINEAR: parse_gdn(config, by_key_head=by_key_head), _FULL: full}
    interval = config.integer("full_attention_interval", 4)
    names = [_FULL if i % interval == 0 else _LINEAR for i in range(1, count_layers(config) + 1)]
    return tuple(kinds[name] for name in parse_layer_types(config, tuple(kinds), names))


def parse_experts(config: Fields, *, renormalize: bool) -> Mapping[str, Any]:
    """Parse the experts of an MoE layer, and its gated shared expert."""
    return {
        "gate": parse_softmax_gate(config, renormalize=renormalize),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": config.integer("shared_expert_intermediate_size", minimum=0),
        "shared_gate": True,
    }


def _parse(config: Fields) -> Mapping[str, Any]:
    return {
        **parse_experts(config, renormalize=config.boolean("norm_topk_prob", True)),
        "attention": parse_attention(config, by_key_head=True),
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": parse_sparse_layers(config),
    }


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
_FAMILY = Family(parse=_parse, reference="Qwen3NextForCausalLM", names=NAMES)
FAMILIES = MappingProxyType({"qwen3_next": _FAMILY})
