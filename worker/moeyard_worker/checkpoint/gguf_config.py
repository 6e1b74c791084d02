"""The settings of a model (config.json, generation_config.json) out of the metadata of a GGUF file, and into it. Pure.

llama.cpp's converter (conversion/) wrote the keys, and its graphs (src/models/) define a file where no key does: the
experts' weights of qwen3moe and llama are normalised, and those of olmoe are not. A setting is taken over only if the
file determines it. Otherwise, and for a key that is not known here, CheckpointError names the key.

Two settings of deepseek2 are not stored, and llama.cpp's reading of them is used. YaRN's `mscale` equals
`mscale_all_dim`, as in all published models. Files without `expert_gating_func` have DeepSeek-V2's softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from moeyard_worker.checkpoint.gguf_header import GgufHeader, Value
from moeyard_worker.checkpoint.gguf_index import ARCHITECTURES
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from moeyard_worker.config.rope_config import rope_fields
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.families import parse_model_config
from moeyard_worker.models.model_config import ModelConfig

_ADVICE = "give the directory of the original config.json with --hf-config-path DIR"
_SOFTMAX, _SIGMOID = 1, 2
_ENDS = ("eos", "eot", "eom")
_ROPE_KINDS = MappingProxyType({"none": "default", "linear": "linear", "yarn": "yarn"})
# Keys of generation_config.json by the `general.sampling` keys that say the same.
_SAMPLING = MappingProxyType(
    {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    | {"penalty_repeat": "repetition_penalty"}
)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of an architecture, without its prefix. Records which were read."""

    fields: Fields
    prefix: str
    read: set[str] = field(default_factory=set)

    def full(self, key: str) -> str:
        """Return the whole key, and record that it was read."""
        self.read.add(self.prefix + key)
        return self.prefix + key

    def has(self, key: str) -> bool:
        return self.prefix + key in self.fields.values

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_POSITIONS) -> int:
        return self.fields.integer(self.full(key), default, minimum=minimum, maximum=maximum)

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self.fields.number(self.full(key), default))

    def boolean(self, key: str, default: bool) -> bool:
        return self.fields.boolean(self.full(key), default)

    def same(self, key: str, wanted: int) -> None:
        """Raise CheckpointError if the file has the key with another value."""
        found = self.integer(key, wanted)
        if found != wanted:
            raise self.error(key, f"is {found}, but {wanted} follows from the rest of the file")

    def error(self, key: str, message: str) -> CheckpointError:
        return self.fields.error(self.prefix + key, message)


def shortest(value: float) -> float:
    """Return the shortest decimal number with this fp32 value: 1e-06 for the fp32 number next to it.

    A number of config.json with up to 6 digits comes back from a file as it was.
    """
    return float(str(np.float32(value))) if abs(value) <= float(np.finfo(np.float32).max) else value


