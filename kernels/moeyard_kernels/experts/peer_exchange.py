"""Triton: writes to the memory of peers, and the wait for theirs. No host, no barrier, no collective library.

    dispatch   rows of x and ids to each peer that owns one of their experts, at [row, source]
    combine    results of received rows to their source, at [row, k], unless the products have already written them

The programs of a packet copy their share and then add it to the receiver's count of arrivals, with release at system
scope. A rank that has seen the whole count with acquire sees all of the data. One program waits, and the launch ends
when the wait ends, so later launches find all data. The number of an exchange is on the device, so a captured step
needs nothing from the host. `dispatch` reads the number of combines and writes the number of dispatches, and `combine`
does the reverse. So no launch reads what it writes.

A wait that times out, or that the host ends, writes the missing ranks, the place and the exchange to host memory and
poisons the rank. Later launches of this rank neither send nor wait. So results of a poisoned rank reach no peer, peers
that need them find them missing, and the device stays usable. Transferred bytes and times of some phases are counted
for the host (`peer_words`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.experts.peer_waits import fail, wait_for
from moeyard_kernels.experts.peer_words import clock_of, count_put, int32_at, int64_at, note_time, put_row, wide
from moeyard_kernels.types import peer_window as window_types
from moeyard_kernels.types.peer_shape import LINE
from moeyard_kernels.types.peer_window import PeerWindow

_DISPATCH, _COMBINE = tl.constexpr(window_types.DISPATCH), tl.constexpr(window_types.COMBINE)
_ARRIVED, _LINE = tl.constexpr(window_types.ARRIVED), tl.constexpr(LINE)
_COMBINED, _DISPATCHED = tl.constexpr(window_types.COMBINED), tl.constexpr(window_types.DISPATCHED)
_POISONED, _SEEN = tl.constexpr(window_types.POISONED), tl.constexpr(window_types.CLOCK)
_TURN = tl.constexpr(window_types.ROWS_PER_TURN)
_SILENT, _TOO_MANY = tl.constexpr(window_types.SILENT), tl.constexpr(window_types.TOO_MANY)

# Ids that the waiting program clears at a time, and that a program counts at a time.
_CLEARED = tl.constexpr(1024)
# Ids that a program of a packet counts in a microsecond.
_COUNTED = 4096
# The most programs of a launch for packets of few rows, and of many rows.
_FEW_PROGRAMS, _MANY_PROGRAMS = 128, 512
_FEW_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketConfig(Config):
    """PROGRAMS programs send a packet: a power of two, at most ARRIVED."""

    PROGRAMS: int


@triton.jit
def _arrive(address, PHASE: tl.constexpr, share):
    """Add this program's share to the count of arrivals, after all of its writes."""
    tl.debug_barrier()
    tl.atomic_add(int64_at(address, PHASE * _LINE * 8), wide(share), sem="release", scope="sys")


