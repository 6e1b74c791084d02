"""The supported model families, and the parsing of a checkpoint's config.json. Pure: loads no torch.

An option that would change the results and is not implemented raises CheckpointError. None is ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard_worker.checkpoint.formats.choose import check_settings_files, choose_format, quantisations
from moeyard_worker.checkpoint.formats.compressed_tensors import stored_int4_scales
from moeyard_worker.checkpoint.formats.fp8 import stored_scales
from moeyard_worker.checkpoint.formats.gguf import GgufFormat, SplitKvScheme
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import DTYPE_BYTES
from moeyard_worker.config.fields import MAX_LAYERS, MAX_VOCAB, Fields, read_json, shown
from moeyard_worker.config.rope_config import context_length, rope_fields
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models import deepseek, deepseek_v4, kimi_linear, mixtral, olmoe, qwen3_5_moe, qwen3_moe, qwen3_next
from moeyard_worker.models.family import Family, count_layers, max_position
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.tokenizer import read_tokenizer

# Over all layers, because the check of a checkpoint lists every expert's tensors. Kimi-K2 has 23,040.
MAX_EXPERTS = 1 << 18
_IDS = ("bos_token_id", "eos_token_id")
# The values of transformers' config classes for keys that config.json lacks, by the `reference` of the family.
_DEFAULTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))
)

# By `model_type` of config.json.
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        **deepseek.FAMILIES,
        **deepseek_v4.FAMILIES,
        **qwen3_moe.FAMILIES,
        **qwen3_next.FAMILIES,
        **qwen3_5_moe.FAMILIES,
        **kimi_linear.FAMILIES,
        **mixtral.FAMILIES,
        **olmoe.FAMILIES,
    }
)


def load_model_config(directory: Path | str, length: int | None = None, *, gguf: bool = False) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's `eos_token`.

    `length` is the longest sequence to serve; None is the model's default. With `gguf` the weights are in GGUF files,
    and the quantisation of the directory's own weights does not matter. Raises CheckpointError naming file and key.
    """
    directory = Path(directory)
    path, generation = directory / "config.json", directory / "generation_config.json"
    stop = Fields(str(generation), read_json(generation) if generation.exists() else {})
    config = Fields(str(path), read_json(path))
    if not gguf:
        check_settings_files(config, directory)
    model = parse_model_config(config, stop, gguf=gguf).for_length(length)
    eos = _tokenizer_eos(directory)
    if eos is None or eos >= model.vocab_size or eos in model.eos_token_ids:
        return model
    return replace(model, eos_token_ids=(*model.eos_token_ids, eos))


