"""The families that are served, and the reading of a checkpoint's config.json. Pure: loads no torch.

An option that would change the numbers and is not implemented is refused with a CheckpointError, never ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moeyard_worker.checkpoint.formats.choose import QUANTISER_FILES, choose_format, quantiser, quantisers, refusal
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import DTYPE_BYTES
from moeyard_worker.config.fields import MAX_LAYERS, MAX_VOCAB, Fields, read_json
from moeyard_worker.config.rope_config import context_length, rope_fields
from moeyard_worker.models import deepseek, kimi_linear, mixtral, olmoe, qwen3_5_moe, qwen3_moe, qwen3_next
from moeyard_worker.models.family import Family, count_layers, max_position
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.tokenizer import read_tokenizer

# Over all layers; a check lists the tensors of each. Kimi-K2 has 23,040.
MAX_EXPERTS = 1 << 18
_IDS = ("bos_token_id", "eos_token_id")

# By `model_type` of config.json.
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        **deepseek.FAMILIES,
        **qwen3_moe.FAMILIES,
        **qwen3_next.FAMILIES,
        **qwen3_5_moe.FAMILIES,
        **kimi_linear.FAMILIES,
        **mixtral.FAMILIES,
        **olmoe.FAMILIES,
    }
)


def load_model_config(directory: Path | str, length: int | None = None) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's `eos_token`.

    `length` is the longest sequence to serve, None for the usual one. Raises CheckpointError naming file and key.
    """
    directory = Path(directory)
    path, generation = directory / "config.json", directory / "generation_config.json"
    stop, values = read_json(generation) if generation.exists() else {}, read_json(path)
    for name, method in QUANTISER_FILES.items():
        if (directory / name).exists() and not any(quantisers(Fields(str(path), values))):
            raise CheckpointError(f"{directory / name}: {refusal(quantiser(read_json(directory / name), method))}")
    model = parse_model_config(Fields(str(path), values), Fields(str(generation), stop)).for_length(length)
    eos = _tokenizer_eos(directory)
    if eos is None or eos >= model.vocab_size or eos in model.eos_token_ids:
        return model
    return replace(model, eos_token_ids=(*model.eos_token_ids, eos))


def _tokenizer_eos(directory: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`, at which vLLM ends an answer too."""
    try:
        files = read_tokenizer(directory)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    token = None if files is None else files.special_tokens.get("eos_token")
    return None if files is None or token is None else files.tokenizer.token_to_id(token)


def parse_model_config(config: Fields, stop: Fields) -> ModelConfig:
    """A model's config from the keys of its config.json and generation_config.json (`stop`, which may be empty)."""
    name = config.values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        also = "".join(f"; {key} is not supported either: {method}" for key, method, _ in quantisers(config))
        raise config.error("model_type", f"{name!r:.80} is not supported (supported: {', '.join(FAMILIES)}){also}")
    family = FAMILIES[name]
    if family.text_config:
        config = _text_part(config)
    config = _with_defaults(_respelt(config, family.spellings), stop, family.defaults)
    config.require("hidden_act", ("silu",), "silu")
    weights = choose_format(config)
    bos = config.integers("bos_token_id") or stop.integers("bos_token_id")
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise config.error("dtype", f"{dtype!r:.80} is not supported (supported: {', '.join(DTYPE_BYTES)})")
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
    for fields in (config, stop):
        _check_ids(fields, model.vocab_size)
    return model


def _with_defaults(config: Fields, stop: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return `config` with the class's values for keys that it lacks.

    A default token id is left out if generation_config.json (`stop`) has the key, or if the vocabulary is smaller.
    """
    complete = replace(config, values={**defaults, **config.values})
    vocab_size = complete.integer("vocab_size", maximum=MAX_VOCAB)
    unused = [k for k in _IDS if k not in config.values and (k in stop.values or defaults.get(k, 0) >= vocab_size)]
    return replace(complete, values={key: value for key, value in complete.values.items() if key not in unused})


def _respelt(config: Fields, spellings: tuple[tuple[str, str], ...]) -> Fields:
    """The same with what stands under another key under the one that is read, if nothing does."""
    values = config.values
    found = {ours: values[theirs] for ours, theirs in spellings if theirs in values and values.get(ours) is None}
    return replace(config, values={**values, **found}) if found else config


def _text_part(config: Fields) -> Fields:
    """What is said of the text model: under `text_config`, if there is such, and beside it."""
    values = config.values.get("text_config")
    if values is None:
        return config
    if not isinstance(values, dict):
        raise config.error("text_config", f"is {values!r:.80}, expected an object")
    # Whether embedding and head are one is decided for the whole model.
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
        raise config.error("layer_types", "names no layer of full attention, and a model without one is not served")
    if len(model.moe_layers) * model.num_experts > MAX_EXPERTS:
        what = f"{model.num_experts} experts in each of {len(model.moe_layers)} layers"
        raise config.error("num_hidden_layers", f"makes {what}, at most {MAX_EXPERTS} are served")
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
