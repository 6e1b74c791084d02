"""The instructions that decode tiled codes, run one by one on a CPU: their values are those of `dequantize`."""

import re

import pytest
import torch

from moeyard_kernels.common import codes
from moeyard_kernels.types.matrix import E2M1, Matrix, dequantize, holds_nan, pack_codes, tile_
from moeyard_kernels.types.weight_form import (
    FormPart,
    WeightForm,
    fp4_form,
    fp4_tiles,
    fp8_form,
    fp8_tiles,
    int4_form,
    int4_tiles,
)

TEXTS = {
    "fp4": (codes.FP4_0, codes.FP4_1, codes.FP4_2, codes.FP4_3),
    "fp8": (codes.FP8_0, codes.FP8_1),
    "fp8, bf16 scales": (codes.NARROW_0, codes.NARROW_1),
    "int4": (codes.INT4_0, codes.INT4_1, codes.INT4_2, codes.INT4_3),
}


def halves(word: torch.Tensor) -> torch.Tensor:
    """Return the two bf16 values of each word, the lower bits first."""
    return word.to(torch.int32).view(torch.bfloat16).view(*word.shape, 2)


def joined(values: torch.Tensor) -> torch.Tensor:
    """Return int64 words of two bf16 values each."""
    return values.bfloat16().contiguous().view(torch.int32).squeeze(-1).to(torch.int64) & 0xFFFFFFFF


def run(text: str, *operands: torch.Tensor) -> torch.Tensor:
    """Run PTX over vectors of words (int64 below 2^32) and return $0. All rounding is to nearest."""
    values = {f"${i}": each for i, each in enumerate(operands, 1)}
    for step in re.sub(r"\.reg [^;]*;", "", text.strip(" {}").replace("{l, h}", "l+h")).split(";"):
        if not step.strip():
            continue
        name, rest = step.strip().split(None, 1)
        out, *names = (each.strip() for each in rest.split(","))
        if name == "mov.b32" and out == "l+h":
            (word,) = (values[each] for each in names)
            values |= {"l": word & 0xFFFF, "h": word >> 16}
            continue
        args = [values[each] if each in values else torch.tensor(int(each, 0)) for each in names]
        values[out] = step_of(name, args)
    return values["$0"]


def step_of(name: str, args: list[torch.Tensor]) -> torch.Tensor:
    match name:
        case "shl.b32":
            return args[0] << args[1] & 0xFFFFFFFF
        case "shr.u32":
            return args[0] >> args[1]
        case "shf.l.wrap.b32":
            assert torch.equal(args[0], args[1])
            return (args[0] << args[2] | args[1] >> 32 - args[2]) & 0xFFFFFFFF
        case "mov.b32":
            return args[0]
        case "and.b32":
            return args[0] & args[1]
        case "lop3.b32":
            assert int(args[3]) == 0xEA
            return args[0] & args[1] | args[2]
        case "sub.rn.bf16x2":
            return joined(halves(args[0]).float() - halves(args[1]).float())
        case "mul.rn.bf16x2":
            return joined(halves(args[0]).float() * halves(args[1]).float())
        case "cvt.rn.f16x2.e4m3x2":
            pairs = torch.stack([args[0] & 0xFF, args[0] >> 8], -1).to(torch.uint8)
            found = pairs.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int32).squeeze(-1)
            return found.to(torch.int64) & 0xFFFFFFFF
        case "cvt.f32.f16":
            return args[0].to(torch.int32).to(torch.int16).view(torch.float16).float()
        case "mul.rn.f32":
            return args[0] * args[1]
        case "cvt.rn.bf16x2.f32":
            return joined(torch.stack([args[1], args[0]], -1))
    raise AssertionError(f"{name} has no meaning here")


