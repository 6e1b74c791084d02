"""Quantise values: round to nearest, with the scale that makes the largest value of a block the largest code."""

from types import MappingProxyType

import torch

from moeyard_kernels.types.matrix import E2M1, Matrix, pack_codes
from moeyard_kernels.types.weight_form import WeightForm, fp4_form, fp8_form, int4_form

# The largest e4m3 and e2m1 codes, and the largest distance of an int4 code from 8 with a value of either sign.
_MAX = MappingProxyType({"fp8": 448.0, "fp4": 6.0, "int4": 7.0})


def quantize(values: torch.Tensor, form: WeightForm, *, exponents: bool = False) -> Matrix:
    """Return values [N, K] in the untiled form with the codes, blocks and dtype of scales of `form`.

    A block of zeros has a scale of 1. Scales of e2m1 codes are rounded up to powers of two, and those of other codes
    with `exponents`. Raises ValueError for a form with zero points.
    """
    values = values.float()
    part = form.parts[1]
    if len(form.parts) > 2:
        raise ValueError("codes with zero points are only read, not written")
    rows, columns = part.rows or values.shape[0], part.columns or values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    largest = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
    scales = largest / _MAX[form.name]
    if exponents or form.name == "fp4":
        scales = torch.where(largest > 0, scales.log2().ceil().clamp(min=-126).exp2(), 1.0)
    if form.name == "fp4":
        steps = values / scales.repeat_interleave(columns, 1)
        # Between two values, the smaller one of a tie is chosen.
        bounds = torch.tensor(E2M1[:8], device=values.device).unfold(0, 2, 1).mean(1)
        codes = torch.bucketize(steps.abs(), bounds) | (steps < 0) << 3
        return Matrix(fp4_form(columns), (*values.shape,), (pack_codes(codes.to(torch.int32)), scales))
    scales = scales.to(getattr(torch, part.dtype))
    scales[scales == 0] = 1
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    steps = values / spread[: values.shape[0], : values.shape[1]]
    if form.name == "fp8":
        codes = steps.clamp(-_MAX["fp8"], _MAX["fp8"]).to(torch.float8_e4m3fn)
        return Matrix(fp8_form(rows, part.columns, scales=part.dtype), (*values.shape,), (codes, scales))
    words = pack_codes((steps.round().clamp(-_MAX["int4"], _MAX["int4"]) + 8).to(torch.int32))
    return Matrix(int4_form(part.columns, scales=part.dtype, zeros=False), (*values.shape,), (words, scales))
