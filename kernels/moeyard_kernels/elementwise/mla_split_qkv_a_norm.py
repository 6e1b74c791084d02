"""Triton: two norms and a copy after the fused down projection of latent attention, in one launch."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, finish, new_output
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, norm_rows, row_tile


@triton.jit
def _mla_split_qkv_a_norm_kernel(
    p_x, p_q_weight, p_kv_weight, p_q, p_kv, p_rope, num_rows, stride_x, DQ, DKV, DR, eps, num_q_blocks,
    BRQ: tl.constexpr, BDQ: tl.constexpr, BRKV: tl.constexpr, BDKV: tl.constexpr, BDR: tl.constexpr
):  # fmt: skip
    """Normalise queries in the first programs; in the others, normalise latents and copy the values after them.

    Grid: (num_q_blocks + ceil(num_rows / BRKV),), num_q_blocks = ceil(num_rows / BRQ).
    """
    let_next_begin()
    wait_for_previous()
    i_block = tl.program_id(0)
    if i_block < num_q_blocks:
        norm_rows(p_x, p_q_weight, p_q, i_block, num_rows, stride_x, DQ, DQ, eps, BR=BRQ, BD=BDQ)
    else:
        i_block -= num_q_blocks
        o_r = i_block.to(tl.int64) * BRKV + tl.arange(0, BRKV)
        o_d = tl.arange(0, BDR)
        m_r = (o_r < num_rows)[:, None] & (o_d < DR)[None, :]
        b_rope = tl.load(p_x + o_r[:, None] * stride_x + (DQ + DKV + o_d)[None, :], mask=m_r, other=0.0)
        norm_rows(p_x + DQ, p_kv_weight, p_kv, i_block, num_rows, stride_x, DKV, DKV, eps, BR=BRKV, BD=BDKV)
        tl.store(p_rope + o_r[:, None] * DR + o_d[None, :], b_rope.to(p_rope.dtype.element_ty), mask=m_r)


def mla_split_qkv_a_norm(
    qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.mla_split_qkv_a_norm`. Rows of qkv_a may be slices of wider ones."""
    op = "mla_split_qkv_a_norm"
    check_rows(op, qkv_a=qkv_a, q_weight=q_weight, kv_weight=kv_weight)
    num_rows, dim_q, dim_kv = qkv_a.shape[0], q_weight.shape[0], kv_weight.shape[0]
    dim_rope = qkv_a.shape[1] - dim_q - dim_kv
    (rows_q, block_q), (rows_kv, block_kv) = row_tile(dim_q), row_tile(dim_kv)
    q_blocks = triton.cdiv(num_rows, rows_q)
    grid = q_blocks + triton.cdiv(num_rows, rows_kv)
    if grid > MAX_GRID_X:
        raise ValueError(f"{op}: {list(qkv_a.shape)} exceeds the grid of a GPU")
    q, kv, rope = (new_output(num_rows, dim, like=qkv_a) for dim in (dim_q, dim_kv, dim_rope))
    if num_rows:
        _mla_split_qkv_a_norm_kernel[(grid,)](
            qkv_a,
            q_weight,
            kv_weight,
            q,
            kv,
            rope,
            num_rows,
            qkv_a.stride(0),
            dim_q,
            dim_kv,
            dim_rope,
            eps,
            q_blocks,
            BRQ=rows_q,
            BDQ=block_q,
            BRKV=rows_kv,
            BDKV=block_kv,
            BDR=max(16, triton.next_power_of_2(dim_rope)),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(qkv_a),
        )
    return finish(q, qkv_a.dtype), finish(kv, qkv_a.dtype), finish(rope, qkv_a.dtype)
