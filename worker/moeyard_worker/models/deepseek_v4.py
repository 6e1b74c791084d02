"""DeepSeek-V4 (Flash and Pro): hyper-connections, compressed attention, and experts in every layer.

The first layers choose experts by the token id. The hub's config.json has `compress_ratios`; transformers writes
`layer_types` and `compress_rates`. Both forms are read, and both spellings of tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.config.fields import MAX_VOCAB, Fields
from moeyard_worker.config.rope_config import parse_rope
from moeyard_worker.layers.compressed import BLOCK, SPARE, Compressed, IndexerConfig
from moeyard_worker.layers.residual import HyperConfig
from moeyard_worker.models.family import Family, Names, count_layers, max_position
from moeyard_worker.models.model_config import BlockDrafts, GateConfig
from moeyard_worker.models.parsing import parse_layer_types

# Positions per entry of each kind of layer, by transformers' name.
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = MappingProxyType({"sliding_attention": 0, _CSA: 4, _HCA: 128})
_HASH = "hash_moe"
# DSpark reads three layers in all releases, and has as many of its own.
_MOST_READ = 8
# A chunk of a prompt ends at multiples of the window and of every block.
_MOST_WINDOW = 4096


def _prepare(config: Fields) -> Fields:
    """Return `config` with the rotation of compressed layers under `rope_scaling`, as the hub's file has it."""
    values = dict(config.values)
    nested = values.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get("compress"), dict) and isinstance(nested.get("main"), dict):
        values["rope_scaling"] = dict(nested["compress"])
        values["rope_theta"] = nested["main"].get("rope_theta", values.get("rope_theta"))
        values["compress_rope_theta"] = nested["compress"].get("rope_theta", values.get("compress_rope_theta"))
        del values["rope_parameters"]
    if isinstance(values.get("rope_scaling"), dict):
        # The authors' code does not scale cos and sin. The share of rotated values is `qk_rope_head_dim`.
        values["rope_scaling"] = {**values["rope_scaling"], "attention_factor": 1.0, "partial_rotary_factor": 1.0}
    values.pop("partial_rotary_factor", None)
    if values.get("dspark_block_size") is not None:
        # The drafter DSpark takes the place of the layer of multi-token prediction.
        read = values.get("dspark_target_layer_ids")
        values["num_nextn_predict_layers"] = len(read) if isinstance(read, list) else 0
    quantised = values.get("quantization_config")
    if isinstance(quantised, dict) and values.get("expert_dtype") is not None:
        values["quantization_config"] = {**quantised, "expert_dtype": values["expert_dtype"]}
    return replace(config, values=values)


def _ratios(config: Fields) -> list[int]:
    """Return the positions per entry of each layer, 0 without entries."""
    num_layers, ratios = count_layers(config), config.values.get("compress_ratios")
    if ratios is None:
        default = [_HCA] * 2 + [_CSA if i % 2 else _HCA for i in range(num_layers)]
        kinds = parse_layer_types(config, tuple(_KINDS), default[:num_layers])
        rates = config.values.get("compress_rates") or {}
        if not isinstance(rates, dict) or any(_KINDS.get(name) != rate for name, rate in rates.items()):
            raise config.error("compress_rates", f"is {rates!r:.80}, expected 4 and 128, the rates of all releases")
        return [_KINDS[kind] for kind in kinds]
    # The layers of multi-token prediction follow.
    if not isinstance(ratios, list) or len(ratios) < num_layers:
        raise config.error("compress_ratios", f"is {ratios!r:.80}, expected a list of {num_layers} numbers or more")
    for ratio in ratios:
        if ratio not in _KINDS.values() or isinstance(ratio, bool):
            raise config.error("compress_ratios", f"has {ratio!r:.80}, which is not supported (supported: 0, 4, 128)")
    return ratios[:num_layers]


def _hash_layers(config: Fields) -> tuple[int, ...]:
    num_layers = count_layers(config)
    first = config.integer("num_hash_layers", 3, minimum=0)
    kinds = parse_layer_types(
        config, (_HASH, "moe"), [_HASH if i < first else "moe" for i in range(num_layers)], key="mlp_layer_types"
    )
    return tuple(i for i, kind in enumerate(kinds) if kind == _HASH)


