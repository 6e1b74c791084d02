"""Triton: an output gate: each value times the sigmoid of its gate."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import finish, new_output
from moeyard_kernels.common.rows import check_rows, row_launch
from moeyard_kernels.common.tuning import RowConfig

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps)
    for block, warps in ((256, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
)


@triton.jit
def _sigmoid_mul_kernel(p_x, p_gate, p_out, stride_x, stride_gate, N, BN: tl.constexpr):
    """Gate one row's columns [i_n BN, i_n BN + BN). Grid: (M, ceil(N / BN))."""
    let_next_begin()
    wait_for_previous()
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < N
    b_x = tl.load(p_x + i_m * stride_x + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_m * stride_gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = b_x * (1.0 / (1.0 + tl.exp(-b_gate)))
    tl.store(p_out + i_m * N + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, *, config: RowConfig | None = None) -> torch.Tensor:
    """See `moeyard_kernels.ops.sigmoid_mul`. Raises ValueError for what its grid cannot hold."""
    num_rows, width = x.shape
    config, grid = row_launch("sigmoid_mul", x, num_rows=num_rows, width=width, name="N", config=config)
    check_rows("sigmoid_mul", x=x, gate=gate)
    out = new_output(num_rows, width, like=x)
    if out.numel():
        _sigmoid_mul_kernel[grid](
            x, gate, out, x.stride(0), gate.stride(0), width, BN=config.BLOCK, **config.options, **dependent(x)
        )
    return finish(out, x.dtype)
