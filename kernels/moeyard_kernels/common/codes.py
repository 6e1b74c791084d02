"""Instructions that make bf16 values from tiled codes (`WeightForm.tiled`), with the bits of `dequantize`.

Each text works on the pair of words in $1 and gives a pair of bf16 values in $0. The other operands are fp32 or pairs.

- int4: a code becomes part of the mantissa of 128, which gives 128 + code. Subtracting 128 + zero in $2 is exact. Then
  the product with a bf16 scale in $3 is rounded once. Scales in fp32 are in $3 and $4.
- fp4: the sign and the 3 other bits of an e2m1 code move to the sign, the lowest bits of the exponent and the highest
  bit of the mantissa. That is the value times 2^-126, often a subnormal number, which these instructions support. Its
  product with 2^126 times the scale in $2 is exact.
- fp8 with bf16 scales: the same for e4m3 codes. Their 7 other bits give the value times 2^-120, and $2 has 2^120 times
  the scale. The product is rounded once. `dequantize` rounds twice, but its fp32 product is exact.
- fp8 with fp32 scales: one instruction makes two fp16 values of two codes, exactly. Their products with the scales in
  $2 and $3 are rounded to fp32, then to bf16.

Words of fp4 codes, and of fp8 codes with bf16 scales, hold the bits of each slice where few instructions move them:
`types.matrix.FP4_BITS` and `FP8_BITS`. One slice needs no shift.
"""

import triton.language as tl


def _int4(shift: int) -> str:
    return f"shr.u32 t, $1, {shift}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 t, t, $2;"


# The bits of values: of e2m1 codes times 2^-126, of e4m3 codes times 2^-120.
_FP4_MASK, _FP8_MASK = 0x81C0, 0x87F0


def _masked(mask: int, shift: str = "") -> str:
    """Take the bits of both words of a pair, shifted or in place."""
    return f"{shift or 'mov.b32 t, $1;'} and.b32 t, t, {mask:#06x}{mask:04x};"


def _merged(mask: int, others: int) -> str:
    """Take the bits that move up by 4, and others that move down by 4."""
    return (
        f"shl.b32 t, $1, 4; shr.u32 u, $1, 4; and.b32 u, u, {others:#06x}{others:04x}; "
        f"lop3.b32 t, t, {mask:#06x}{mask:04x}, u, 0xEA;"
    )


def _fp8(half: str) -> str:
    return (
        "mov.b32 {l, h}, $1; "
        + f"cvt.rn.f16x2.e4m3x2 t, {half}; "
        + "mov.b32 {l, h}, t; cvt.f32.f16 a, l; cvt.f32.f16 b, h;"
    )


def _scaled(low: str, high: str) -> str:
    """Multiply the fp32 values a and b, and round them."""
    return f"mul.rn.f32 a, a, {low}; mul.rn.f32 b, b, {high}; cvt.rn.bf16x2.f32 $0, b, a;"


def _text(*steps: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, u; .reg .b16 l, h; .reg .f32 a, b; " + " ".join(steps) + " }")


_WIDEN = "shl.b32 u, t, 16; and.b32 t, t, 0xFFFF0000; mov.b32 a, u; mov.b32 b, t;"
_PRODUCT = "mul.rn.bf16x2 $0, t, $2;"
FP4_0, FP4_1, FP4_2, FP4_3 = (
    _text(moved, _PRODUCT)
    for moved in (
        _masked(_FP4_MASK),
        _masked(_FP4_MASK, "shl.b32 t, $1, 6;"),
        _masked(_FP4_MASK, "shf.l.wrap.b32 t, $1, $1, 10;"),
        _merged(0x8180, 0x0040),
    )
)
FP8_0, FP8_1 = (_text(_fp8(half), _scaled("$2", "$3")) for half in ("l", "h"))
NARROW_0, NARROW_1 = (_text(moved, _PRODUCT) for moved in (_masked(_FP8_MASK), _merged(0x80F0, 0x0700)))
INT4_0, INT4_1, INT4_2, INT4_3 = (_text(_int4(shift), "mul.rn.bf16x2 $0, t, $3;") for shift in (0, 4, 8, 12))
WIDE_0, WIDE_1, WIDE_2, WIDE_3 = (_text(_int4(shift), _WIDEN, _scaled("$3", "$4")) for shift in (0, 4, 8, 12))