def _attention(config: Fields) -> dict[int, Compressed]:
    """Return the attention of each kind of layer, by its positions per entry."""
    heads, dim, groups = (config.integer(key) for key in ("num_attention_heads", "head_dim", "o_groups"))
    config.require("num_key_value_heads", (1,), 1)
    config.require("attention_bias", (False,), False)
    rope_dim, window = config.integer("qk_rope_head_dim"), config.integer("sliding_window", maximum=_MOST_WINDOW)
    index_dim = config.integer("index_head_dim")
    if heads % groups:
        raise config.error("o_groups", f"is {groups}, which does not divide {heads} heads")
    if window % BLOCK:
        raise config.error("sliding_window", f"is {window}, expected a multiple of {BLOCK}")
    if rope_dim % 2 or rope_dim > min(dim, index_dim):
        raise config.error("qk_rope_head_dim", f"is {rope_dim}: expected an even number up to {min(dim, index_dim)}")
    for key, width in (("head_dim", dim), ("index_head_dim", index_dim)):
        if width % 16:
            raise config.error(key, f"is {width}, expected a multiple of 16")
    scaling: Any = config.values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise config.error("rope_scaling", f"is {scaling!r:.80}, expected an object")
    plain = Fields(config.file, {"rope_type": "default", "rope_theta": config.number("rope_theta")})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    stretched = {**scaling, "rope_type": kind, "rope_theta": config.number("compress_rope_theta")}
    ropes = [
        parse_rope(fields, dim=rope_dim, interleaved=True, max_position=max_position(config))
        for fields in (plain, Fields(f"{config.file}: rope_scaling", stretched))
    ]
    indexer = IndexerConfig(
        num_heads=config.integer("index_n_heads"),
        head_dim=index_dim,
        # With a larger one the indexer would have no work in any sequence.
        top_k=config.integer("index_topk", maximum=max(1, max_position(config) // _KINDS[_CSA])),
    )
    return {
        ratio: Compressed(
            num_heads=heads,
            head_dim=dim,
            q_rank=config.integer("q_lora_rank"),
            groups=groups,
            o_rank=config.integer("o_lora_rank"),
            window=window,
            ratio=ratio,
            rope=ropes[ratio > 0],
            norm_eps=config.number("rms_norm_eps"),
            indexer=indexer if ratio == _KINDS[_CSA] else None,
        )
        for ratio in _KINDS.values()
    }


def _block_drafts(config: Fields) -> BlockDrafts | None:
    """Return the settings of DSpark. Its name for the layers that it reads is target layers."""
    if config.values.get("dspark_block_size") is None:
        return None
    read, num_layers = config.integers("dspark_target_layer_ids"), count_layers(config)
    if not 0 < len(read) <= _MOST_READ or list(read) != sorted(set(read)) or read[-1] >= num_layers:
        raise config.error(
            "dspark_target_layer_ids",
            f"is {list(read)!r:.80}, expected 1 to {_MOST_READ} ascending layers below {num_layers}",
        )
    vocab_size = config.integer("vocab_size", maximum=MAX_VOCAB)
    return BlockDrafts(
        # All releases have blocks of five. The keys of a block have room in the slot.
        size=config.integer("dspark_block_size", maximum=SPARE),
        noise_token=config.integer("dspark_noise_token_id", minimum=0, maximum=vocab_size - 1),
        read_layers=read,
        markov_rank=config.integer("dspark_markov_rank"),
    )


def _parse(config: Fields) -> Mapping[str, Any]:
    config.require("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("norm_topk_prob", (True,), True)
    config.require("mlp_bias", (False,), False)
    config.require("tie_word_embeddings", (False,), False)
    num_layers, width = count_layers(config), config.integer("moe_intermediate_size")
    rule = GateRule(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sqrtsoftplus",
        renormalize=True,
        scaling=config.number("routed_scaling_factor"),
    )
    kinds, block = _attention(config), _block_drafts(config)
    return {
        "attention": tuple(kinds[ratio] for ratio in _ratios(config)),
        "draft_attention": replace(kinds[0], block=0 if block is None else block.size),
        "block_drafts": block,
        "gate": GateConfig(rule=rule, bias=True, fp32_logits=True),
        "intermediate_size": width,
        "moe_layers": tuple(range(num_layers)),
        "num_experts": config.integer("n_routed_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": width * config.integer("n_shared_experts", minimum=0),
        "hash_layers": _hash_layers(config),
        "swiglu_limit": config.number("swiglu_limit"),
        "hyper": HyperConfig(
            streams=config.integer("hc_mult", maximum=16),
            eps=config.number("hc_eps"),
            iterations=config.integer("hc_sinkhorn_iters", maximum=1000),
        ),
    }


_CONFIDENCE = "the confidence head of DSpark: the number of drafts follows from measured speed instead"
_HUB = Names(
    embed="embed.weight",
    norm="norm.weight",
    lm_head="head.weight",
    layer="layers.{i}.",
    input_norm="attn_norm.weight",
    post_norm="ffn_norm.weight",
    attention="attn.",
    linear="attn.",
    mlp="ffn.",
    moe=("ffn.",),
    gate_bias="gate.bias",
    expert=("w1", "w3", "w2"),
    shared_expert=("w1", "w3", "w2"),
    draft_layer="mtp.{i}.",
    draft_parts="mtp.0.",
    drafts_apart=True,
    draft_norm="norm.weight",
    skipped=tuple((f"mtp.{i}.confidence_head.", _CONFIDENCE) for i in range(_MOST_READ)),
)
# Files that transformers has written.
_SAVED = replace(
    _HUB,
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    layer="model.layers.{i}.",
    hyper_head="model.hc_head.hc_",
    renamed=MappingProxyType({"kv_norm.weight": "norm.weight"}),
)
_FAMILY = Family(
    parse=_parse,
    reference="DeepseekV4ForCausalLM",
    names=_HUB,
    other_names=(_SAVED,),
    spellings=MappingProxyType({"n_routed_experts": "num_local_experts"}),
    prepare=_prepare,
)
FAMILIES = MappingProxyType({"deepseek_v4": _FAMILY})
