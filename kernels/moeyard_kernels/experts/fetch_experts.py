"""Triton: fetch the missed experts of all ranks of a host over all their links; the protocol is in `fetch_window`.

One launch has two kinds of programs. The first program sends this rank's list of misses to all ranks. READERS copy from
host memory. First they read for peers, unit by unit, into the owner's staging memory. The flag of
each unit follows with release at system scope, because the owner waits for it. Then they read for this rank, directly
into its slots, in the blocks of `gather_experts`. MOVERS wait for the units that peers read for this rank, each with
acquire. They copy them from staging to the slots, so that little work is left when the last unit arrives.

Each program checks for itself whether the lists have arrived, and programs may disagree at a timeout. Whatever the
others see, a reader without lists reads its share of all misses of this rank, and a mover without lists or without a
unit reads the unit itself. So some units may be read twice, but none is missing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.experts.peer_waits import fail, wait_for
from moeyard_kernels.experts.peer_words import int64_at, wide
from moeyard_kernels.types import expert_residency, fetch_window, peer_window
from moeyard_kernels.types.fetch_window import FetchWindow
from moeyard_kernels.types.peer_shape import LINE

_LINE, _MISSED, _PLACES = tl.constexpr(LINE), tl.constexpr(fetch_window.MISSED), tl.constexpr(fetch_window.PLACES)
_SHARED, _SEEN = tl.constexpr(fetch_window.SHARED), tl.constexpr(fetch_window.SEEN)
_DISPATCHED, _POISONED = tl.constexpr(peer_window.DISPATCHED), tl.constexpr(peer_window.POISONED)
_FETCH, _SILENT = tl.constexpr(peer_window.FETCH), tl.constexpr(peer_window.SILENT)
_NANOSECONDS = tl.constexpr(expert_residency.GATHER_NANOSECONDS)
_FOR_PEERS, _BY_PEERS = tl.constexpr(expert_residency.FOR_PEERS), tl.constexpr(expert_residency.BY_PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig(Config):
    """READERS read from the host, MOVERS copy what peers read; together at most MOST_PROGRAMS. Blocks of BYTES."""

    READERS: int = 8
    MOVERS: int = 8
    BYTES: int = 32768


CONFIGS = tuple(
    FetchConfig(READERS=readers, MOVERS=movers, BYTES=size, num_warps=8, num_stages=1)
    for readers, movers, size in ((8, 8, 32768), (8, 4, 32768), (12, 8, 32768), (8, 16, 32768), (16, 16, 16384))
)


@triton.jit
def _copy(p_from, p_to, begin, n, step, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Copy the blocks of n values at `begin` and every `step` values after it. EVEN: BLOCK divides n."""
    for i_n in range(begin, n, step):
        o_n = i_n + tl.arange(0, BLOCK)
        if EVEN:
            tl.store(p_to + o_n, tl.load(p_from + o_n))
        else:
            tl.store(p_to + o_n, tl.load(p_from + o_n, mask=o_n < n), mask=o_n < n)


@triton.jit
def _of(b_values, o, i):
    """Return the value at number i."""
    return tl.sum(tl.where(o == i, b_values, 0), 0)


@triton.jit
def _tell(
    p_windows, rank, epoch, b_place, b_miss, b_at, n_own, WORLD: tl.constexpr, STAGED: tl.constexpr, BL: tl.constexpr
):
    """Send this rank's misses to all ranks: their number, and the places of the last STAGED in its store."""
    o_l = tl.arange(0, BL)
    b_number = n_own - tl.minimum(n_own, STAGED) + o_l
    m_named = (b_miss[:, None] > 0) & (b_at[:, None] == b_number[None, :])
    b_named = tl.sum(tl.where(m_named, b_place[:, None], 0), 0)
    for i_w in tl.static_range(WORLD):
        p_head = int64_at(tl.load(p_windows + i_w), 0) + rank * _LINE
        tl.store(p_head + _MISSED, wide(n_own))
        tl.store(p_head + _PLACES + o_l, b_named.to(tl.int64), mask=o_l < STAGED)
    tl.debug_barrier()
    for i_w in tl.static_range(WORLD):
        p_head = int64_at(tl.load(p_windows + i_w), 0) + rank * _LINE
        tl.atomic_xchg(p_head, epoch, sem="release", scope="sys")


