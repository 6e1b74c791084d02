"""The index of a GGUF checkpoint: its tensors under the names that the model family has in safetensors. Pure.

llama.cpp's converter (conversion/, one class per architecture) decides what a file holds. Verified conventions:

- All experts of a layer are one tensor [E, rows, columns]. Here each is an entry of its own, a slice of that tensor.
- llama: rows of the query and key projections are permuted head by head (`LlamaModel.permute`).
- deepseek2: kv_b is two tensors, k_b transposed (`DeepseekV2Model.modify_tensors`). Older files have it as one.
- qwen3moe and olmoe: no tensor is changed.

Other architectures are refused. The settings come from a config.json (`gguf_config.py` makes one). Those that the file
repeats must be equal, because a variant of the same sizes with another rotation would answer nonsense.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

from moeyard_worker.checkpoint.gguf_header import GgufHeader, read_gguf_header
from moeyard_worker.checkpoint.index import CheckpointIndex, TensorEntry
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.models.families import FAMILIES
from moeyard_worker.models.family import Names
from moeyard_worker.models.model_config import ModelConfig

# Families by the `general.architecture` of the files that the converter writes for them.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qwen3moe": ("qwen3_moe",),
        "deepseek2": ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"),
        "olmoe": ("olmoe",),
        "llama": ("mixtral",),
    }
)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)", re.ASCII)
_EXPERTS = MappingProxyType({"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2})
# Modules of an attention and of a dense MLP, by their names in GGUF files.
_ATTENTION = MappingProxyType(
    {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    | {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm"}
    | {"attn_q_b": "q_b_proj", "attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm"}
    | {"attn_kv_b": "kv_b_proj", "attn_k_b": "k_b_proj", "attn_v_b": "v_b_proj"}
)
_MLP = MappingProxyType({"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"})


def open_gguf(file: Path | str, directory: Path | str, model: ModelConfig) -> CheckpointIndex:
    """Return the tensors of a GGUF file, and of all other files if it is split, for `model` of `directory`.

    Raises CheckpointError naming file and key.
    """
    headers = [read_gguf_header(each) for each in shards(Path(file))]
    _check_settings(headers[0], Path(directory), model)
    _check_split(headers)
    entries: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            for key, found in _named(header, name, entry, model):
                if key in entries:
                    raise header.error(name, f"is also in {entries[key].file.name}")
                entries[key] = found
    return CheckpointIndex(Path(directory), entries)


def shards(file: Path) -> list[Path]:
    """Return all files of a split checkpoint, or the file. Raises CheckpointError if one is missing."""
    split = _SHARD.fullmatch(file.name)
    if split is None:
        found = [file]
    else:
        found = [file.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf") for number in range(1, int(split[3]) + 1)]
    for each in found or [file]:
        if not each.exists():
            raise CheckpointError(f"{each}: no such file")
    if file not in found:
        raise CheckpointError(f"{file}: is not one of the {len(found)} files that its name tells of")
    return found


def _check_split(headers: list[GgufHeader]) -> None:
    for number, header in enumerate(headers):
        count = header.integer("split.count") or 1
        if count != len(headers):
            raise header.error("split.count", f"is {count}, but the file's name tells of {len(headers)}")
        if len(headers) > 1 and header.integer("split.no") != number:
            raise header.error("split.no", f"is {header.integer('split.no')}, but the file's name says {number}")
    total, found = headers[0].integer("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if total is not None and total != found:
        raise headers[0].error("split.tensors.count", f"is {total}, but the files hold {found} tensors")


def _check_settings(header: GgufHeader, directory: Path, model: ModelConfig) -> None:
    """Raise CheckpointError unless the file has the architecture and the settings of the model."""
    architecture = header.metadata.get("general.architecture")
    families = ARCHITECTURES.get(str(architecture))
    if families is None:
        raise header.error(
            "general.architecture", f"{architecture!r:.80} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    if model.family not in families:
        raise header.error(
            "general.architecture", f"is {architecture}, but {directory / 'config.json'} describes {model.family}"
        )
    attention, stored = model.attention[0], header.metadata
    rope = getattr(attention, "rope", None)
    expected = {
        "block_count": model.num_layers,
        "embedding_length": model.hidden_size,
        "attention.head_count": getattr(attention, "num_heads", None),
        "expert_count": model.num_experts,
        "expert_used_count": model.top_k,
        "attention.layer_norm_rms_epsilon": model.rms_eps,
        "expert_weights_scale": model.gate.rule.scaling,
        "rope.freq_base": None if rope is None else rope.theta,
    }
    for name, wanted in expected.items():
        key = f"{architecture}.{name}"
        value = stored.get(key)
        if value is not None and wanted is not None and not _same(value, wanted):
            raise header.error(key, f"is {value!r:.80}, but {directory / 'config.json'} says {wanted}")


def _same(stored: object, wanted: float) -> bool:
    """Return whether a stored number is `wanted`, which the file holds as an integer or as a float of 32 bits."""
    if not isinstance(stored, int | float) or isinstance(stored, bool):
        return False
    return stored == (wanted if isinstance(wanted, int) else struct.unpack("<f", struct.pack("<f", wanted))[0])


def _named(header: GgufHeader, name: str, entry: TensorEntry, model: ModelConfig) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the entries of a tensor by their names in the family's safetensors."""
    names = FAMILIES[model.family].names
    top = {"token_embd.weight": names.embed, "output_norm.weight": names.norm, "output.weight": names.lm_head}
    if name in top:
        yield top[name], entry
        return
    found = _LAYER.fullmatch(name)
    if found is None:
        raise header.error(name, "is a tensor that is not known")
    prefix, module, kind = names.layer.format(i=int(found[1])), found[2], found[3]
    if int(found[1]) >= model.num_layers:
        raise header.error(name, f"is of a layer that config.json does not have: it has {model.num_layers} layers")
    if module in _EXPERTS and kind == "weight" and len(entry.shape) == 3:
        count, *shape = entry.shape
        if count != model.num_experts:
            raise header.error(name, f"holds {count} experts, but config.json says {model.num_experts}")
        num_bytes = entry.num_bytes // count
        at = f"{prefix}{names.moe[0]}experts.{{}}.{names.expert[_EXPERTS[module]]}.weight"
        for expert in range(count):
            start = entry.start + expert * num_bytes
            yield at.format(expert), replace(entry, shape=tuple(shape), start=start, num_bytes=num_bytes)
        return
    key = _of_layer(module, kind, names)
    if key is None:
        raise header.error(name, "is a tensor that is not known")
    yield prefix + key, entry


