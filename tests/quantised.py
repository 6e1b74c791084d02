"""Quantise checkpoints of `tests/checkpoints.py` in the layouts of published ones, and say what they stand for.

Each quantiser draws codes first and packs them afterwards, so that the expected values never pass through a decoder.
Scales and zero points differ between neighbouring blocks, and the largest, the smallest and other special codes occur.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_config, make_checkpoint, publish_v4

Tensors = dict[str, torch.Tensor]
E8M0 = torch.float8_e8m0fnu
# Modules that published checkpoints leave plain.
PLAIN = ("embed_tokens", "lm_head", "gate", "shared_expert_gate", "in_proj_ba", "eh_proj", "norm")


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout: `quantise` returns the stored tensors (by suffix, for a module) and the values of a matrix.

    `config` is the quantization_config, `listed` its key for the modules that are not quantised. The number of columns
    of a quantised matrix is a multiple of `columns`.
    """

    quantise: Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
    config: Mapping[str, Any]
    listed: str
    columns: int = 8


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16(fp32(codes) * fp32(scales)) of tensors of one shape."""
    return (codes.float() * scales.float()).to(torch.bfloat16)


def spread(blocks: torch.Tensor, shape: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    """Return the block's element for each element of a matrix of `shape`."""
    row, column = torch.arange(shape[0]) // rows, torch.arange(shape[1]) // columns
    return blocks[row][:, column]


def fp8_codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes of a matrix for scales of its shape, with the largest code, a subnormal one and minus 0."""
    codes = (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    bytes_ = codes.view(torch.uint8)
    bytes_[0, :3] = torch.tensor([0x7E, 0x01, 0x80], dtype=torch.uint8)
    return codes


def fp8_blocks(block: int, stored: torch.dtype = torch.float32, *, exponents: bool = False) -> Any:
    """Return the quantiser of the method "fp8" with square blocks and scales of a dtype.

    exponents: the scales are powers of two.
    """

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        shape = weight.shape
        grid = (-(-shape[0] // block), -(-shape[1] // block))
        scales = (torch.rand(grid, generator=generator) + 0.5) * weight.float().abs().max() / 300
        if exponents:
            scales = scales.log2().round().exp2()
        scales = scales.to(stored)
        full = spread(scales.float(), shape, block, block)
        codes = fp8_codes(weight, full)
        return {".weight": codes, ".weight_scale_inv": scales}, values(codes, full)

    return quantise


def fp8_rows(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Quantise with one scale per row, as compressed-tensors' strategy "channel"."""
    scales = (torch.rand(weight.shape[0], 1, generator=generator) + 0.5) * weight.float().abs().max() / 300
    scales = scales.bfloat16().float()
    codes = fp8_codes(weight, scales)
    return {".weight": codes, ".weight_scale": scales.bfloat16()}, values(codes, scales.expand(weight.shape))


def fp8_tensor(
    weight: torch.Tensor, generator: torch.Generator, stored: torch.dtype = torch.float32
) -> tuple[Tensors, torch.Tensor]:
    """Quantise with one scale per tensor, and a scale of the activations that a server may ignore."""
    scale = (weight.float().abs().max() / 448).to(stored)
    codes = fp8_codes(weight, scale.float())
    return {".weight": codes, ".weight_scale": scale, ".input_scale": scale}, values(codes, scale.expand(weight.shape))


