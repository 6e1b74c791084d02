"""Triton: the weighted sum of a token's expert outputs, in top-k order, shared expert and residual last."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.tuning import RowConfig, choose

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps)
    for block, warps in ((256, 1), (256, 2), (512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8))
)


def shape_class(num_tokens: int, top_k: int, hidden: int) -> str:
    """Return the shape class. Decode steps need many small programs, prompts few large ones."""
    return f"{'few' if num_tokens <= 64 else 'many'} K{top_k} H{hidden}"


def default_config(num_tokens: int, hidden: int) -> RowConfig:
    """Return the config of untuned shapes."""
    block = min(256 if num_tokens <= 64 else 2048, max(16, triton.next_power_of_2(hidden)))
    return RowConfig(BLOCK=block, num_warps=2 if block <= 256 else block // 256)


@triton.jit
def _moe_weighted_reduce_kernel(
    p_partial, p_weights, p_shared, p_residual, p_out, H,
    K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Sum one token's columns [i_h BH, i_h BH + BH). Grid: (T, ceil(H / BH))."""
    let_next_begin()
    wait_for_previous()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    b_acc = tl.zeros([BH], dtype=tl.float32)
    for k in tl.static_range(K):
        i_pair = i_t * K + k
        b_x = tl.load(p_partial + i_pair * H + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_acc = tl.fma(tl.broadcast_to(tl.load(p_weights + i_pair), [BH]), b_x, b_acc)
    if HAS_SHARED:
        b_acc += tl.load(p_shared + i_t * H + o_h, mask=m_h, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_residual = tl.load(p_residual + i_t * H + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_acc = b_residual + round_to(b_acc, p_partial.dtype.element_ty)
    tl.store(p_out + i_t * H + o_h, b_acc.to(p_out.dtype.element_ty), mask=m_h)


def moe_weighted_reduce(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    config: RowConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.moe_weighted_reduce`. Raises ValueError for what its grid cannot hold."""
    op = "moe_weighted_reduce"
    num_tokens, top_k, hidden = partial.shape
    config = config or choose(
        op, shape_class(num_tokens, top_k, hidden), partial, (RowConfig,), lambda: default_config(num_tokens, hidden)
    )
    num_blocks = triton.cdiv(hidden, config.BLOCK)
    if num_blocks > MAX_GRID_Y or num_tokens > MAX_GRID_X:
        raise ValueError(f"{op}: [{num_tokens}, {top_k}, {hidden}] exceeds the grid of a GPU")
    check_layout(op, partial=partial, weights=weights, shared=shared, residual=residual)
    out = new_output(num_tokens, hidden, like=partial)
    if out.numel():
        _moe_weighted_reduce_kernel[(num_tokens, num_blocks)](
            partial,
            weights,
            partial if shared is None else shared,
            partial if residual is None else residual,
            out,
            hidden,
            K=top_k,
            HAS_SHARED=shared is not None,
            HAS_RESIDUAL=residual is not None,
            BH=config.BLOCK,
            **config.options,
            **dependent(partial),
        )
    return finish(out, partial.dtype)