def gguf_names(model: ModelConfig, names: Names) -> dict[str, str]:
    """Return the names in GGUF files by those of safetensors. Keys of experts contain {e} in place of a number."""
    found = {names.embed: "token_embd.weight", names.norm: "output_norm.weight", names.lm_head: "output.weight"}
    modules = (
        "attn_norm",
        "ffn_norm",
        "ffn_gate_inp",
        "exp_probs_b",
        *_ATTENTION,
        *_MLP,
        *(f"{m}_shexp" for m in _MLP),
    )
    for i in range(model.num_layers):
        at = names.layer.format(i=i)
        for prefix in names.moe:
            own = replace(names, moe=(prefix,))
            for module, kind in product(modules, ("weight", "bias")):
                if (key := _of_layer(module, kind, own)) is not None:
                    found[at + key] = f"blk.{i}.{module}.{kind}"
            for module, index in _EXPERTS.items():
                found[f"{at}{prefix}experts.{{e}}.{names.expert[index]}.weight"] = f"blk.{i}.{module}.weight"
    return found


def _of_layer(module: str, kind: str, names: Names) -> str | None:
    """Return the name of a layer's tensor after the layer's prefix, or None for an unknown one."""
    whole = {
        "attn_norm.weight": names.input_norm,
        "ffn_norm.weight": names.post_norm,
        "ffn_gate_inp.weight": names.moe[0] + names.gate,
        "exp_probs_b.bias": names.moe[0] + names.gate_bias,
    }
    if (found := whole.get(f"{module}.{kind}")) is not None:
        return found
    if module in _ATTENTION:
        return f"{names.attention}{_ATTENTION[module]}.{kind}"
    if module in _MLP:
        return f"{names.mlp}{_MLP[module]}.{kind}"
    shared = module.removesuffix("_shexp")
    return f"{names.moe[0]}{names.shared}{_MLP[shared]}.{kind}" if shared != module and shared in _MLP else None