@triton.jit
def _await(
    own, p_state, p_fault, epoch, layer, limit, PHASE: tl.constexpr, HEADS: tl.constexpr, WORLD: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    """Wait for all packets of a phase, and return whether they arrived."""
    goal = epoch * (WORLD * _ARRIVED)
    seen = wait_for(int64_at(own, PHASE * _LINE * 8), goal, p_state + _SEEN, p_fault, limit)
    if seen < goal:
        o_w = tl.arange(0, BW)
        p_heads = int64_at(own, HEADS) + (PHASE * WORLD + o_w) * _LINE
        b_epoch = tl.load(p_heads, mask=o_w < WORLD, other=0, volatile=True)
        m_missing = (o_w < WORLD) & (b_epoch < epoch)
        missing = tl.sum(tl.where(m_missing, tl.full([BW], 1, tl.int64) << o_w, 0), 0)
        fail(p_state, p_fault, epoch, layer, missing, PHASE, _SILENT)
    return seen >= goal


@triton.jit
def _settle_ids(
    own, p_state, p_fault, epoch, layer, max_rows, HEADS: tl.constexpr, IDS: tl.constexpr, WORLD: tl.constexpr,
    K: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Set ids to -1 for rows below max_rows that a source did not send, to clear those of earlier exchanges."""
    o_w = tl.arange(0, BW)
    p_counts = int64_at(own, HEADS) + 1
    b_count = tl.load(p_counts + o_w * _LINE, mask=o_w < WORLD, other=0, volatile=True)
    ranks = tl.sum(tl.where(b_count > max_rows, tl.full([BW], 1, tl.int64) << o_w, 0), 0)
    if ranks > 0:
        fail(p_state, p_fault, epoch, layer, ranks, _DISPATCH, _TOO_MANY)
    p_ids = int32_at(own, IDS)
    # Below the least count there is nothing to clear.
    least = tl.min(tl.where(o_w < WORLD, b_count, max_rows), 0).to(tl.int32) * (WORLD * K)
    for i in range(least // _CLEARED * _CLEARED, max_rows * WORLD * K, _CLEARED):
        o_i = i + tl.arange(0, _CLEARED)
        m_i = o_i < max_rows * WORLD * K
        b_has = tl.load(p_counts + o_i // K % WORLD * _LINE, mask=m_i, other=0, volatile=True)
        tl.store(p_ids + o_i, tl.full([_CLEARED], -1, tl.int32), mask=m_i & (o_i // (WORLD * K) >= b_has))


@triton.jit(do_not_specialize=["T", "rank", "layer", "max_rows", "limit"])
def _dispatch_kernel(
    p_x, p_ids, p_owner, p_local, p_table, p_state, p_fault, T, rank, layer, max_rows, limit, N: tl.constexpr,
    K: tl.constexpr, WORLD: tl.constexpr, HEADS: tl.constexpr, COUNTS: tl.constexpr, IDS: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Send x [T, N] words and ids [T, K]. Grid: (W * a power of two up to ARRIVED,), or (1,) without SEND."""
    i_p = tl.program_id(0)
    # The next launch may start during the wait for packets: all programs of this one run by then.
    let_next_begin()
    wait_for_previous()
    if tl.load(p_state + _POISONED) != 0:
        return
    epoch = tl.load(p_state + _COMBINED) + 1
    begun = clock_of(epoch)
    if SEND:
        # Each rank begins with a different peer, and ends with itself.
        i_w = (rank + 1 + i_p % WORLD) % WORLD
        i_g, num_g = i_p // WORLD, tl.num_programs(0) // WORLD
        to = tl.load(p_table + i_w)
        o_k, put = tl.arange(0, BK), wide(0)
        for i_t in range(i_g, T, num_g):
            b_id = tl.load(p_ids + wide(i_t) * K + o_k, mask=o_k < K, other=-1).to(tl.int32)
            o_e = b_id * 2 + i_t // _TURN % 2
            b_owner = tl.load(p_owner + o_e, mask=b_id >= 0, other=-1)
            b_local = tl.load(p_local + o_e, mask=b_id >= 0, other=-1)
            b_local = tl.where(b_owner == i_w, b_local, -1)
            i_row = wide(i_t) * WORLD + rank
            tl.store(int32_at(to, IDS) + i_row * K + o_k, b_local, mask=o_k < K)
            put += 4 * K
            if tl.max(b_local, 0) >= 0:
                put += 4 * N
                put_row(p_x + wide(i_t) * N, int32_at(to, ROWS) + i_row * N, N, BLOCK)
        if i_g == 0:
            p_head = int64_at(to, HEADS) + rank * _LINE
            tl.store(p_head, epoch)
            tl.store(p_head + 1, wide(T))
        _arrive(to, _DISPATCH, _ARRIVED // num_g)
        if i_w != rank:
            count_put(tl.load(p_table + rank), to, put, COUNTS)
    if i_p == 0:
        tl.store(p_state + _DISPATCHED, epoch)
        if WAIT:
            own = tl.load(p_table + rank)
            if _await(own, p_state, p_fault, epoch, layer, limit, _DISPATCH, HEADS, WORLD, BW):
                note_time(own, begun, _DISPATCH, COUNTS)
                _settle_ids(own, p_state, p_fault, epoch, layer, max_rows, HEADS, IDS, WORLD, K, BW)


@triton.jit(do_not_specialize=["rank", "layer", "limit"])
def _combine_kernel(
    p_out, p_table, p_state, p_fault, rank, layer, limit, N: tl.constexpr, K: tl.constexpr, WORLD: tl.constexpr,
    HEADS: tl.constexpr, COUNTS: tl.constexpr, IDS: tl.constexpr, HOME: tl.constexpr, BW: tl.constexpr,
    BLOCK: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """Send out [rows, W, K, N] words if PUT; otherwise the products have sent them. Grid: as in dispatch."""
    i_p = tl.program_id(0)
    let_next_begin()
    wait_for_previous()
    if tl.load(p_state + _POISONED) != 0:
        return
    epoch = tl.load(p_state + _DISPATCHED)
    begun, own, put = clock_of(epoch), tl.load(p_table + rank), wide(0)
    if SEND:
        i_w = (rank + 1 + i_p % WORLD) % WORLD
        i_g, num_g = i_p // WORLD, tl.num_programs(0) // WORLD
        to = tl.load(p_table + i_w)
        num_pairs = tl.load(int64_at(own, HEADS) + i_w * _LINE + 1).to(tl.int32) * K
        if PUT:
            for i_pair in range(i_g, num_pairs, num_g):
                i_row = wide(i_pair // K) * WORLD + i_w
                i_from = i_row * K + i_pair % K
                if tl.load(int32_at(own, IDS) + i_from) >= 0:
                    put_row(p_out + i_from * N, int32_at(to, HOME) + wide(i_pair) * N, N, BLOCK)
                    put += 4 * N
        if i_g == 0:
            tl.store(int64_at(to, HEADS) + (WORLD + rank) * _LINE, epoch)
        # Writes of earlier launches are ordered before it too, because these have ended.
        _arrive(to, _COMBINE, _ARRIVED // num_g)
        if i_w != rank:
            if not PUT:
                # Ids are read after the arrival, but long before a peer can send the next rows.
                for i in range(i_g * _CLEARED, num_pairs, num_g * _CLEARED):
                    o_pair = i + tl.arange(0, _CLEARED)
                    o_from = (o_pair // K * WORLD + i_w) * K + o_pair % K
                    b_id = tl.load(int32_at(own, IDS) + o_from, mask=o_pair < num_pairs, other=-1)
                    put += 4 * N * tl.sum((b_id >= 0).to(tl.int32), 0)
            count_put(own, to, put, COUNTS)
    if i_p == 0:
        tl.store(p_state + _COMBINED, epoch)
        if WAIT:  # noqa: SIM102 - the compiler wants to know first
            if _await(own, p_state, p_fault, epoch, layer, limit, _COMBINE, HEADS, WORLD, BW):
                note_time(own, begun, _COMBINE, COUNTS)


def dispatch_rows(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    window: PeerWindow,
    *,
    layer: int,
    max_rows: int,
    send: bool,
    wait: bool,
    config: PacketConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.dispatch_rows`."""
    launch.check_layout("dispatch_rows", x=x, topk_ids=topk_ids, owner=window.owner)
    launch.check_indices("dispatch_rows", low=-1, high=window.owner.shape[0], topk_ids=topk_ids)
    shape, num_tokens = window.shape, topk_ids.shape[0]
    grid, options = _launch(window, num_tokens, config, send)
    _dispatch_kernel[grid](
        x.view(torch.int32),
        topk_ids,
        window.owner,
        window.local,
        window.table,
        window.state,
        window.fault,
        num_tokens,
        window.rank,
        layer,
        max_rows,
        window.limit,
        K=shape.top_k,
        IDS=shape.ids_offset,
        ROWS=shape.rows_offset,
        BK=triton.next_power_of_2(shape.top_k),
        SEND=send,
        WAIT=wait,
        **options,
    )
    mine = window.views(window.rank)
    return mine.rows[:max_rows].flatten(0, 1), mine.ids[:max_rows].flatten(0, 1)


def combine_rows(
    out: torch.Tensor | None,
    window: PeerWindow,
    *,
    layer: int,
    num_tokens: int,
    max_rows: int | None = None,
    send: bool,
    wait: bool,
    config: PacketConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.combine_rows`."""
    launch.check_layout("combine_rows", out=out, table=window.table)
    shape = window.shape
    num_pairs = (max_rows or shape.max_tokens) * shape.top_k if out is None else out.shape[0] // shape.world_size
    # Without results to send, the programs count ids.
    grid, options = _launch(window, num_pairs // _COUNTED if out is None else num_pairs, config, send)
    _combine_kernel[grid](
        window.table if out is None else out.view(torch.int32),
        window.table,
        window.state,
        window.fault,
        window.rank,
        layer,
        window.limit,
        K=shape.top_k,
        IDS=shape.ids_offset,
        HOME=shape.home_offset,
        SEND=send,
        WAIT=wait,
        PUT=out is not None,
        **options,
    )
    return window.views(window.rank).home[:num_tokens]


def default_config(window: PeerWindow, num_rows: int) -> PacketConfig:
    """Return the config for packets of up to `num_rows`: a program per row, until all packets fill the device."""
    most = (_FEW_PROGRAMS if num_rows <= _FEW_ROWS else _MANY_PROGRAMS) // window.shape.world_size
    programs = 1 << (max(1, min(num_rows, most)).bit_length() - 1)
    return PacketConfig(PROGRAMS=programs, num_warps=8 if window.shape.row_bytes >= 8192 else 4)


def _launch(
    window: PeerWindow, num_rows: int, config: PacketConfig | None, send: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the arguments that both kernels share."""
    config = config or default_config(window, num_rows)
    shape, words = window.shape, window.shape.row_bytes // 4
    return (config.PROGRAMS * shape.world_size if send else 1,), {
        "N": words,
        "WORLD": shape.world_size,
        "HEADS": shape.heads_offset,
        "COUNTS": shape.counts_offset,
        "BW": triton.next_power_of_2(shape.world_size),
        "BLOCK": min(4096, triton.next_power_of_2(words)),
        "num_warps": config.num_warps,
        **dependent(window.table),
    }
