"""Triton: copy experts from pinned host memory into their slots, by a list on the device.

The list is the table of a wave. Every program reads it, and copies its share of each expert that has a slot there,
BLOCK values at a time. Eight programs with 32 KiB each in flight saturate the link; more gain nothing. The other
multiprocessors stay free for rows that hit. If the table is empty, all programs exit at once.

With places in host memory, slots and places exchange their experts, block by block. The link carries both directions at
once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.expert_residency import GATHER_NANOSECONDS

_NANOSECONDS = tl.constexpr(GATHER_NANOSECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherConfig(Config):
    """PROGRAMS programs copy blocks of BYTES in turn."""

    PROGRAMS: int = 8
    BYTES: int = 32768


CONFIGS = tuple(
    GatherConfig(PROGRAMS=programs, BYTES=size, num_warps=8, num_stages=1)
    for programs, size in ((8, 32768), (4, 32768), (6, 32768), (8, 16384), (12, 32768), (16, 16384))
)


@triton.jit
def _copy(p_from, p_to, N: tl.constexpr, BLOCK: tl.constexpr, SWAP: tl.constexpr):
    """Copy this program's blocks of N values, or exchange them."""
    for i_n in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        if SWAP:
            b_old = tl.load(p_to + o_n, mask=o_n < N)
            tl.store(p_to + o_n, tl.load(p_from + o_n, mask=o_n < N), mask=o_n < N)
            tl.store(p_from + o_n, b_old, mask=o_n < N)
        elif N % BLOCK:
            tl.store(p_to + o_n, tl.load(p_from + o_n, mask=o_n < N), mask=o_n < N)
        else:
            tl.store(p_to + o_n, tl.load(p_from + o_n))


@triton.jit(do_not_specialize=["i_layer", "E"])
def _gather_experts_kernel(
    p_store, p_table, p_places, p_gate_up, p_down, p_counts, i_layer, E, N_UP: tl.constexpr, N_DOWN: tl.constexpr,
    BE: tl.constexpr, BLOCK: tl.constexpr, SWAP: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Copy p_store [L E, N_UP + N_DOWN] to p_gate_up [S, N_UP] and p_down [S, N_DOWN]. Grid: (any,).

    SWAP: exchange slots and the rows p_places [E] of p_store.
    TIMED: the first program adds its nanoseconds to p_counts.
    """
    o_e = tl.arange(0, BE)
    b_slot = tl.load(p_table + o_e, mask=o_e < E, other=-1)
    b_left = (b_slot >= 0).to(tl.int32)
    n_left = tl.sum(b_left, 0)
    if n_left == 0:
        return
    if TIMED:
        b_begun = tl.extra.cuda.globaltimer()
    for _ in range(n_left):
        b_e = tl.min(tl.where(b_left > 0, o_e, BE), 0)
        b_s = tl.sum(tl.where(o_e == b_e, b_slot, 0), 0).to(tl.int64)
        b_row = (i_layer * E + b_e).to(tl.int64)
        if SWAP:
            b_row = tl.load(p_places + b_e).to(tl.int64)
        p_blob = p_store + b_row * (N_UP + N_DOWN)
        _copy(p_blob, p_gate_up + b_s * N_UP, N_UP, BLOCK, SWAP)
        _copy(p_blob + N_UP, p_down + b_s * N_DOWN, N_DOWN, BLOCK, SWAP)
        b_left = tl.where(o_e == b_e, 0, b_left)
    if TIMED:  # noqa: SIM102 - the compiler wants to know first
        if tl.program_id(0) == 0:
            b_spent = (tl.extra.cuda.globaltimer() - b_begun).to(tl.int64)
            tl.store(p_counts + _NANOSECONDS, tl.load(p_counts + _NANOSECONDS) + b_spent)


def gather_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    config: GatherConfig = CONFIGS[0],
) -> None:
    """See `moeyard_kernels.ops.gather_experts`."""
    launch.check_layout("gather_experts", store=store)
    launch.check_layout("gather_experts", table=table, gate_up=gate_up, down=down)
    launch.check_indices("gather_experts", low=-1, high=gate_up.shape[0], table=table)
    if places is not None:
        launch.check_layout("gather_experts", places=places)
        launch.check_indices("gather_experts", low=-1, high=store.shape[0], places=places)
    # Integers of the same size, which the interpreter does not round.
    word = torch.int16 if store.itemsize == 2 else torch.int32
    _gather_experts_kernel[(config.PROGRAMS,)](
        store.view(word),
        table,
        table if places is None else places,
        gate_up.view(word),
        down.view(word),
        table if counts is None else counts,
        layer,
        table.shape[0],
        N_UP=gate_up[0].numel(),
        N_DOWN=down[0].numel(),
        BE=max(32, triton.next_power_of_2(table.shape[0])),
        BLOCK=config.BYTES // store.itemsize,
        SWAP=places is not None,
        TIMED=counts is not None and not launch.interpreted(),
        **config.options,
    )
