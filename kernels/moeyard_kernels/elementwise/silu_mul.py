"""Triton: the gated activation of an MLP whose gate and up projections are one matrix."""

import functools

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows, row_launch
from moeyard_kernels.common.tuning import RowConfig

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps)
    for block, warps in ((256, 1), (256, 2), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
)


@functools.cache
def rounded_limit(limit: float | None, dtype: torch.dtype) -> float:
    """Return the limit of gates and ups as kernels take it: a value of dtype, or 0 for none."""
    return 0.0 if limit is None else float(torch.tensor(limit, dtype=dtype))


@triton.jit
def silu_mul_values(b_gate, b_up, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """Return round(silu(gate)) * up of fp32 values, with the rounding to DTYPE. The store rounds the product.

    LIMIT: see `rounded_limit`. NaN stays NaN.
    """
    if LIMIT > 0:
        b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
        b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up))
    return round_to(b_gate / (1.0 + tl.exp(-b_gate)), DTYPE) * b_up


@triton.jit
def _silu_mul_kernel(p_x, p_out, stride_x, I, BI: tl.constexpr, LIMIT: tl.constexpr):  # noqa: E741
    """Activate one row's columns [i_i BI, i_i BI + BI). Grid: (M, ceil(I / BI))."""
    let_next_begin()
    wait_for_previous()
    i_m = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BI + tl.arange(0, BI)
    m_i = o_i < I
    p_row = p_x + i_m * stride_x
    b_gate = tl.load(p_row + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + I + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_y = silu_mul_values(b_gate, b_up, p_x.dtype.element_ty, LIMIT)
    tl.store(p_out + i_m * I + o_i, b_y.to(p_out.dtype.element_ty), mask=m_i)


def silu_mul(gate_up: torch.Tensor, limit: float | None = None, *, config: RowConfig | None = None) -> torch.Tensor:
    """See `moeyard_kernels.ops.silu_mul`. Raises ValueError for what its grid cannot hold."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    config, grid = row_launch("silu_mul", gate_up, num_rows=num_rows, width=inner, name="I", config=config)
    check_rows("silu_mul", gate_up=gate_up)
    out = new_output(num_rows, inner, like=gate_up)
    if out.numel():
        _silu_mul_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            inner,
            BI=config.BLOCK,
            LIMIT=rounded_limit(limit, gate_up.dtype),
            **config.options,
            **dependent(gate_up),
        )
    return finish(out, gate_up.dtype)
