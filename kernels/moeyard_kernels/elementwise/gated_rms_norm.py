"""Triton: the norm after linear attention, per head, times its activated gate."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_indices, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows, stride_unit
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, row_scale, row_tile


@triton.jit
def gated_rows(
    p_x, p_gate, p_weight, p_rows, p_out, i_block, num_rows, H: tl.constexpr, stride_gate, D: tl.constexpr, eps,
    SIGMOID: tl.constexpr, FROM_ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Normalise heads [i_block BR, i_block BR + BR) of contiguous [num_rows, D]; row t H + h is head h of token t."""
    # With an fp32 weight nothing is rounded before the gate, as in the reference.
    DTYPE: tl.constexpr = p_weight.dtype.element_ty
    o_r = i_block * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < num_rows)[:, None] & m_d[None, :]
    i_token, i_h = (o_r // H).to(tl.int64), o_r % H
    p_bx = p_x + ((i_token * H + i_h) * D)[:, None] + o_d[None, :]
    p_bgate = p_gate + (i_token * stride_gate + i_h * D)[:, None] + o_d[None, :]
    if EVEN:
        b_x, b_gate = tl.load(p_bx), tl.load(p_bgate).to(tl.float32)
        b_weight = tl.load(p_weight + o_d).to(tl.float32)
    else:
        b_x = tl.load(p_bx, mask=m_x, other=0.0)
        b_gate = tl.load(p_bgate, mask=m_x, other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    if FROM_ROWS:
        # Most rows map to themselves: their loads do not wait for the mapping.
        i_from = tl.load(p_rows + i_token, mask=o_r < num_rows, other=0)
        p_other = p_x + ((i_from * H + i_h) * D)[:, None] + o_d[None, :]
        b_x = tl.load(p_other, mask=m_x & (i_from != i_token)[:, None], other=b_x)
    b_x = b_x.to(tl.float32)
    b_y = round_to(round_to(b_x * row_scale(b_x, D, eps), DTYPE) * b_weight[None, :], DTYPE)
    b_open = 1.0 + tl.exp(-b_gate)
    b_y = round_to(b_y * ((1.0 if SIGMOID else b_gate) / b_open), p_x.dtype.element_ty)
    p_by = p_out + (o_r.to(tl.int64) * D)[:, None] + o_d[None, :]
    if EVEN:
        tl.store(p_by, b_y.to(p_out.dtype.element_ty))
    else:
        tl.store(p_by, b_y.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=("stride_gate",))
def _gated_rms_norm_kernel(
    p_x, p_gate, p_weight, p_rows, p_out, num_rows, stride_gate, eps, H: tl.constexpr, D: tl.constexpr,
    SIGMOID: tl.constexpr, FROM_ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr
):  # fmt: skip
    """Grid: (ceil(num_rows / BR),). FROM_ROWS: token t's heads are those of token p_rows[t]. EVEN: all tiles are full.

    stride_gate is in units of UNIT elements.
    """
    let_next_begin()
    wait_for_previous()
    gated_rows(
        p_x, p_gate, p_weight, p_rows, p_out, tl.program_id(0), num_rows, H, stride_gate * UNIT, D, eps,
        SIGMOID, FROM_ROWS, BR, BD, EVEN,
    )  # fmt: skip


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    sigmoid: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gated_rms_norm`. Raises ValueError for what its grid cannot hold."""
    num_tokens, heads, dim = x.shape
    check_layout("gated_rms_norm", x=x, weight=weight, rows=rows)
    check_rows("gated_rms_norm", x=x, gate=gate)
    if rows is not None:
        check_indices("gated_rms_norm", low=0, high=num_tokens, rows=rows)
    together, block = row_tile(dim)
    num_rows = num_tokens * heads
    # The kernel counts rows in 32 bits.
    if num_rows + together > MAX_GRID_X:
        raise ValueError(f"gated_rms_norm: {list(x.shape)} exceeds the grid of a GPU")
    out, unit = new_output(num_tokens, heads * dim, like=x), stride_unit(gate)
    if out.numel():
        _gated_rms_norm_kernel[(triton.cdiv(num_rows, together),)](
            x,
            gate,
            weight,
            weight if rows is None else rows,
            out,
            num_rows,
            gate.stride(0) // unit,
            eps,
            H=heads,
            D=dim,
            SIGMOID=sigmoid,
            FROM_ROWS=rows is not None,
            BR=together,
            BD=block,
            EVEN=num_rows % together == 0 and dim == block,
            UNIT=unit,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(x),
        )
    return finish(out, x.dtype)