def random_matrix(name: str) -> Matrix:
    """Return codes of all values [64, 256] with scales from small to large ones."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("fp8"):
        data = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
        data = torch.where(data & 0x7F == 0x7F, 0x38, data).view(torch.float8_e4m3fn)
        scales = torch.rand(64, 1, generator=generator) * 1e-3
        if name != "fp8":
            scales = (scales * torch.arange(-100, -36)[:, None].float().exp2()).bfloat16().float()
            scales[:2, 0] = torch.tensor([2.0**-126, 127.5])
        return Matrix(fp8_form(1, None), (64, 256), (data, scales))
    words = pack_codes(torch.randint(16, (64, 256), generator=generator, dtype=torch.int32))
    if name == "int4":
        scales = torch.rand(64, 8, generator=generator).bfloat16()
        return Matrix(int4_form(32, scales="bfloat16", zeros=False), (64, 256), (words, scales))
    exponents = torch.randint(-126, 2, (64, 8), generator=generator)
    exponents[0, :2] = torch.tensor([-126, 1])
    return Matrix(fp4_form(32), (64, 256), (words, exponents.float().exp2()))


@pytest.mark.parametrize("name", TEXTS)
def test_instructions_have_the_bits_of_dequantize(name: str) -> None:
    matrix = random_matrix(name)
    forms: dict[str, WeightForm] = {
        "fp8": fp8_tiles(1, None),
        "fp8, bf16 scales": fp8_tiles(1, None, scales="bfloat16"),
        "int4": int4_tiles(32, scales="bfloat16", zeros=False),
        "fp4": fp4_tiles(32),
    }
    tiled = Matrix.empty(forms[name], 64, 256, torch.device("cpu"))
    tile_(tiled, matrix)
    assert torch.equal(dequantize(tiled), dequantize(matrix))
    words = tiled.data[:, 0].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF  # [tiles, N, 16]
    slices = []
    for tile in range(words.shape[0]):
        for n, text in enumerate(TEXTS[name]):
            block = (tile * len(TEXTS[name]) + n) * 32 // (tiled.form.parts[1].columns or 256)
            scales = tiled.scales[block, 0, :, None].expand(64, 16)
            if name == "fp8":
                operands = [scales, scales]
            elif name == "int4":
                pair = joined(torch.stack([scales, scales], -1))
                operands = [joined(torch.full((64, 16, 2), 136.0)), pair]
            elif name == "fp8, bf16 scales":
                # As the kernel makes factors of scales.
                factor = scales.float() * 2.0**120
                operands = [joined(torch.stack([factor, factor], -1))]
            else:
                # As the kernel makes factors of bytes.
                factor = ((scales.to(torch.int16) + 126) << 7).view(torch.bfloat16)
                operands = [joined(torch.stack([factor, factor], -1))]
            slices.append(halves(run(text.value, words[tile], *operands)).flatten(-2))
    found = torch.cat(slices, 1)
    assert torch.equal(found.view(torch.int16), dequantize(matrix).view(torch.int16))


def test_scales_that_tiles_of_e2m1_codes_cannot_hold() -> None:
    matrix = random_matrix("fp4")
    for scale in (4.0, 2.0**-127, 0.75, 0.0):
        matrix.scales[3, 2] = scale
        with pytest.raises(ValueError, match="no power of two"):
            tile_(Matrix.empty(fp4_tiles(32), 64, 256, torch.device("cpu")), matrix)


def test_scales_that_tiles_with_bf16_scales_cannot_hold() -> None:
    tiles = Matrix.empty(fp8_tiles(1, None, scales="bfloat16"), 64, 256, torch.device("cpu"))
    for scale in (128.0, -128.0, 1 + 2.0**-10, float("nan"), float("inf")):
        matrix = random_matrix("fp8, bf16 scales")
        matrix.scales[3] = scale
        with pytest.raises(ValueError, match="no bfloat16 value below 128"):
            tile_(tiles, matrix)


def test_codes_that_are_nan() -> None:
    codes = random_matrix("fp8").data
    for code in range(256):
        codes.view(torch.uint8)[5, 7] = code
        assert holds_nan(codes) == (code in (0x7F, 0xFF)) == bool(codes.float().isnan().any())


@pytest.mark.parametrize(
    "form",
    [
        *(fp8_form(128, 128), fp8_form(48, 96), fp8_form(1, None), fp8_form(None, None), fp4_form(32)),
        *(int4_form(32, scales="bfloat16", zeros=False), int4_form(128, scales="float32", zeros=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "columns"), [(300, 1280), (7, 64), (1, 640), (2100, 128), (5, 33)])
def test_values_are_the_rounded_products_of_codes_and_scales(form: WeightForm, rows: int, columns: int) -> None:
    """For every code, blocks that end early, and matrices of more values than are made at once."""
    if form.name != "fp8":
        columns += -columns % (form.parts[1].columns or 1)
    matrix = Matrix.empty(form, rows, columns, torch.device("cpu"))
    draw = torch.Generator().manual_seed(rows)
    data, scales = matrix.arrays[:2]
    data.view(torch.uint8).copy_(torch.randint(0, 256, data.view(torch.uint8).shape, generator=draw))
    scales.copy_(torch.rand(scales.shape, generator=draw) + 0.25)
    if form.name == "fp8":
        codes_of = data.float()
    else:
        nibbles = torch.stack([data >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
        codes_of = torch.tensor(E2M1)[nibbles] if form.name == "fp4" else nibbles.float()
    blocks = [spread(part, rows, columns, array) for part, array in zip(form.parts[1:], matrix.arrays[1:], strict=True)]
    if len(blocks) == 2:
        matrix.arrays[2].copy_(torch.randint(0, 16, matrix.arrays[2].shape, generator=draw))
        codes_of -= spread(form.parts[2], rows, columns, matrix.arrays[2])
    elif form.name == "int4":
        codes_of -= 8
    wanted = (codes_of * blocks[0]).bfloat16()
    assert torch.equal(dequantize(matrix).view(torch.int16), wanted.view(torch.int16))


def spread(part: FormPart, rows: int, columns: int, array: torch.Tensor) -> torch.Tensor:
    """Return the value of each element's block."""
    row = torch.arange(rows) // (part.rows or rows)
    column = torch.arange(columns) // (part.columns or columns)
    return array.float()[row][:, column]
