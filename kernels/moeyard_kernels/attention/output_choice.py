"""Triton: the entries with the largest scores of each row, ascending, one program per row (`radix_choice`)."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.radix_choice import least_chosen, take
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous

# Scores that a program holds at once.
_BLOCK = 4096


@triton.jit(do_not_specialize=("N",))
def _choose_kernel(p_scores, p_positions, p_out, N, RATIO: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr):
    """Grid: (rows,)."""
    wait_for_previous()
    let_next_begin()
    i_r = tl.program_id(0).to(tl.int64)
    i_count = ((tl.load(p_positions + i_r) + 1) // RATIO).to(tl.int32)
    if i_count > TOP_K:
        p_row = p_scores + i_r * N
        i_least, i_need = least_chosen(p_row, i_count, TOP_K, BN)
        i_taken, i_equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for i_n in tl.range(0, i_count, BN):
            o_n = i_n + tl.arange(0, BN)
            m_take, o_out, i_taken, i_equal = take(p_row, o_n, i_count, i_least, i_need, i_taken, i_equal)
            tl.store(p_out + i_r * TOP_K + o_out, o_n, mask=m_take)


def output_choice(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, top_k: int) -> torch.Tensor:
    """See `moeyard_kernels.ops.output_choice`."""
    count, num = scores.shape
    out = torch.empty(count, top_k, dtype=torch.int32, device=scores.device)
    if count:
        block = min(_BLOCK, max(256, triton.next_power_of_2(num)))
        options = {"num_warps": 16, **dependent(scores)}
        _choose_kernel[(count,)](scores, positions, out, num, RATIO=ratio, TOP_K=top_k, BN=block, **options)
    return out
