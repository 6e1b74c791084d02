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


@triton.jit
def _keep_block(
    p_rows, p_slots, p_chunks, p_moves, i_part, B, N, s_rows, SIZE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """Keep block i_part of a slot's SIZE rows of W values, each of which has ceil(W / BLOCK) blocks."""
    PARTS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    i_r = i_part // PARTS
    o_w = i_part % PARTS * BLOCK + tl.arange(0, BLOCK)
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


@triton.jit(do_not_specialize=("B", "N"))
def _keep_last_kernel(
    p_keys, p_recent, p_compressed, p_pending, p_chunks, p_moves, B, N, s_keys, s_compressed,
    SIZE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIZE2: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """p_recent [slots, SIZE, D] and p_pending [slots, SIZE2, W]. Grid: all blocks of a slot."""
    let_next_begin()
    wait_for_previous()
    PARTS: tl.constexpr = SIZE * ((D + BD - 1) // BD)
    i_part = tl.program_id(0)
    if i_part < PARTS:
        _keep_block(p_keys, p_recent, p_chunks, p_moves, i_part, B, N, s_keys, SIZE, D, BD)
    elif SIZE2 > 0:
        _keep_block(p_compressed, p_pending, p_chunks, p_moves, i_part - PARTS, B, N, s_compressed, SIZE2, W, BW)


def keep_last(
    keys: torch.Tensor,
    recent: torch.Tensor,
    compressed: torch.Tensor | None = None,
    pending: torch.Tensor | None = None,
    *,
    tables: PromptTables,
) -> None:
    """See `moeyard_kernels.ops.keep_last`."""
    check_indices("keep_last", low=0, high=recent.shape[0], moves=tables.moves[:, 2])
    # As integers of their size, which no interpreter rounds.
    word = torch.int16 if recent.itemsize == 2 else torch.int32
    keys, recent = keys.view(word), recent.view(word)
    size, dim = recent.shape[1:]
    size2, width = (0, 1) if pending is None else pending.shape[1:]
    blocks = [min(_BLOCK, triton.next_power_of_2(columns)) for columns in (dim, width)]
    _keep_last_kernel[(size * triton.cdiv(dim, blocks[0]) + size2 * triton.cdiv(width, blocks[1]),)](
        keys,
        recent,
        keys if compressed is None else compressed.view(torch.int32),
        recent if pending is None else pending.view(torch.int32),
        tables.chunks,
        tables.moves,
        len(tables.chunks),
        len(tables.moves),
        keys.stride(0),
        0 if compressed is None else compressed.stride(0),
        SIZE=size,
        D=dim,
        BD=blocks[0],
        SIZE2=size2,
        W=width,
        BW=blocks[1],
        num_warps=4,
        **dependent(recent),
    )