@triton.jit
def _fail_once(p_state, p_fault, epoch, layer, ranks):
    """Record the missing ranks, unless another program of this rank has recorded a failure."""
    if tl.atomic_xchg(p_state + _POISONED, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu") == 0:
        fail(p_state, p_fault, epoch, layer, ranks, _FETCH, _SILENT)


@triton.jit(do_not_specialize=["i_layer", "E", "rank", "layer", "limit"])
def _fetch_experts_kernel(
    p_store, p_table, p_gate_up, p_down, p_counts, p_windows, p_stores, p_fetch, p_state, p_fault, i_layer, E, rank,
    layer, limit, N_UP: tl.constexpr, N_DOWN: tl.constexpr, WORLD: tl.constexpr, STAGED: tl.constexpr,
    FLAGS: tl.constexpr, STAGING: tl.constexpr, UNIT: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr,
    BL: tl.constexpr, BLOCK: tl.constexpr, READERS: tl.constexpr, MOVERS: tl.constexpr, TELL: tl.constexpr,
    COUNTED: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Values are integers of their size, UNIT per unit. Grid: (READERS + MOVERS,), or (1,) to TELL only."""
    UP: tl.constexpr = (N_UP + UNIT - 1) // UNIT
    UNITS: tl.constexpr = UP + (N_DOWN + UNIT - 1) // UNIT
    EVEN: tl.constexpr = N_UP % BLOCK == 0 and N_DOWN % BLOCK == 0
    TYPE: tl.constexpr = p_gate_up.dtype.element_ty
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    i_p = tl.program_id(0)
    if TIMED:
        begun = tl.extra.cuda.globaltimer()
    o_e, o_w = tl.arange(0, BE), tl.arange(0, BW)
    b_slot = tl.load(p_table + o_e, mask=o_e < E, other=-1)
    b_miss = (b_slot >= 0).to(tl.int32)
    # Index of each expert among this rank's misses.
    b_at = tl.where(b_miss > 0, tl.cumsum(b_miss, 0) - 1, -1)
    n_own = tl.sum(b_miss, 0)
    shared = tl.load(p_fetch + _SHARED) != 0
    epoch = tl.load(p_state + _DISPATCHED)
    own = tl.load(p_windows + rank)

    # Without lists this rank reads all of its misses itself.
    b_units = tl.zeros([BW], dtype=tl.int32)
    b_lent, b_before, b_helped = b_units, b_units, b_units
    kept, begin, end, informed = n_own * UNITS, 0, 0, 0
    # Another program of this launch may be failing. An atomic makes all threads of this one see the same value.
    sound = tl.atomic_add(p_state + _POISONED, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu") == 0
    if shared & sound:
        if TELL:  # noqa: SIM102 - the compiler wants to know first
            if i_p == 0:
                _tell(p_windows, rank, epoch, i_layer * E + o_e, b_miss, b_at, n_own, WORLD, STAGED, BL)
        if READERS + MOVERS > 0:
            p_heads = int64_at(own, 0)
            missing = tl.full((), 0, tl.int64)
            for i_w in tl.static_range(WORLD):
                left = tl.where(missing == 0, wide(limit), 0)
                seen = wait_for(p_heads + i_w * _LINE, epoch, p_fetch + _SEEN + 2 * i_p, p_fault, left)
                missing |= tl.where(seen < epoch, tl.full((), 1 << i_w, tl.int64), 0)
            if missing != 0:
                _fail_once(p_state, p_fault, epoch, layer, missing)
            else:
                informed = 1
                b_count = tl.load(p_heads + o_w * _LINE + _MISSED, mask=o_w < WORLD, other=0, volatile=True)
                b_units = b_count.to(tl.int32) * UNITS
                share = (tl.sum(b_units, 0) + WORLD - 1) // WORLD
                b_lent = tl.minimum(tl.maximum(b_units - share, 0), STAGED * UNITS)
                b_room = tl.where(o_w < WORLD, tl.maximum(share - b_units, 0), 0)
                b_before = tl.cumsum(b_lent, 0) - b_lent
                # End of each rank's part of the offered units.
                b_helped = tl.cumsum(b_room, 0)
                end = tl.minimum(_of(b_helped, o_w, rank), tl.sum(b_lent, 0))
                begin = tl.minimum(_of(b_helped - b_room, o_w, rank), end)
                kept -= _of(b_lent, o_w, rank)

    if READERS > 0:  # noqa: SIM102 - the compiler wants to know first
        if i_p < READERS:
            for i_x in range(begin + i_p, end, READERS):
                i_w = tl.sum(((b_before + b_lent <= i_x) & (o_w < WORLD)).to(tl.int32), 0)
                i_unit = i_x - _of(b_before, o_w, i_w)
                units = _of(b_units, o_w, i_w)
                i_of = units - _of(b_lent, o_w, i_w) + i_unit
                i_named = i_of // UNITS - tl.maximum(units // UNITS - STAGED, 0)
                i_u = i_of % UNITS
                at = tl.load(int64_at(own, 0) + i_w * _LINE + _PLACES + i_named, volatile=True) * (N_UP + N_DOWN)
                if i_u < UP:
                    at += i_u * UNIT
                    n = tl.minimum(N_UP - i_u * UNIT, UNIT)
                else:
                    at += N_UP + (i_u - UP) * UNIT
                    n = tl.minimum(N_DOWN - (i_u - UP) * UNIT, UNIT)
                there = tl.load(p_windows + i_w)
                p_from = tl.multiple_of((tl.load(p_stores + i_w) + at * SIZE).to(tl.pointer_type(TYPE)), 16)
                p_to = (there + STAGING + wide(i_unit) * (UNIT * SIZE)).to(tl.pointer_type(TYPE))
                _copy(p_from, tl.multiple_of(p_to, 16), 0, n, BLOCK, BLOCK, EVEN)
                tl.debug_barrier()
                tl.atomic_xchg(int64_at(there, FLAGS) + i_unit, epoch, sem="release", scope="sys")
            for i_own in range(n_own):
                b_e, b_s = _of(o_e, b_at, i_own), _of(b_slot, b_at, i_own).to(tl.int64)
                p_blob = p_store + (i_layer * E + b_e).to(tl.int64) * (N_UP + N_DOWN)
                k = tl.minimum(tl.maximum(kept - i_own * UNITS, 0), UNITS)
                n_up = tl.minimum(tl.minimum(k, UP) * UNIT, N_UP)
                n_down = tl.minimum(tl.maximum(k - UP, 0) * UNIT, N_DOWN)
                _copy(p_blob, p_gate_up + b_s * N_UP, i_p * BLOCK, n_up, READERS * BLOCK, BLOCK, EVEN)
                _copy(p_blob + N_UP, p_down + b_s * N_DOWN, i_p * BLOCK, n_down, READERS * BLOCK, BLOCK, EVEN)
            if i_p == 0:
                if COUNTED:
                    lent = n_own * UNITS - kept
                    read = wide(tl.maximum(end - begin, 0)) * (UNIT * SIZE)
                    tl.store(p_counts + _FOR_PEERS, tl.load(p_counts + _FOR_PEERS) + read)
                    tl.store(p_counts + _BY_PEERS, tl.load(p_counts + _BY_PEERS) + wide(lent) * (UNIT * SIZE))
                if TIMED:  # noqa: SIM102 - as above
                    if n_own > 0:
                        spent = (tl.extra.cuda.globaltimer() - begun).to(tl.int64)
                        tl.store(p_counts + _NANOSECONDS, tl.load(p_counts + _NANOSECONDS) + spent)
    if MOVERS > 0:  # noqa: SIM102 - as above
        if shared & (i_p >= READERS):
            # Units are assigned to programs in the same way with and without lists.
            staged = tl.where(informed > 0, kept, 0)
            first = staged + (i_p - READERS + MOVERS - staged % MOVERS) % MOVERS
            left = tl.where(informed > 0, wide(limit), 0)
            for i_of in range(first, n_own * UNITS, MOVERS):
                i_own, i_u, i_unit = i_of // UNITS, i_of % UNITS, i_of - staged
                b_e, b_s = _of(o_e, b_at, i_own), _of(b_slot, b_at, i_own).to(tl.int64)
                at = (i_layer * E + b_e).to(tl.int64) * (N_UP + N_DOWN)
                if i_u < UP:
                    at += i_u * UNIT
                    p_to = p_gate_up + b_s * N_UP + i_u * UNIT
                    n = tl.minimum(N_UP - i_u * UNIT, UNIT)
                else:
                    at += N_UP + (i_u - UP) * UNIT
                    p_to = p_down + b_s * N_DOWN + (i_u - UP) * UNIT
                    n = tl.minimum(N_DOWN - (i_u - UP) * UNIT, UNIT)
                p_to = tl.multiple_of(p_to, 16)
                here = tl.full((), 0, tl.int32)
                if informed > 0:
                    p_flag = int64_at(own, FLAGS) + i_unit
                    seen = wait_for(p_flag, epoch, p_fetch + _SEEN + 2 * i_p, p_fault, left)
                    here = (seen >= epoch).to(tl.int32)
                    if here == 0:
                        left = tl.full((), 0, tl.int64)
                        i_x = _of(b_before, o_w, rank) + i_unit
                        i_w = tl.sum(((b_helped <= i_x) & (o_w < WORLD)).to(tl.int32), 0)
                        _fail_once(p_state, p_fault, epoch, layer, tl.full((), 1, tl.int64) << i_w)
                if here > 0:
                    p_from = (own + STAGING + wide(i_unit) * (UNIT * SIZE)).to(tl.pointer_type(TYPE))
                    _copy(tl.multiple_of(p_from, 16), p_to, 0, n, BLOCK, BLOCK, EVEN)
                else:
                    _copy(tl.multiple_of(p_store + at, 16), p_to, 0, n, BLOCK, BLOCK, EVEN)


def fetch_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    window: FetchWindow,
    *,
    layer: int,
    counts: torch.Tensor | None,
    tell: bool,
    read: bool,
    move: bool,
    config: FetchConfig = CONFIGS[0],
) -> None:
    """See `moeyard_kernels.ops.fetch_experts`."""
    launch.check_layout("fetch_experts", store=store)
    launch.check_layout("fetch_experts", table=table, gate_up=gate_up, down=down, windows=window.table)
    launch.check_indices("fetch_experts", low=-1, high=gate_up.shape[0], table=table)
    # Integers of the same size, which the interpreter does not round.
    word, shape, peer = torch.int16 if store.itemsize == 2 else torch.int32, window.shape, window.peer
    readers, movers = config.READERS if read else 0, config.MOVERS if move else 0
    assert readers + movers <= fetch_window.MOST_PROGRAMS, config
    _fetch_experts_kernel[(max(1, readers + movers),)](
        store.view(word),
        table,
        gate_up.view(word),
        down.view(word),
        table if counts is None else counts,
        window.table,
        window.stores,
        window.state,
        peer.state,
        peer.fault,
        layer,
        table.shape[0],
        peer.rank,
        window.layer,
        peer.limit,
        N_UP=gate_up[0].numel(),
        N_DOWN=down[0].numel(),
        WORLD=shape.world_size,
        STAGED=shape.staged,
        FLAGS=shape.flags_offset,
        STAGING=shape.staging_offset,
        UNIT=shape.unit_bytes // store.itemsize,
        BE=max(32, triton.next_power_of_2(table.shape[0])),
        BW=triton.next_power_of_2(shape.world_size),
        BL=triton.next_power_of_2(shape.staged),
        BLOCK=min(config.BYTES, shape.unit_bytes) // store.itemsize,
        READERS=readers,
        MOVERS=movers,
        TELL=tell,
        COUNTED=counts is not None,
        TIMED=counts is not None and not launch.interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
