"""Triton: the last rows of prompt chunks, written into slots. One program per row of a slot and block of columns.

A program first copies the state before each chunk into the chunk's own slot, and then takes the moves one by one. No
slot that holds a state before a chunk is read after that, so snapshots may overwrite it.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.types.prompt_tables import PromptTables

# Values per program.
_BLOCK = 1024


@triton.jit(do_not_specialize=("B", "N"))
def _keep_last_kernel(
    p_rows, p_slots, p_chunks, p_moves, B, N, s_rows, SIZE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """p_rows [P, .] and p_slots [slots, SIZE, W] as integers of their size. Grid: (SIZE, ceil(W / BLOCK))."""
    let_next_begin()
    wait_for_previous()
    i_r = tl.program_id(0)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < W
    p_here = p_slots + i_r * W + o_w
    for i_b in range(B):
        i_before = tl.load(p_chunks + i_b * 4 + 2).to(tl.int64)
        i_own = tl.load(p_chunks + i_b * 4 + 3).to(tl.int64)
        if i_before != i_own:
            b_x = tl.load(p_here + i_before * (SIZE * W), mask=m_w & (i_before >= 0), other=0)
            tl.store(p_here + i_own * (SIZE * W), b_x, mask=m_w)
    for i_n in range(N):
        # A thread may read what another one wrote.
        tl.debug_barrier()
        i_b = tl.load(p_moves + i_n * 3)
        i_end = tl.load(p_moves + i_n * 3 + 1)
        i_slot = tl.load(p_moves + i_n * 3 + 2).to(tl.int64)
        i_first = tl.load(p_chunks + i_b * 4)
        i_start = tl.load(p_chunks + i_b * 4 + 1)
        i_own = tl.load(p_chunks + i_b * 4 + 3).to(tl.int64)
        # The last position before the end that belongs to this row.
        i_p = tl.where(i_end > i_r, i_r + (i_end - 1 - i_r) // SIZE * SIZE, -1)
        if i_p >= i_start:
            b_x = tl.load(p_rows + (i_first + i_p - i_start).to(tl.int64) * s_rows + o_w, mask=m_w, other=0)
        else:
            b_x = tl.load(p_here + i_own * (SIZE * W), mask=m_w, other=0)
        tl.debug_barrier()
        tl.store(p_here + i_slot * (SIZE * W), b_x, mask=m_w)


def keep_last(rows: torch.Tensor, slots: torch.Tensor, *, tables: PromptTables) -> None:
    """See `moeyard_kernels.ops.keep_last`."""
    check_indices("keep_last", low=0, high=slots.shape[0], moves=tables.moves[:, 2])
    _, size, width = slots.shape
    if not slots.numel():
        return
    # As integers of their size, which no interpreter rounds.
    word = torch.int16 if slots.itemsize == 2 else torch.int32
    block = min(_BLOCK, triton.next_power_of_2(width))
    _keep_last_kernel[(size, triton.cdiv(width, block))](
        rows.view(word),
        slots.view(word),
        tables.chunks,
        tables.moves,
        len(tables.chunks),
        len(tables.moves),
        rows.stride(0),
        SIZE=size,
        W=width,
        BLOCK=block,
        num_warps=4,
        **dependent(slots),
    )
