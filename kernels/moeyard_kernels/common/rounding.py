"""Triton: rounding of fp32 values to the tensor's dtype, and products.

If a product feeds a sum and the bits matter, kernels use `tl.fma` or are launched with `enable_fp_fusion=False`.
Otherwise a GPU build contracts the two and the interpreter does not.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.launch import interpreted

# Evaluated at import, as Triton evaluates it when it decorates the kernels.
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def round_to(b_x, DTYPE: tl.constexpr):
    """Round fp32 values to DTYPE (fp32 or bf16), ties to even, and return them as fp32."""
    if tl.float32 == DTYPE:
        b_y = b_x
    elif INTERPRETED:
        # The interpreter truncates: add half a unit in the last place, less one if that place is even.
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -65536
        b_y = tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)
    else:
        b_y = b_x.to(DTYPE).to(tl.float32)
    return b_y


@triton.jit
def stored_as(b_x, DTYPE: tl.constexpr):
    """Convert fp32 values to DTYPE (fp32 or bf16), ties to even, for a bf16 store that also works when interpreted."""
    return (round_to(b_x, DTYPE) if INTERPRETED else b_x).to(DTYPE)


@triton.jit
def opaque(b_x, DTYPE: tl.constexpr):
    """Return b_x of DTYPE (fp32 or bf16) through an instruction that Triton cannot optimise."""
    if not INTERPRETED:
        if tl.float32 == DTYPE:
            b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=False, pack=1)
        else:
            b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return b_x


@triton.jit
def product(b_x, b_w, b_acc, SWAP: tl.constexpr):
    """Return b_acc + b_x @ b_w.T in fp32, or its transpose if SWAP. The interpreter needs fp32 inputs."""
    if INTERPRETED:
        b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
    if SWAP:
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc
