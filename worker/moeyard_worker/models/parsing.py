"""Parsing of the keys of config.json that several families share. Pure."""

from collections.abc import Sequence
from typing import Literal

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import Fields
from moeyard_worker.config.rope_config import mla_softmax_scale, parse_rope, rope_fields
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.family import count_layers, max_position
from moeyard_worker.models.model_config import GateConfig


def parse_gqa(
    config: Fields,
    *,
    default_theta: float = 10_000.0,
    sliding_window: int | None = None,
    bias: bool = False,
    qk_norm: Literal["head", "all"] | None = None,
    partial_rope: float | None = None,
    gated: bool = False,
) -> Gqa:
    """Parse grouped-query attention under the usual keys. `gated`: the output has a gate, norms are stored less one."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    head_dim = config.optional_integer("head_dim") or config.integer("hidden_size") // num_heads
    fields = rope_fields(config, default_theta)
    return Gqa(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        qk_norm=qk_norm,
        norm_eps=config.number("rms_norm_eps"),
        sliding_window=sliding_window,
        rope=parse_rope(
            fields, dim=head_dim, interleaved=False, max_position=max_position(config), partial=partial_rope
        ),
        output_gate=gated,
        norm_less_one=gated,
    )


def parse_mla(config: Fields, *, interleaved: bool, rotated: bool = True) -> Mla:
    """Parse latent attention under DeepSeek's keys. Without `rotated` it uses the rope dimensions unrotated."""
    num_heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"is not {num_heads}: latent attention has one key per query head")
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    fields, rope = rope_fields(config, 10_000.0), None
    scale = float((nope_dim + rope_dim) ** -0.5)
    if rotated:
        scale = mla_softmax_scale(fields, nope_dim + rope_dim)
        rope = parse_rope(fields, dim=rope_dim, interleaved=interleaved, max_position=max_position(config))
    return Mla(
        num_heads=num_heads,
        q_lora_rank=config.optional_integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=scale,
        bias=config.boolean("attention_bias", False),
        rope=rope,
    )


def parse_sigmoid_gate(config: Fields) -> GateConfig:
    """Parse DeepSeek-V3's gate, whose correction bias is added for the choice only."""
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        num_groups=config.integer("n_group", 1),
        topk_groups=config.integer("topk_group", 1),
        group_score="top2sum",
        scaling=config.number("routed_scaling_factor"),
    )
    return GateConfig(rule=rule, bias=True, fp32_logits=True)


def parse_softmax_gate(config: Fields, *, renormalize: bool) -> GateConfig:
    """Parse the gate of the other families: the top k of a softmax."""
    rule = GateRule(top_k=config.integer("num_experts_per_tok"), scoring="softmax", renormalize=renormalize)
    return GateConfig(rule=rule)


def parse_sparse_layers(config: Fields) -> tuple[int, ...]:
    """Return the MoE layers by Qwen's keys: every `decoder_sparse_step`-th but those of `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return tuple(i for i in range(count_layers(config)) if i not in dense and (i + 1) % step == 0)


def parse_layer_types(
    config: Fields, known: tuple[str, ...], default: Sequence[str], *, key: str = "layer_types"
) -> Sequence[str]:
    """Return the kind of each layer from the list under `key`, or `default` if absent."""
    names = config.values.get(key)
    if names is None:
        return default
    if not isinstance(names, list) or len(names) != len(default):
        raise config.error(key, f"is {names!r:.80}, expected a list of {len(default)} names, one per layer")
    for name in names:
        if name not in known:
            raise config.error(key, f"has {name!r:.80}, which is not supported (supported: {', '.join(known)})")
    return names
