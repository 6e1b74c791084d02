"""Triton: residual, shared expert and scaled routed experts in one sum, with the rounding of two launches."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.tuning import RowConfig, choose

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps)
    for block, warps in ((256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
)


def shape_class(num_rows: int, hidden: int) -> str:
    """Decode steps want many small programs, prompts few large ones."""
    return f"{'few' if num_rows <= 64 else 'many'} H{hidden}"


def default_config(num_rows: int, hidden: int) -> RowConfig:
    """The config of shapes that nobody tuned."""
    block = min(512 if num_rows <= 64 else 2048, max(16, triton.next_power_of_2(hidden)))
    return RowConfig(BLOCK=block, num_warps=max(1, block // 256))


@triton.jit
def _residual_add_scaled_kernel(p_hidden, p_shared, p_routed, p_out, scale, H, BH: tl.constexpr):
    """One program sums one row's columns [i_h BH, i_h BH + BH). Grid: (T, ceil(H / BH))."""
    let_next_begin()
    wait_for_previous()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    o_x = i_t * H + o_h
    b_hidden = tl.load(p_hidden + o_x, mask=m_h, other=0.0).to(tl.float32)
    b_shared = tl.load(p_shared + o_x, mask=m_h, other=0.0).to(tl.float32)
    b_routed = tl.load(p_routed + o_x, mask=m_h, other=0.0).to(tl.float32)
    b_sum = round_to(tl.fma(b_routed, tl.full([BH], scale, tl.float32), b_shared), p_hidden.dtype.element_ty)
    tl.store(p_out + o_x, (b_hidden + b_sum).to(p_out.dtype.element_ty), mask=m_h)


def residual_add_scaled(
    hidden: torch.Tensor,
    shared: torch.Tensor,
    routed: torch.Tensor,
    scale: float,
    *,
    config: RowConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.residual_add_scaled`. Raises ValueError for what its grid cannot hold."""
    op = "residual_add_scaled"
    num_rows, dim = hidden.shape
    config = config or choose(
        op, shape_class(num_rows, dim), hidden, (RowConfig,), lambda: default_config(num_rows, dim)
    )
    num_blocks = triton.cdiv(dim, config.BLOCK)
    if num_blocks > MAX_GRID_Y or num_rows > MAX_GRID_X:
        raise ValueError(f"{op}: [{num_rows}, {dim}] exceeds the grid of a GPU")
    check_layout(op, hidden=hidden, shared=shared, routed=routed)
    out = new_output(num_rows, dim, like=hidden)
    if out.numel():
        _residual_add_scaled_kernel[(num_rows, num_blocks)](
            hidden, shared, routed, out, float(scale), dim, BH=config.BLOCK, **config.options, **dependent(hidden)
        )
    return finish(out, hidden.dtype)
