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

    `choose` returns a matrix's type by its name. `plain` becomes the bfloat16 checkpoint of the same weights.
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
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_token_list([f"token {number}" for number in range(config["vocab_size"])])
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
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
