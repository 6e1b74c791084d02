"""OLMoE: grouped-query attention whose norms run over all heads together; MoE in every layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import Fields
from moeyard_worker.models.family import Family, count_layers
from moeyard_worker.models.parsing import parse_gqa, parse_softmax_gate


def _parse(config: Fields) -> Mapping[str, Any]:
    num_layers, hidden = count_layers(config), config.integer("hidden_size")
    # transformers gives a window to the attention function but not to the mask, so only some functions apply it.
    for key in ("clip_qkv", "sliding_window"):
        if config.values.get(key) is not None:
            raise config.error(key, "is not supported (supported: null)")
    attention = parse_gqa(config, bias=config.boolean("attention_bias", False), qk_norm="all")
    # The norm of all query heads has one weight for each of hidden_size values.
    if attention.num_heads * attention.head_dim != hidden:
        raise config.error("head_dim", f"is {attention.head_dim}: {attention.num_heads} heads are not {hidden} wide")
    width = config.integer("intermediate_size")
    return {
        "attention": (attention,) * num_layers,
        "gate": parse_softmax_gate(config, renormalize=config.boolean("norm_topk_prob", False)),
        "intermediate_size": width,
        "moe_layers": tuple(range(num_layers)),
        "num_experts": config.integer("num_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": 0,
    }


_FAMILY = Family(
    parse=_parse, reference="OlmoeForCausalLM", spellings=MappingProxyType({"num_experts": "num_local_experts"})
)
FAMILIES = MappingProxyType({"olmoe": _FAMILY})
