"""Triton: root-mean-square normalisation, alone and fused with the residual addition.

A sum over a row is a tree whose shape depends on the tile, so the tile depends only on D. Every kernel that normalises
rows takes its tile from `row_tile` and its arithmetic from `normed`, so all of them agree bit for bit.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows, row_strides

# Elements per program, and warps: at least two 16-byte loads per thread. A multiprocessor then has twice the bytes in
# flight that one load would give (4096 x 2048 on an H200: 9.9 us, not 10.4).
_TILE, NUM_WARPS = 2048, 4


def row_tile(dim: int) -> tuple[int, int]:
    """Return (BR, BD): rows per program and their padded length. They depend on D only: the tile orders the sum."""
    block = max(16, triton.next_power_of_2(dim))
    return max(1, _TILE // block), block


@triton.jit
def row_scale(b_x, D, eps):
    """Return [BR, 1]: 1 / sqrt(mean(x^2) + eps) of rows b_x [BR, BD] fp32, which are zero past D."""
    b_square = tl.sum(b_x * b_x, 1)
    b_mean = tl.div_rn(b_square, tl.full([b_x.shape[0]], D, tl.float32))
    b_scale = tl.div_rn(tl.full([b_x.shape[0]], 1.0, tl.float32), tl.sqrt_rn(b_mean + eps))
    return b_scale[:, None]


@triton.jit
def normed(b_x, b_weight, D, eps, DTYPE: tl.constexpr):
    """Return weight * round(x / sqrt(mean(x^2) + eps)) before its last rounding; b_x [BR, BD] fp32 is zero past D.

    DTYPE: the weight's, which is that of the rows, or fp32. With fp32 nothing is rounded before the product.
    """
    return round_to(b_x * row_scale(b_x, D, eps), DTYPE) * b_weight[None, :]


@triton.jit
def norm_rows(
    p_x, p_weight, p_out, i_block, num_rows, stride_x, stride_out, D, eps, BR: tl.constexpr, BD: tl.constexpr
):
    """Normalise rows [i_block BR, i_block BR + BR) of D elements, stride_x apart, to rows stride_out apart."""
    o_r = i_block.to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < num_rows)[:, None] & m_d[None, :]
    b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = normed(b_x, b_weight, D, eps, p_weight.dtype.element_ty)
    tl.store(p_out + o_r[:, None] * stride_out + o_d[None, :], b_y.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def _rms_norm_kernel(p_x, p_weight, p_out, A, B, stride_a, stride_b, D, eps, BR: tl.constexpr, BD: tl.constexpr):
    """Normalise rows (a, b) for a in [i_a BR, i_a BR + BR) and one b. Grid: (ceil(A / BR), B)."""
    let_next_begin()
    wait_for_previous()
    i_b = tl.program_id(1).to(tl.int64)
    norm_rows(
        p_x + i_b * stride_b, p_weight, p_out + i_b * D, tl.program_id(0), A, stride_a, B * D, D, eps, BR=BR, BD=BD
    )


@triton.jit
def _add_rms_norm_kernel(
    p_x, p_residual, p_weight, p_out, p_total, num_rows, D, eps, BR: tl.constexpr, BD: tl.constexpr
):
    """Normalise rows [i_r BR, i_r BR + BR) of contiguous [num_rows, D]. Grid: (ceil(num_rows / BR),)."""
    let_next_begin()
    wait_for_previous()
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < num_rows)[:, None] & m_d[None, :]
    o_x = o_r[:, None] * D + o_d[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_residual = tl.load(p_residual + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_total = round_to(b_x + b_residual, p_x.dtype.element_ty)
    tl.store(p_total + o_x, b_total.to(p_total.dtype.element_ty), mask=m_x)
    b_y = normed(b_total, b_weight, D, eps, p_weight.dtype.element_ty)
    tl.store(p_out + o_x, b_y.to(p_out.dtype.element_ty), mask=m_x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `moeyard_kernels.ops.rms_norm`. Rows may be slices of wider ones; raises ValueError for other strides."""
    dim = x.shape[-1]
    check_rows("rms_norm", x=x, weight=weight)
    num_a, num_b, stride_a, stride_b = row_strides("rms_norm", "x", x)
    rows, block = row_tile(dim)
    if triton.cdiv(num_a, rows) > MAX_GRID_X or num_b > MAX_GRID_Y:
        raise ValueError(f"rms_norm: {list(x.shape)} exceeds the grid of a GPU")
    out = new_output(*x.shape, like=x)
    if out.numel():
        _rms_norm_kernel[(triton.cdiv(num_a, rows), num_b)](
            x,
            weight,
            out,
            num_a,
            num_b,
            stride_a,
            stride_b,
            dim,
            eps,
            BR=rows,
            BD=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(x),
        )
    return finish(out, x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.add_rms_norm`. Raises ValueError unless all are contiguous."""
    dim = x.shape[-1]
    check_layout("add_rms_norm", x=x, residual=residual, weight=weight)
    rows, block = row_tile(dim)
    num_rows = x.numel() // max(1, dim)
    if triton.cdiv(num_rows, rows) > MAX_GRID_X:
        raise ValueError(f"add_rms_norm: {list(x.shape)} exceeds the grid of a GPU")
    out, total = new_output(*x.shape, like=x), new_output(*x.shape, like=x)
    if out.numel():
        _add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            residual,
            weight,
            out,
            total,
            num_rows,
            dim,
            eps,
            BR=rows,
            BD=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(x),
        )
    return finish(out, x.dtype), finish(total, x.dtype)