def _tokenizer_eos(directory: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`. vLLM also stops at it."""
    try:
        files = read_tokenizer(directory)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    token = None if files is None else files.special_tokens.get("eos_token")
    return None if files is None or token is None else files.tokenizer.token_to_id(token)


def parse_model_config(config: Fields, stop: Fields, *, gguf: bool = False) -> ModelConfig:
    """Parse the keys of config.json and of generation_config.json (`stop`, which may be empty).

    With `gguf` the weights are in GGUF files.
    """
    name = config.values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        also = "".join(f"; {key} is not supported either: {method}" for key, method, _ in quantisations(config))
        raise config.error("model_type", f"{shown(name)} is not supported (supported: {', '.join(FAMILIES)}){also}")
    family = FAMILIES[name]
    if family.text_config:
        config = _text_part(config)
    if family.prepare is not None:
        config = family.prepare(config)
    config = _with_defaults(_respelt(config, family.spellings), stop, _DEFAULTS[family.reference])
    config.require("hidden_act", ("silu",), "silu")
    weights = GgufFormat() if gguf else choose_format(config)
    bos = config.integers("bos_token_id") or stop.integers("bos_token_id")
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if dtype == "float16" and isinstance(weights, GgufFormat | QuantizedFormat):
        # GPTQ and AWQ compute in float16. Here every quantised weight is served as bfloat16.
        dtype = "bfloat16"
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise config.error("dtype", f"{shown(dtype)} is not supported (supported: {', '.join(DTYPE_BYTES)})")
    model = ModelConfig(
        **family.parse(config),
        family=name,
        weights=weights,
        hidden_size=config.integer("hidden_size"),
        num_layers=count_layers(config),
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCAB),
        max_position=context_length(rope_fields(config, 1.0), max_position(config)),
        rms_eps=config.number("rms_norm_eps"),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(stop.integers("eos_token_id") + config.integers("eos_token_id"))),
        dtype=dtype,
        num_mtp_layers=config.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS),
    )
    _check(config, model)
    if isinstance(weights, GgufFormat):
        model = replace(model, weights=gguf_format(model))
    for fields in (config, stop):
        _check_ids(fields, model.vocab_size)
    return model


def gguf_format(model: ModelConfig) -> GgufFormat:
    """Return how the converter of llama.cpp stores the attention of a model."""
    attention = model.attention[0]
    if isinstance(attention, Mla):
        return GgufFormat(split_kv=SplitKvScheme(attention.num_heads, attention.nope_dim, attention.v_dim))
    if isinstance(attention, Gqa) and model.family == "mixtral":
        return GgufFormat(paired=attention.head_dim)
    return GgufFormat()


def with_codes(model: ModelConfig, directory: Path | str | None, *, dense: bool = False) -> ModelConfig:
    """Return the model whose experts keep their codes in memory.

    Their codes become bfloat16 if experts differ, or if no product reads them. `directory` is the checkpoint, None for
    random weights. Its headers show the dtypes of scales. With `dense` other matrices keep their codes, too, as
    far as products read them.
    """
    weights, family = model.weights, FAMILIES[model.family]
    if not isinstance(weights, QuantizedFormat):
        return model
    if directory is not None and None in (weights.scales, weights.int4_scales):
        weights = _with_stored_scales(weights, directory)
    experts = []
    # Only the stored tensors show which names apply, so all of them must promise the same.
    for names in (family.names, *family.other_names):
        for i in model.moe_layers:
            layer = names.of_layer(i, model.num_layers)
            gate, up, down = (f"{layer}{names.moe[0]}experts.0.{name}" for name in names.expert)
            experts.append((gate, up, down))
    sizes = {"hidden": model.hidden_size, "intermediate": model.moe_intermediate_size}
    return replace(model, weights=weights.with_codes(experts, dense=dense, **sizes))


def _with_stored_scales(weights: QuantizedFormat, directory: Path | str) -> QuantizedFormat:
    try:
        entries = open_index(directory).entries
    except CheckpointError:
        # The weights are not downloaded yet, or `check_weights` reports the error.
        return weights
    dtypes = {key: entry.dtype for key, entry in entries.items()}
    return replace(weights, scales=stored_scales(dtypes), int4_scales=stored_int4_scales(dtypes))


def _with_defaults(config: Fields, stop: Fields, defaults: dict[str, Any]) -> Fields:
    """Return `config` with `defaults` for the keys that it lacks. A key that is null stays null.

    A default token id does not apply if generation_config.json (`stop`) has the key or if the vocabulary is smaller.
    """
    complete = replace(config, values={**defaults, **config.values})
    vocab_size = complete.integer("vocab_size", maximum=MAX_VOCAB)
    unused = [k for k in _IDS if k not in config.values and (k in stop.values or defaults.get(k, 0) >= vocab_size)]
    return replace(complete, values={key: value for key, value in complete.values.items() if key not in unused})


def _respelt(config: Fields, spellings: Mapping[str, str]) -> Fields:
    """Return `config` with values under other spellings moved to the keys that are read, where those are absent."""
    values = config.values
    found = {key: values[other] for key, other in spellings.items() if other in values and values.get(key) is None}
    return replace(config, values={**values, **found})


def _text_part(config: Fields) -> Fields:
    """Return the settings of the text model: those under `text_config`, then those at the top level."""
    values = config.values.get("text_config")
    if values is None:
        return config
    if not isinstance(values, dict):
        raise config.error("text_config", f"is {values!r:.80}, expected an object")
    # The top level decides whether the embedding is tied to the head.
    tied = config.values.get("tie_word_embeddings", values.get("tie_word_embeddings"))
    return Fields(f"{config.file}: text_config", {**config.values, **values, "tie_word_embeddings": tied})


def _check_ids(fields: Fields, vocab_size: int) -> None:
    for key in _IDS:
        outside = [i for i in fields.integers(key) if i >= vocab_size]
        if outside:
            raise fields.error(key, f"names token {outside[0]}, which is outside the vocabulary of {vocab_size}")


def _check(config: Fields, model: ModelConfig) -> None:
    if not model.moe_layers:
        raise config.error("num_hidden_layers", f"is {model.num_layers} and no layer is a Mixture-of-Experts layer")
    if not model.state_spec(1).bytes_per_token:
        raise config.error("layer_types", "names no layer of full attention, which every supported model has")
    if len(model.moe_layers) * model.num_experts > MAX_EXPERTS:
        count = f"{model.num_experts} experts in each of {len(model.moe_layers)} layers"
        raise config.error("num_hidden_layers", f"gives {count}, at most {MAX_EXPERTS} in all are supported")
    if model.top_k > model.num_experts:
        raise config.error("num_experts_per_tok", f"is {model.top_k}, more than the {model.num_experts} experts")
    rule = model.gate.rule
    if model.num_experts % rule.num_groups or rule.topk_groups > rule.num_groups:
        raise config.error("n_group", f"is {rule.num_groups} of {model.num_experts} experts, top {rule.topk_groups}")
    per_group = model.num_experts // rule.num_groups
    if rule.topk_groups * per_group < rule.top_k:
        raise config.error("topk_group", f"is {rule.topk_groups}: too few experts to choose {rule.top_k} from")
    if rule.group_score == "top2sum" and per_group < 2:
        raise config.error(
            "n_group", f"is {rule.num_groups}: a group needs at least 2 of the {model.num_experts} experts"
        )
