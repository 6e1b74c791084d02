"""Triton: a gate on whole rows, as its own rounded pass."""

import torch
import triton
import triton.language as tl

# The largest extent of a CUDA grid in y. (Kernel parameters carry no annotations: a GPU build would compile them.)
_MAX_GRID_Y = 65535


@triton.jit
def _scale_rows_kernel(p_x, p_scale, p_out, H, BH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program scales one row's columns [i_h BH, i_h BH + BH). Grid: (T, ceil(H / BH))."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    b_x = tl.load(p_x + i_t * H + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_y = b_x * tl.load(p_scale + i_t).to(tl.float32)
    tl.store(p_out + i_t * H + o_h, b_y.to(p_out.dtype.element_ty), mask=m_h)


def scale_rows_(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """See `moeyard_kernels.ops.scale_rows_`. Raises ValueError for a strided x or what its grid cannot hold."""
    num_rows, hidden = x.shape
    if not x.is_contiguous():
        raise ValueError(f"scale_rows_: x with strides {x.stride()} is not contiguous")
    block = min(1024, triton.next_power_of_2(max(1, hidden)))
    if triton.cdiv(hidden, block) > _MAX_GRID_Y or num_rows > 2**31 - 1:
        raise ValueError(f"scale_rows_: [{num_rows}, {hidden}] exceeds the grid of a GPU")
    # The interpreter truncates fp32 to bf16 in stores, so there fp32 is stored and torch rounds.
    out = x if x.is_cuda or x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    if x.numel():
        _scale_rows_kernel[(num_rows, triton.cdiv(hidden, block))](x, scale.contiguous(), out, hidden, BH=block)
    return x if out is x else x.copy_(out)