def draw_int4(
    weight: torch.Tensor, generator: torch.Generator, *, group: int, scales: torch.dtype, zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes 0 to 15 [N, K], scales and zero points [N, K / group]. All 16 codes occur."""
    rows, columns = weight.shape
    count = columns // group
    found = (torch.rand(rows, count, generator=generator) + 0.5) * weight.float().abs().max() / 6
    found = found.to(scales)
    points = torch.randint(1, 16, (rows, count), generator=generator) if zeros else torch.full((rows, count), 8)
    steps = weight.float() / spread(found, weight.shape, 1, group).float()
    codes = (steps.round() + spread(points, weight.shape, 1, group)).clamp(0, 15).to(torch.int32)
    codes.view(-1)[:16] = torch.arange(16, dtype=torch.int32)
    return codes, found, points.to(torch.int32)


def packed(codes: torch.Tensor, shifts: tuple[int, ...] = tuple(range(0, 32, 4))) -> torch.Tensor:
    """Pack 8 neighbouring codes of a row into an int32, code i at bit `shifts[i]`."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, shift in enumerate(shifts):
        words |= codes[:, i::8].to(torch.int64) << shift
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4_words(group: int, *, zeros: bool = False, stored_as: torch.dtype = torch.bfloat16) -> Any:
    """Return the quantiser of compressed-tensors' "pack-quantized", with scales of a dtype."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, points = draw_int4(weight, generator, group=group, scales=stored_as, zeros=zeros)
        stored = {
            ".weight_packed": packed(codes),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            padded = torch.nn.functional.pad(points, (0, 0, 0, -len(points) % 8))
            stored[".weight_zero_point"] = packed(padded.T.contiguous()).T.contiguous()
        q = codes - spread(points, weight.shape, 1, group)
        return stored, values(q, spread(scales, weight.shape, 1, group))

    return quantise


def gptq(group: int, *, v2: bool = False, permuted: bool = False) -> Any:
    """Return the quantiser of GPTQ; `permuted`: columns belong to groups in any order (desc_act)."""

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, points = draw_int4(weight, generator, group=group, scales=torch.float16, zeros=v2)
        index = torch.arange(weight.shape[1]) // group
        if permuted:
            index = index[torch.randperm(len(index), generator=generator)]
        q = codes - points[:, index]
        stored = {
            ".qweight": packed(codes.T.reshape(-1, 8, len(codes)).transpose(1, 2).reshape(-1, 8)).view(-1, len(codes)),
            ".qzeros": packed(points.T.contiguous() - (0 if v2 else 1)),
            ".scales": scales.T.contiguous(),
            ".g_idx": index.to(torch.int32),
        }
        return stored, values(q, scales[:, index])

    return quantise


def awq(group: int) -> Any:
    """Return the quantiser of AWQ's "gemm"."""
    shifts = (0, 16, 4, 20, 8, 24, 12, 28)

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, points = draw_int4(weight, generator, group=group, scales=torch.float16, zeros=True)
        stored = {
            ".qweight": packed(codes.T.contiguous(), shifts),
            ".qzeros": packed(points.T.contiguous(), shifts),
            ".scales": scales.T.contiguous(),
        }
        q = codes - spread(points, weight.shape, 1, group)
        return stored, values(q, spread(scales, weight.shape, 1, group))

    return quantise


def _compressed(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def _blocks_of_128(stored: torch.dtype, *, exponents: bool = False, **more: Any) -> Layout:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], **more}
    return Layout(fp8_blocks(128, stored, exponents=exponents), settings, "modules_to_not_convert")


def _compressed_int4(group: int, *, zeros: bool = False, stored_as: torch.dtype = torch.bfloat16) -> Layout:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": not zeros, "group_size": group}
    settings = _compressed("pack-quantized", weights)
    return Layout(int4_words(group, zeros=zeros, stored_as=stored_as), settings, "ignore", group)


def _gptq(group: int, *, v2: bool = False, permuted: bool = False) -> Layout:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": permuted}
    if v2:
        settings |= {"sym": False, "checkpoint_format": "gptq_v2"}
    return Layout(gptq(group, v2=v2, permuted=permuted), settings, "dynamic", group)


# The dtype of stored scales, for int4 layouts that only differ in it.
INT4_SCALES = MappingProxyType(
    {"ct-int4-g32": torch.bfloat16, "ct-int4-g32-f16": torch.float16, "ct-int4-g32-f32": torch.float32}
)
TILED = (
    *("fp8-128", "fp8-128-bf16", "ct-fp8", "ct-fp8-tensor", "fp8-tensor"),
    *("awq-g64", "gptq-g64", "gptq-v2-g64", "ct-int4-g64-zeros", *INT4_SCALES),
)
# The dtype of scales in tiles, for fp8 layouts of each dtype of stored scales.
SCALES = MappingProxyType(
    {"fp8-128": "float32", "fp8-128-f16": "float32"}
    | dict.fromkeys(("fp8-128-bf16", "fp8-128-e8m0", "fp8-128-ue8m0"), "bfloat16")
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "fp8": Layout(
            fp8_blocks(16),
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]},
            "modules_to_not_convert",
        ),
        "fp8-ue8m0": Layout(
            fp8_blocks(24, E8M0, exponents=True),
            {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [24, 24]},
            "modules_to_not_convert",
        ),
        "fp8-tensor": Layout(
            fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}, "modules_to_not_convert"
        ),
        "ct-fp8": Layout(
            fp8_rows, _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), "ignore"
        ),
        "ct-fp8-tensor": Layout(
            partial(fp8_tensor, stored=torch.bfloat16),
            _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            "ignore",
        ),
        "ct-int4": _compressed_int4(8),
        "ct-int4-zeros": _compressed_int4(8, zeros=True),
        # Sizes of blocks that a GPU's products read from codes.
        "fp8-128": _blocks_of_128(torch.float32),
        "fp8-128-bf16": _blocks_of_128(torch.bfloat16),
        "fp8-128-f16": _blocks_of_128(torch.float16),
        "fp8-128-e8m0": _blocks_of_128(E8M0, exponents=True),
        "fp8-128-ue8m0": _blocks_of_128(torch.float32, exponents=True, scale_fmt="ue8m0"),
        **{name: _compressed_int4(32, stored_as=stored) for name, stored in INT4_SCALES.items()},
        "ct-int4-g64-zeros": _compressed_int4(64, zeros=True),
        "gptq-g64": _gptq(64),
        "gptq-v2-g64": _gptq(64, v2=True),
        "awq-g64": Layout(
            awq(64),
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
            "modules_to_not_convert",
            64,
        ),
        "gptq": _gptq(8),
        "gptq-v2": _gptq(8, v2=True, permuted=True),
        "awq": Layout(
            awq(8),
            {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
            "modules_to_not_convert",
        ),
    }
)


