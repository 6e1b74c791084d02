"""Triton: a gate on whole rows, as a separate rounded pass."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import check_layout
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import row_launch
from moeyard_kernels.common.tuning import RowConfig

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps)
    for block, warps in ((256, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
)


@triton.jit
def scaled(b_x, b_scale, SIGMOID: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply b_x by b_scale or its sigmoid in fp32, round to DTYPE, and return fp32."""
    b_scale = b_scale.to(tl.float32)
    if SIGMOID:
        b_scale = 1.0 / (1.0 + tl.exp(-b_scale))
    return round_to(b_x.to(tl.float32) * b_scale, DTYPE)


@triton.jit
def _scale_rows_kernel(p_x, p_scale, H, BH: tl.constexpr, SIGMOID: tl.constexpr):
    """Scale one row's columns [i_h BH, i_h BH + BH). Grid: (T, ceil(H / BH))."""
    let_next_begin()
    wait_for_previous()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    b_x = tl.load(p_x + i_t * H + o_h, mask=m_h, other=0.0)
    b_y = scaled(b_x, tl.load(p_scale + i_t), SIGMOID, p_x.dtype.element_ty)
    tl.store(p_x + i_t * H + o_h, b_y.to(p_x.dtype.element_ty), mask=m_h)


def scale_rows_(
    x: torch.Tensor, scale: torch.Tensor, *, sigmoid: bool = False, config: RowConfig | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.scale_rows_`. Raises ValueError for a strided x or what its grid cannot hold."""
    num_rows, hidden = x.shape
    config, grid = row_launch("scale_rows_", x, num_rows=num_rows, width=hidden, name="H", config=config)
    check_layout("scale_rows_", x=x, scale=scale)
    if x.numel():
        _scale_rows_kernel[grid](x, scale, hidden, BH=config.BLOCK, SIGMOID=sigmoid, **config.options, **dependent(x))
    return x