def gguf_config(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return config.json of the model whose tensors have these `shapes`, by their names in the file.

    The dtype is bfloat16, because all weights of such a file become that. Layers of multi-token prediction are not
    part of such files. Raises CheckpointError naming the file, the key and the flag that helps.
    """
    fields = Fields(str(header.file), {**header.metadata, **header.arrays})
    architecture = fields.require("general.architecture", tuple(_ARCHITECTURES), None)
    keys = _Keys(fields, f"{architecture}.")
    try:
        config = {**_common(keys, shapes), **_ARCHITECTURES[architecture](keys), **_token_ids(fields)}
        unread = sorted(key for key in fields.values if key.startswith(keys.prefix) and key not in keys.read)
        if unread:
            raise fields.error(unread[0], "is a key that is not known")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_ADVICE}") from None
    return config


def gguf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """Return the sampling defaults that the file stores, under the keys of generation_config.json."""
    found = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


def _common(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the settings that all architectures store alike."""
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise keys.fields.error("token_embd.weight", "is missing")
    keys.same("vocab_size", embedding[0])
    return {
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.integer("block_count", maximum=MAX_LAYERS),
        "max_position_embeddings": keys.integer("context_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "num_key_value_heads": keys.integer("attention.head_count_kv"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "rope_parameters": _rope(keys),
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    kind = keys.fields.require(keys.full("rope.scaling.type"), tuple(_ROPE_KINDS), "none")
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base"), "rope_type": _ROPE_KINDS[kind]}
    if kind == "none":
        return rope
    rope["factor"] = keys.number("rope.scaling.factor")
    if kind == "linear":
        return rope
    rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    rope["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    rope["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    if keys.has("rope.scaling.yarn_attn_factor"):
        rope["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
    if keys.has("rope.scaling.yarn_log_multiplier"):
        # The converter stores a tenth.
        mscale = float(f"{10 * keys.number('rope.scaling.yarn_log_multiplier'):.6g}")
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def _head_dim(keys: _Keys) -> int:
    """Return the width of a head. The whole head is rotated."""
    width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", width // heads)
    keys.same("attention.value_length", head_dim)
    keys.same("rope.dimension_count", head_dim)
    return head_dim


def _qwen3moe(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "head_dim": _head_dim(keys),
        "num_experts": keys.integer("expert_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _olmoe(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "olmoe",
        "head_dim": _head_dim(keys),
        "num_experts": keys.integer("expert_count"),
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
    }


def _llama(keys: _Keys) -> dict[str, Any]:
    if not keys.has("expert_count"):
        raise keys.error("expert_count", "is missing, and only models with experts are served")
    return {
        "model_type": "mixtral",
        "head_dim": _head_dim(keys),
        "num_local_experts": keys.integer("expert_count"),
        "sliding_window": None,
    }


def _deepseek2(keys: _Keys) -> dict[str, Any]:
    gating = keys.fields.require(keys.full("expert_gating_func"), (_SOFTMAX, _SIGMOID), _SOFTMAX)
    sigmoid = gating == _SIGMOID
    groups, used = keys.integer("expert_group_count"), keys.integer("expert_group_used_count")
    normalised = keys.boolean("expert_weights_norm", False)
    if not sigmoid and groups > 1:
        raise keys.error("expert_group_count", f"is {groups}, and no key says how DeepSeek-V2 chooses groups")
    # Since 2025 the lengths are those of the compressed cache, and those of a head have keys of their own.
    own = "_mla" if keys.has("attention.key_length_mla") else ""
    for key in ("attention.key_length", "attention.value_length"):
        keys.full(key)
    rotated = keys.integer("rope.dimension_count")
    heads = keys.integer("attention.head_count")
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else "greedy",
        "n_group": groups,
        "topk_group": used,
        "norm_topk_prob": normalised,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", minimum=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", minimum=0),
        "moe_layer_freq": 1,
        "num_key_value_heads": heads,
        "q_lora_rank": keys.integer("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys.integer(f"attention.key_length{own}") - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.integer(f"attention.value_length{own}"),
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }


_ARCHITECTURES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = MappingProxyType(
    {"qwen3moe": _qwen3moe, "deepseek2": _deepseek2, "olmoe": _olmoe, "llama": _llama}
)


def _token_ids(fields: Fields) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text. Turns and messages may end with tokens of their own."""
    bos = fields.integers("tokenizer.ggml.bos_token_id")
    ends = (fields.integers(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    return {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": list(dict.fromkeys(i for ids in ends for i in ids)),
    }


def gguf_keys(model: ModelConfig, config: Fields) -> dict[str, Value]:
    """Return the keys from which `gguf_config` makes the settings of `model` again; its config.json is `config`.

    Raises CheckpointError for another family, and naming the settings that have no keys.
    """
    architecture = next((name for name, families in ARCHITECTURES.items() if model.family in families), None)
    if architecture is None:
        supported = ", ".join(family for families in ARCHITECTURES.values() for family in families)
        raise config.error("model_type", f"is {model.family}, which has no GGUF form here (supported: {supported})")
    attention = model.attention[0]
    keys: dict[str, Value] = {
        "block_count": model.num_layers,
        "context_length": config.integer("max_position_embeddings", model.max_position, maximum=MAX_POSITIONS),
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "attention.layer_norm_rms_epsilon": model.rms_eps,
        "expert_count": model.num_experts,
        "expert_used_count": model.top_k,
        **_rope_keys(attention, config),
    }
    if isinstance(attention, Mla):
        keys |= _mla_keys(model, attention)
    elif isinstance(attention, Gqa):
        keys |= {"attention.head_count": attention.num_heads, "attention.head_count_kv": attention.num_kv_heads}
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), attention.head_dim)
        keys["rope.dimension_count"] = attention.head_dim
    if architecture in ("qwen3moe", "deepseek2"):
        keys["expert_feed_forward_length"] = model.moe_intermediate_size
    found = {f"{architecture}.{key}": value for key, value in keys.items()}
    found["general.architecture"] = architecture
    ids = {"bos": model.bos_token_id, **dict(zip(_ENDS, model.eos_token_ids, strict=False))}
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    _check_keys(found, model, config)
    return found


def sampling_keys(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the keys for the sampling defaults of a generation_config.json."""
    numbers = {key: config.get(name) for key, name in _SAMPLING.items()}
    return {f"general.sampling.{key}": number for key, number in numbers.items() if isinstance(number, int | float)}


def _rope_keys(attention: Attention, config: Fields) -> dict[str, Value]:
    rope = attention.rope
    assert rope is not None, "every architecture rotates"
    keys: dict[str, Value] = {"rope.freq_base": rope.theta}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_max_position
        keys |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
        stored = rope_fields(config, rope.theta)
        if stored.values.get("attention_factor") is not None:
            keys["rope.scaling.yarn_attn_factor"] = stored.number("attention_factor")
        if stored.values.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * stored.number("mscale_all_dim")
    return keys


def _mla_keys(model: ModelConfig, attention: Mla) -> dict[str, Value]:
    rule, rank, width = model.gate.rule, attention.kv_lora_rank, model.moe_intermediate_size
    keys: dict[str, Value] = {
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + attention.rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": attention.qk_dim,
        "attention.value_length_mla": attention.v_dim,
        "rope.dimension_count": attention.rope_dim,
        "leading_dense_block_count": model.moe_layers[0],
        "expert_shared_count": model.shared_intermediate_size // width,
        "expert_weights_scale": rule.scaling,
        "expert_weights_norm": rule.renormalize,
        "expert_gating_func": _SIGMOID if rule.scoring == "sigmoid" else _SOFTMAX,
        "expert_group_count": rule.num_groups,
        "expert_group_used_count": rule.topk_groups,
    }
    if attention.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = attention.q_lora_rank
    return keys


def _check_keys(keys: Mapping[str, Value], model: ModelConfig, config: Fields) -> None:
    """Raise CheckpointError unless the keys give the settings of the model."""
    stored = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in keys.items()}
    shapes = {"token_embd.weight": (model.vocab_size, model.hidden_size)}
    shapes |= {} if model.tie_word_embeddings else {"output.weight": shapes["token_embd.weight"]}
    made = gguf_config(GgufHeader(Path(config.file), stored, {}, {}), shapes)
    found = parse_model_config(Fields(config.file, made), Fields(config.file, {}), gguf=True).for_length(None)
    # The stored tensors, and layers that the file does not have, are no settings of the model.
    wanted = replace(model, weights=found.weights, dtype=found.dtype, num_mtp_layers=0, family=found.family)
    names = [each.name for each in fields(model) if getattr(wanted, each.name) != getattr(found, each.name)]
    if names:
        raise CheckpointError(
            f"{config.file}: cannot be stored in a GGUF file, which has no keys for {', '.join(names)}"
        )
