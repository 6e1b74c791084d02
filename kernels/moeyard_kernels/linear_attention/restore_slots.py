"""Triton: copy the states and windows of a layer between slots, by a list on the device.

Every program reads the list and copies its block for its share of the moves. Without moves it returns at once. It is a
separate launch because all other work of a step on slots comes later and may overwrite the sources.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import check_indices, check_layout
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.state_slots import SlotMoves

# The least size of the compiled list of moves. Longer lists are compiled for their size.
_MOVES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreConfig(Config):
    """A program copies BYTES of every SHARES-th move, so that SHARES moves are in flight together."""

    num_stages: int = 1
    BYTES: int = 16384
    SHARES: int = 4


CONFIGS = tuple(
    RestoreConfig(BYTES=size, num_warps=warps, SHARES=shares)
    for size, warps, shares in ((16384, 4, 4), (16384, 4, 1), (8192, 4, 4), (16384, 4, 8), (16384, 8, 4), (32768, 8, 2))
)


@triton.jit
def _copy_block(p_x, i_from, i_to, i_part, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy values [i_part BLOCK, i_part BLOCK + BLOCK) of slot i_from to slot i_to. A slot has SIZE values."""
    o_n = i_part * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_x + i_to * SIZE + o_n, tl.load(p_x + i_from * SIZE + o_n, mask=o_n < SIZE), mask=o_n < SIZE)


@triton.jit(do_not_specialize=("N",), do_not_specialize_on_alignment=("p_source", "p_target"))
def _restore_slots_kernel(
    p_state, p_window, p_source, p_target, N,
    STATE: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr,
    SHARES: tl.constexpr
):  # fmt: skip
    """p_state [slots, STATE], p_window [slots, WINDOW]. Grid: (ceil(STATE / BS) + ceil(WINDOW / BW), SHARES)."""
    let_next_begin()
    wait_for_previous()
    o_n = tl.arange(0, BN)
    b_source = tl.load(p_source + o_n, mask=o_n < N, other=-1)
    b_target = tl.load(p_target + o_n, mask=o_n < N, other=0)
    b_left = ((b_source >= 0) & (o_n % SHARES == tl.program_id(1))).to(tl.int32)
    n_left = tl.sum(b_left, 0)
    i_part = tl.program_id(0)
    PARTS: tl.constexpr = (STATE + BS - 1) // BS
    for _ in range(n_left):
        i_n = tl.min(tl.where(b_left > 0, o_n, BN), 0)
        i_from, i_to = tl.sum(tl.where(o_n == i_n, b_source, 0), 0), tl.sum(tl.where(o_n == i_n, b_target, 0), 0)
        if i_part < PARTS:
            _copy_block(p_state, i_from, i_to, i_part, STATE, BS)
        else:
            _copy_block(p_window, i_from, i_to, i_part - PARTS, WINDOW, BW)
        b_left = tl.where(o_n == i_n, 0, b_left)


def restore_slots(
    state: torch.Tensor, window: torch.Tensor, *, moves: SlotMoves, config: RestoreConfig = CONFIGS[0]
) -> None:
    """See `moeyard_kernels.ops.restore_slots`."""
    op = "restore_slots"
    check_layout(op, state=state, window=window, source=moves.source, target=moves.target)
    check_indices(op, low=-1, high=state.shape[0], source=moves.source)
    check_indices(op, low=0, high=state.shape[0], target=moves.target)
    num_moves = moves.source.shape[0]
    if not num_moves:
        return
    # As integers of their size, which no interpreter rounds.
    word = torch.int16 if window.itemsize == 2 else torch.int32
    sizes = state[0].numel(), window[0].numel()
    blocks = config.BYTES // state.itemsize, config.BYTES // window.itemsize
    parts = sum(triton.cdiv(*pair) for pair in zip(sizes, blocks, strict=True))
    _restore_slots_kernel[(parts, config.SHARES)](
        state.view(torch.int32),
        window.view(word),
        moves.source,
        moves.target,
        num_moves,
        STATE=sizes[0],
        WINDOW=sizes[1],
        BN=max(_MOVES, triton.next_power_of_2(num_moves)),
        BS=blocks[0],
        BW=blocks[1],
        SHARES=config.SHARES,
        **config.options,
        **dependent(state),
    )
