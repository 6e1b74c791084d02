"""Instructions that make bf16 values from tiled codes (`WeightForm.tiled`), with the bits of `dequantize`.

Each text works on the pair of words in $1 and gives a pair of bf16 values in $0. The other operands are fp32 or pairs.

- int4: a code becomes part of the mantissa of 128, which gives 128 + code. Subtracting 128 + zero in $2 is exact. Then
  the product with a bf16 scale in $3 is rounded once. fp32 scales are in $3 and $4.
- fp4: the sign and the 3 other bits of an e2m1 code move to the sign, the lowest bits of the exponent and the highest
  bit of the mantissa. That is the value times 2^-126, often a subnormal number, which these instructions support. Its
  product with 2^126 times the scale in $2 is exact.
- fp8: one instruction makes two fp16 values of two codes, exactly. Their products with fp32 scales in $2 and $3 are
  rounded to fp32, then to bf16.
"""

import triton.language as tl


def _int4(shift: int) -> str:
    return f"shr.u32 t, $1, {shift}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 t, t, $2;"


def _fp4(sign: str, rest: str) -> str:
    return f"{sign} {rest} and.b32 u, u, 0x01C001C0; lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.bf16x2 $0, t, $2;"


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
FP4_0, FP4_1, FP4_2, FP4_3 = (
    _text(_fp4(f"shl.b32 t, $1, {left};", rest))
    for left, rest in (
        *((12, "shl.b32 u, $1, 6;"), (8, "shl.b32 u, $1, 2;")),
        *((4, "shr.u32 u, $1, 2;"), (0, "shr.u32 u, $1, 6;")),
    )
)
FP8_0, FP8_1 = (_text(_fp8(half), _scaled("$2", "$3")) for half in ("l", "h"))
INT4_0, INT4_1, INT4_2, INT4_3 = (_text(_int4(shift), "mul.rn.bf16x2 $0, t, $3;") for shift in (0, 4, 8, 12))
WIDE_0, WIDE_1, WIDE_2, WIDE_3 = (_text(_int4(shift), _WIDEN, _scaled("$3", "$4")) for shift in (0, 4, 8, 12))
