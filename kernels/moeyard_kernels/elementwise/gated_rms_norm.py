"""Triton: the norm behind linear attention, each head by itself, times its activated gate."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_indices, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, row_scale, row_tile


@triton.jit(do_not_specialize=("stride_gate",))
def _gated_rms_norm_kernel(
    p_x, p_gate, p_weight, p_rows, p_out, num_rows, H, stride_gate, D, eps,
    SIGMOID: tl.constexpr, FROM_ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Heads [i BR, i BR + BR) of contiguous [num_rows, D], row t H + h being head h. Grid: (ceil(num_rows / BR),).

    FROM_ROWS: token t's heads are those of token p_rows[t].
    """
    # A weight in fp32 rounds nothing before the gate: see the oracle.
    DTYPE: tl.constexpr = p_weight.dtype.element_ty
    let_next_begin()
    wait_for_previous()
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < num_rows)[:, None] & m_d[None, :]
    o_from = o_r
    if FROM_ROWS:
        o_from = tl.load(p_rows + o_r // H, mask=o_r < num_rows, other=0) * H + o_r % H
    b_x = tl.load(p_x + o_from[:, None] * D + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    o_gate = (o_r // H) * stride_gate + (o_r % H) * D
    b_gate = tl.load(p_gate + o_gate[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = round_to(round_to(b_x * row_scale(b_x, D, eps), DTYPE) * b_weight[None, :], DTYPE)
    b_open = 1.0 + tl.exp(-b_gate)
    b_y = round_to(b_y * ((1.0 if SIGMOID else b_gate) / b_open), p_x.dtype.element_ty)
    tl.store(p_out + o_r[:, None] * D + o_d[None, :], b_y.to(p_out.dtype.element_ty), mask=m_x)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, sigmoid: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.gated_rms_norm`. Raises ValueError for what its grid cannot hold."""
    num_tokens, heads, dim = x.shape
    check_layout("gated_rms_norm", x=x, weight=weight, rows=rows)
    check_rows("gated_rms_norm", x=x, gate=gate)
    if rows is not None:
        check_indices("gated_rms_norm", low=0, high=num_tokens, rows=rows)
    together, block = row_tile(dim)
    if triton.cdiv(num_tokens * heads, together) > MAX_GRID_X:
        raise ValueError(f"gated_rms_norm: {list(x.shape)} exceeds the grid of a GPU")
    out = new_output(num_tokens, heads * dim, like=x)
    if out.numel():
        _gated_rms_norm_kernel[(triton.cdiv(num_tokens * heads, together),)](
            x, gate, weight, weight if rows is None else rows, out, num_tokens * heads, heads, gate.stride(0), dim, eps,
            SIGMOID=sigmoid, FROM_ROWS=rows is not None, BR=together, BD=block, num_warps=NUM_WARPS,
            enable_fp_fusion=False, **dependent(x),
        )  # fmt: skip
    return finish(out, x.dtype)