# Layouts of small blocks, which small models of every family fit.
SMALL = tuple(name for name, layout in LAYOUTS.items() if layout.columns == 8 and not name.startswith("fp8-128"))


def quantise(directory: Path, layout: str, *, excluded: tuple[str, ...] = PLAIN) -> Tensors:
    """Quantise the matrices of a bfloat16 checkpoint in place, all but the modules that end with one of `excluded`.

    Returns the tensors of the bfloat16 checkpoint that has the same answers.
    """
    found = LAYOUTS[layout]
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(len(layout))
    plain: Tensors = {}
    stored: Tensors = {}
    listed = []
    for key, value in sorted(load_file(path).items()):
        module = key.removesuffix(".weight")
        # Sizes of the small models that int4 words cannot hold stay plain, as other exporters leave them too.
        whole = value.dim() == 2 and not (value.shape[0] % 8 or value.shape[1] % found.columns)
        if not whole or module.endswith(excluded) or not key.endswith(".weight"):
            plain[key] = stored[key] = value
            if value.dim() == 2:
                listed.append(module)
            continue
        tensors, plain[key] = found.quantise(value, generator)
        stored |= {module + suffix: tensor.clone().contiguous() for suffix, tensor in tensors.items()}
    names: Any = {f"-:{module.replace('.', chr(92) + '.')}$": {} for module in listed}
    if found.listed != "dynamic":
        names = listed
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(directory, quantization_config={**found.config, found.listed: names})
    return plain


def make_pair(make: Callable[[Path], Path], directory: Path, layout: str, **options: Any) -> tuple[Path, Path]:
    """Make a quantised checkpoint and the bfloat16 checkpoint that it stands for. Return both directories."""
    quantised, plain = make(directory / "quantised"), make(directory / "bf16")
    save_file(quantise(quantised, layout, **options), plain / "model.safetensors", metadata={"format": "pt"})
    return quantised, plain


# Modules of DeepSeek-V4 whose released weights are fp8.
V4_FP8 = (".wq_a", ".wq_b", ".wkv", ".wo_a", ".wo_b", ".w1", ".w2", ".w3", ".main_proj")


def publish_codes(directory: Path) -> dict[str, torch.Tensor]:
    """Store a published bfloat16 checkpoint as releases are: fp8 in blocks, e2m1 experts, scales of powers of two.

    Returns the tensors that the codes stand for, as drawn before they are packed.
    """
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    plain, stored = load_file(path), {}
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for key, value in sorted(plain.items()):
        at = key.removesuffix(".weight")
        if ".experts." in key:
            rows, columns = value.shape
            codes = torch.randint(16, (rows, columns), generator=generator)
            exponents = torch.randint(121, 124, (rows, columns // 32), generator=generator)
            stored[key] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
            stored[f"{at}.scale"] = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
            signed = torch.where(codes >= 8, -e2m1[codes % 8], e2m1[codes % 8])
            plain[key] = (signed * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)).bfloat16()
        elif at.endswith(V4_FP8) and "compressor" not in at:
            tensors, plain[key] = fp8_blocks(16, E8M0, exponents=True)(value, generator)
            stored |= {key: tensors[".weight"], f"{at}.scale": tensors[".weight_scale_inv"]}
        else:
            stored[key] = value
    save_file(stored, path, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    settings |= {"activation_scheme": "dynamic"}
    edit_config(directory, quantization_config=settings, expert_dtype="fp4", dtype="bfloat16")
    return plain


# Quantised checkpoints whose experts keep their codes on a GPU, with the family of each.
SERVED = MappingProxyType({"fp8": "deepseek_v3", "int4": "qwen3_moe", "fp4": "deepseek_v4"})


def make_served(kind: str, directory: Path, **sizes: Any) -> tuple[Path, Path]:
    """Make a checkpoint of SERVED and the bfloat16 checkpoint that it stands for. Return both directories."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2, **sizes}
    make = partial(make_checkpoint, family=SERVED[kind], dtype=torch.bfloat16, **sizes)
    if kind != "fp4":
        return make_pair(make, directory, {"fp8": "fp8-128-bf16", "int4": "ct-int4-g32"}[kind])
    pair = directory / "quantised", directory / "bf16"
    for each in pair:
        publish_v4(make(each, intermediate_size=128))
    save_file(publish_codes(pair[0]), pair[1] / "model.safetensors", metadata={"format": "pt"})
    return pair
