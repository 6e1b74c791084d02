"""Triton: the weighted sum of a token's expert outputs, in top-k order, shared expert last."""

import torch
import triton
import triton.language as tl

# The largest extent of a CUDA grid in y. (Kernel parameters carry no annotations: a GPU build would compile them.)
_MAX_GRID_Y = 65535


@triton.jit
def _moe_weighted_reduce_kernel(  # type: ignore[no-untyped-def]
    p_partial, p_weights, p_shared, p_out, H, K: tl.constexpr, HAS_SHARED: tl.constexpr, BH: tl.constexpr
):
    """One program sums one token's columns [i_h BH, i_h BH + BH). Grid: (T, ceil(H / BH))."""
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
    tl.store(p_out + i_t * H + o_h, b_acc.to(p_out.dtype.element_ty), mask=m_h)


def moe_weighted_reduce(
    partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.moe_weighted_reduce`. Raises ValueError for what its grid cannot hold."""
    num_tokens, top_k, hidden = partial.shape
    block = min(1024, triton.next_power_of_2(max(1, hidden)))
    if triton.cdiv(hidden, block) > _MAX_GRID_Y or num_tokens > 2**31 - 1:
        raise ValueError(f"moe_weighted_reduce: [{num_tokens}, {top_k}, {hidden}] exceeds the grid of a GPU")
    # The interpreter truncates fp32 to bf16 in stores, so there fp32 is stored and torch rounds.
    out = torch.empty(
        num_tokens, hidden, device=partial.device, dtype=partial.dtype if partial.is_cuda else torch.float32
    )
    if out.numel():
        _moe_weighted_reduce_kernel[(num_tokens, triton.cdiv(hidden, block))](
            partial.contiguous(),
            weights.contiguous(),
            partial if shared is None else shared.contiguous(),
            out,
            hidden,
            K=top_k,
            HAS_SHARED=shared is not None,
            BH=block,
        )
    return out.to(partial.dtype)
