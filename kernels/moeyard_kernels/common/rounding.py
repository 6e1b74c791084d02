"""What Triton kernels share about rounding: where an fp32 value becomes one of the tensor's dtype, and the product.

Where a product feeds a sum and the bits matter, kernels write `tl.fma`, or are launched with `enable_fp_fusion=False`,
without which a GPU build contracts the two and the interpreter does not.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.launch import interpreted

# Read where Triton reads it: when the kernels are decorated.
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def round_to(b_x, DTYPE: tl.constexpr):
    """fp32 values rounded to DTYPE (fp32 or bf16), ties to even, as fp32."""
    if tl.float32 == DTYPE:
        b_y = b_x
    elif INTERPRETED:
        # The interpreter truncates: add half of the last place that stays, less one where that place is even.
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -65536
        b_y = tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)
    else:
        b_y = b_x.to(DTYPE).to(tl.float32)
    return b_y


@triton.jit
def stored_as(b_x, DTYPE: tl.constexpr):
    """fp32 values as DTYPE (fp32 or bf16), ties to even; for memory that the interpreter, too, stores bf16 into."""
    return (round_to(b_x, DTYPE) if INTERPRETED else b_x).to(DTYPE)


@triton.jit
def opaque(b_x, DTYPE: tl.constexpr):
    """b_x of DTYPE (fp32 or bf16), through an instruction that Triton does not look into, as it is."""
    if not INTERPRETED:
        if tl.float32 == DTYPE:
            b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=False, pack=1)
        else:
            b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return b_x


@triton.jit
def product(b_x, b_w, b_acc, SWAP: tl.constexpr):
    """b_acc + b_x @ b_w.T in fp32, or its transpose if SWAP; the interpreter gets products of bf16 wrong."""
    if INTERPRETED:
        b_x, b_w = b_x.to(tl.float32), b_w.to(tl.float32)
    if SWAP:
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc
