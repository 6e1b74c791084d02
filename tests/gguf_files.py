"""Write GGUF files from checkpoints of `tests/checkpoints.py`, and the checkpoints that they stand for.

The files follow llama.cpp's converter: names from the `gguf` package's own table, F32 vectors and router gates, stacked
experts, the permutation of llama and the split of deepseek2. The converter runs on the positions of the elements, so
that the expected weights need no inverse of it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_config

from moeyard_worker.config.fields import read_json

ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "kimi_k2": gguf.MODEL_ARCH.DEEPSEEK2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
}
TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "BF16", "F16", "F32")
# The bytes of a block that hold fp16 scales.
SCALES = {"Q8_0": (0, 2), "Q4_0": (0, 2), "Q4_K": (0, 4), "Q6_K": (208, 210)}
Tensors = dict[str, torch.Tensor]


def random_blocks(name: str, count: int, generator: np.random.Generator, *, weights: bool = True) -> np.ndarray:
    """Return random blocks, uint8 [count, bytes]. Scales are those of weights near 0.1, or any finite fp16 number."""
    blocks = generator.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]), np.uint8)
    for at in range(*SCALES[name], 2):
        if weights:
            scales = generator.uniform(1e-4, 1e-3, count).astype(np.float16).view(np.uint16)
        else:
            scales = generator.integers(0, 1 << 16, count).astype(np.uint16)
            scales = np.where((scales & 0x7C00) == 0x7C00, scales & 0x83FF, scales).astype(np.uint16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def encode(name: str, values: torch.Tensor, generator: np.random.Generator) -> tuple[np.ndarray, str, torch.Tensor]:
    """Return (stored bytes, type, fp32 values) of a tensor in type `name`, or in a wider one if its rows do not fit."""
    kind = gguf.GGMLQuantizationType[name]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        return encode("Q8_0" if name in ("Q4_K", "Q6_K") else "F16", values, generator)
    array = values.float().contiguous().numpy()
    if name in SCALES:
        blocks, size = random_blocks(name, array.size // gguf.GGML_QUANT_SIZES[kind][0], generator), array.shape
        raw = blocks.reshape(*size[:-1], -1)
    else:
        raw = gguf.quants.quantize(array, kind)
    return raw, name, torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(array.shape).copy())


def convert(tensors: Tensors, config: Mapping[str, Any], *, whole_kv: bool = False) -> Tensors:
    """Return the tensors of a checkpoint as the converter stores them, by their names in GGUF files.

    `whole_kv`: kv_b as one tensor, as in files before 2025.
    """
    layers, family = config["num_hidden_layers"], config["model_type"]
    table = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    found: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}

    def add(key: str, tensor: torch.Tensor) -> None:
        name = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        found[name] = tensor

    for key, tensor in tensors.items():
        head, experts, rest = key.partition(".experts.")
        if experts:
            number, _, module = rest.partition(".")
            merged = f"{head}.experts.{module}"
            if family == "mixtral":
                merged = merged.replace("model.", "", 1).replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(merged, {})[int(number)] = tensor
        elif family == "mixtral" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
            add(key, tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2))
        elif key.endswith("kv_b_proj.weight") and not whole_kv:
            sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
            k_b, v_b = tensor.unflatten(0, (config["num_attention_heads"], -1)).split(sizes, dim=1)
            add(key.replace("kv_b_proj", "k_b_proj"), k_b.transpose(1, 2))
            add(key.replace("kv_b_proj", "v_b_proj"), v_b)
        else:
            add(key.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)
    for key, stack in stacks.items():
        add(key, torch.stack([stack[number] for number in sorted(stack)]))
    return found


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the converter writes for a config.json (conversion/base.py and one file per architecture).

    `rope_parameters` is transformers' own spelling, which the converter also reads.
    """
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    rope, mla = config["rope_parameters"], arch == "deepseek2"
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1 if mla else config["num_key_value_heads"],
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_count": next(
            config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in config
        ),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            keys[f"rope.scaling.yarn_{name}"] = float(rope[name]) if name in rope else None
        if "mscale_all_dim" in rope:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if arch == "llama":
        keys["vocab_size"] = config["vocab_size"]
        keys["rope.dimension_count"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if mla:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        keys |= {
            "vocab_size": config["vocab_size"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": True if config.get("norm_topk_prob") else None,
            "rope.dimension_count": rotated,
            # transformers' classes do not write `scoring_func`, which all published files have.
            "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
        }
    ids = {name: config.get(f"{name}_token_id") for name in ("bos", "eos")}
    whole = {f"{arch}.{key}": value for key, value in keys.items()}
    whole |= {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()}
    return {key: value for key, value in whole.items() if value is not None}


def tokenizer_keys(directory: Path, pre: str, size: int) -> dict[str, Any]:
    """Return the keys that the converter writes for a tokenizer.json, in a model of `size` tokens."""
    spec, config = (read_json(directory / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    added = {token["id"]: token for token in spec["added_tokens"]}
    texts = {number: text for text, number in spec["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(size)]
    template = directory / "chat_template.jinja"
    ids = {text: number for number, text in texts.items()}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kind if i in texts else 5 for i, kind in enumerate(types)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": "SpecialToken" in str(spec["post_processor"]),
        "tokenizer.chat_template": template.read_text() if template.exists() else config["chat_template"],
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if config.get(f"{name}_token"):
            keys[f"tokenizer.ggml.{key}_token_id"] = ids[config[f"{name}_token"]]
    return keys


def write_gguf(
    source: Path,
    plain: Path,
    file: Path,
    choose: Callable[[str], str],
    *,
    shards: int = 1,
    whole_kv: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint `source` to `file` (`file`-00001-of-N.gguf with `shards`), and return the first file.

    `choose` returns a matrix's type by its name. `metadata` replaces keys, and None removes one. `plain`
    becomes the bfloat16 checkpoint of the same weights.
    """
    config, tensors = read_json(source / "config.json"), load_file(source / "model.safetensors")
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).float()
    expected, positions, start = torch.full_like(flat, torch.nan), {}, 0
    for key, tensor in tensors.items():
        positions[key] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        start += tensor.numel()
    generator, stored = np.random.default_rng(0), {}
    for name, index in convert(positions, config, whole_kv=whole_kv).items():
        kind = "F32" if index.dim() == 1 or "ffn_gate_inp" in name else choose(name)
        raw, kind, values = encode(kind, flat[index], generator)
        stored[name] = (raw, kind)
        expected[index.flatten()] = values.flatten()
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=-(-len(stored) // shards) if shards > 1 else 0)
    for key, value in {**described(config), **(metadata or {})}.items():
        if value is None:
            continue
        # The converter writes 32 bits.
        kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(key, value, kinds.get(type(value)) or gguf.GGUFValueType.get_type(value))
    for name, (raw, kind) in stored.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_plain(plain, source, {key: expected[index] for key, index in positions.items()})
    return file if shards == 1 else file.with_name(f"{file.stem}-00001-of-{shards:05}.gguf")


def write_plain(plain: Path, source: Path, tensors: Tensors) -> None:
    """Write a bfloat16 checkpoint. Vectors and router gates keep fp32, as in the GGUF file."""
    plain.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (plain / file.name).write_bytes(file.read_bytes())
    in_fp32 = {key for key, tensor in tensors.items() if tensor.dim() == 1 or key.endswith(".gate.weight")}
    stored = {key: tensor if key in in_fp32 else tensor.bfloat16() for key, tensor in tensors.items()}
    save_file(stored, plain / "model.safetensors")
    edit_config(plain, dtype="bfloat16")
