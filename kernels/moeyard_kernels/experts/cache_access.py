"""Triton: one visit of a layer by decode rows, decided on the device by one program in one launch.

The program counts the needed experts from the ids. Experts with a slot are hits. Every other expert takes the slot of
smallest rank that its wave does not use (`moeyard_kernels.types.expert_ranks`). While a wave is decided, its slots have
the largest rank; they get their true ranks when it is complete. A search reads all ranks, BS at a time. It takes a few
microseconds, while copying the expert takes a hundred and more.

Barriers before every search separate writes of some threads from reads of others.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch
from moeyard_kernels.types import expert_ranks
from moeyard_kernels.types.expert_residency import (
    EVICTED_PROBATION,
    EVICTED_PROTECTED,
    HITS_PROBATION,
    HITS_PROTECTED,
    LAYER,
    MISSES,
    STEP,
    VISIT,
    ResidencyState,
)

_FIRST = tl.constexpr(expert_ranks.FIRST)
_DECAY = tl.constexpr(expert_ranks.DECAY)
_HALF_UNIT = tl.constexpr(expert_ranks.UNIT // 2)
_NUM_SUMS = tl.constexpr(len(expert_ranks.SUMS))
_KEY_BITS = tl.constexpr(expert_ranks.KEY_BITS)
_LAST_VISIT = tl.constexpr(expert_ranks.LAST_VISIT)
_POWER_SHIFT = tl.constexpr(expert_ranks.POWER_SHIFT)
_RECENT = tl.constexpr(expert_ranks.RECENT)
# Above every rank: slots that the current wave needs.
_PINNED = tl.constexpr(2**63 - 1)
_STEP, _VISIT, _LAYER = tl.constexpr(STEP), tl.constexpr(VISIT), tl.constexpr(LAYER)
_HITS, _HITS_PROTECTED = tl.constexpr(HITS_PROBATION), tl.constexpr(HITS_PROTECTED)
_MISSES = tl.constexpr(MISSES)
_EVICTED, _EVICTED_PROTECTED = tl.constexpr(EVICTED_PROBATION), tl.constexpr(EVICTED_PROTECTED)
# Ids counted at a time, and most ranks compared at a time.
_BP = 1024
_MOST_BS = 4096


@triton.jit
def _smallest(p_ranks, S, BS: tl.constexpr):
    """Return the slot of the smallest rank."""
    b_best = tl.full([], _PINNED, tl.int64)
    b_slot = tl.full([], 0, tl.int32)
    for i_s in range(0, S, BS):
        o_s = i_s + tl.arange(0, BS)
        b_rank = tl.load(p_ranks + o_s, mask=o_s < S, other=_PINNED)
        b_least = tl.min(b_rank, 0)
        b_at = tl.min(tl.where(b_rank == b_least, o_s, i_s + BS), 0)
        b_slot = tl.where(b_least < b_best, b_at, b_slot)
        b_best = tl.minimum(b_best, b_least)
    return b_slot


@triton.jit
def _add(p_counts, COUNT: tl.constexpr, b_more):
    tl.store(p_counts + COUNT, tl.load(p_counts + COUNT) + b_more)


@triton.jit(do_not_specialize=["P", "E", "S", "i_layer", "WAVES", "LIMIT"])
def _cache_access_kernel(
    p_ids, p_slot_of, p_keys, p_ranks, p_protected, p_uses, p_counts, p_sums, p_place_of, p_tables, P, E, S, i_layer,
    WAVES, LIMIT, SLRU: tl.constexpr, PLACES: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """See `ops.cache_access`; LIMIT experts a wave. Grid: (1,)."""
    o_e = tl.arange(0, BE)
    m_e = o_e < E
    b_key = i_layer * E + o_e
    b_count = tl.zeros([BE], dtype=tl.int32)
    for i_p in range(0, P, BP):
        o_p = i_p + tl.arange(0, BP)
        b_id = tl.load(p_ids + o_p, mask=o_p < P, other=-1).to(tl.int32)
        b_count += tl.histogram(tl.maximum(b_id, 0), BE, mask=b_id >= 0)
    m_needed = b_count > 0
    b_slot = tl.load(p_slot_of + b_key, mask=m_e, other=-1)
    m_hit = m_needed & (b_slot >= 0)
    m_miss = m_needed & (b_slot < 0)
    n_hits = tl.sum(m_hit.to(tl.int32), 0)
    n_misses = tl.sum(m_miss.to(tl.int32), 0)

    # A layer that no decode row needs is not visited.
    b_seen = (n_hits + n_misses) > 0
    b_before = tl.load(p_counts + _LAYER)
    b_step = tl.load(p_counts + _STEP) + (b_seen & (i_layer <= b_before)).to(tl.int64)
    b_visit = tl.load(p_counts + _VISIT) + b_seen.to(tl.int64)
    if SLRU:
        b_now = b_step * _DECAY + _FIRST
        b_uses = tl.load(p_uses + b_key, mask=m_e, other=0)
        b_apart = tl.abs(b_now - b_uses)
        b_gain = tl.load(p_sums + b_apart, mask=m_needed & (b_apart < _NUM_SUMS), other=0)
        b_uses = tl.where(m_needed, tl.maximum(b_now, b_uses) + b_gain, b_uses)
        tl.store(p_uses + b_key, b_uses, mask=m_needed)
        b_power = tl.where(m_needed, (b_uses - b_now) // _HALF_UNIT, 0)
        b_past = tl.maximum(tl.full([], _LAST_VISIT, tl.int64) - b_visit, 0) << _KEY_BITS
        b_rank = (b_power << _POWER_SHIFT) | b_past | b_key | _RECENT
        b_found = tl.load(p_ranks + b_slot, mask=b_slot >= 0, other=0)
        m_idle = b_seen & (b_slot >= 0) & (m_needed == 0) & (b_found >= _RECENT)
        tl.store(p_ranks + b_slot, (b_uses << _KEY_BITS) | b_key, mask=m_idle)
    else:
        b_rank = (b_visit << (_KEY_BITS + 1)) | (m_miss.to(tl.int64) << _KEY_BITS) | b_key
    b_protected = tl.load(p_protected + b_slot, mask=m_hit, other=0)
    n_protected = tl.sum(b_protected, 0)
    tl.debug_barrier()
    if SLRU:
        tl.store(p_protected + b_slot, 1, mask=m_hit)
    tl.store(p_ranks + b_slot, tl.full([BE], _PINNED, tl.int64), mask=m_hit)
    tl.store(p_tables + o_e, tl.where(m_hit, b_slot, -1), mask=m_e)

    b_member = m_hit.to(tl.int32)
    b_left = m_miss.to(tl.int32)
    n_evicted = tl.full([], 0, tl.int32)
    for i_w in range(WAVES):
        # Summed again in each wave: Triton 3.6 would use the first value of a loop-carried count in every wave.
        n_now = tl.minimum(tl.sum(b_left, 0), tl.where(i_w == 0, tl.maximum(LIMIT - n_hits, 0), LIMIT))
        b_table = tl.full([BE], -1, tl.int32)
        b_places = tl.full([BE], -1, tl.int32)
        for _ in range(n_now):
            b_e = tl.min(tl.where(b_left > 0, o_e, BE), 0)
            tl.debug_barrier()
            b_s = _smallest(p_ranks, S, BS)
            b_old = tl.load(p_keys + b_s)
            n_evicted += tl.load(p_protected + b_s)
            if PLACES:
                b_place = tl.load(p_place_of + i_layer * E + b_e)
            tl.debug_barrier()
            if PLACES:
                # The evicted expert takes the place of the expert that it makes room for.
                tl.store(p_place_of + b_old, b_place)
                tl.store(p_place_of + i_layer * E + b_e, -1)
                b_places = tl.where(o_e == b_e, b_place, b_places)
            tl.store(p_slot_of + b_old, -1)
            tl.store(p_slot_of + i_layer * E + b_e, b_s)
            tl.store(p_keys + b_s, i_layer * E + b_e)
            tl.store(p_protected + b_s, 0)
            tl.store(p_ranks + b_s, tl.full([], _PINNED, tl.int64))
            m_this = o_e == b_e
            b_slot = tl.where(m_this, b_s, b_slot)
            b_table = tl.where(m_this, b_s, b_table)
            b_left = tl.where(m_this, 0, b_left)
            b_member = tl.where(m_this, 1, b_member)
        tl.store(p_tables + (1 + i_w) * E + o_e, b_table, mask=m_e)
        if PLACES:
            tl.store(p_tables + (1 + WAVES + i_w) * E + o_e, b_places, mask=m_e)
        tl.debug_barrier()
        tl.store(p_ranks + b_slot, b_rank, mask=b_member > 0)
        b_member = tl.zeros([BE], dtype=tl.int32)

    tl.store(p_counts + _STEP, b_step)
    tl.store(p_counts + _VISIT, b_visit)
    tl.store(p_counts + _LAYER, tl.where(b_seen, i_layer, b_before))
    _add(p_counts, _HITS, n_hits - n_protected)
    _add(p_counts, _HITS_PROTECTED, n_protected)
    _add(p_counts, _MISSES, n_misses)
    _add(p_counts, _EVICTED, n_misses - n_evicted)
    _add(p_counts, _EVICTED_PROTECTED, n_evicted)


def cache_access(
    ids: torch.Tensor, state: ResidencyState, *, layer: int, num_needed: int | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.cache_access`."""
    launch.check_layout("cache_access", ids=ids, slot_of=state.slot_of)
    num_experts = state.slot_of.shape[1]
    launch.check_indices("cache_access", low=-1, high=num_experts, ids=ids)
    num_waves = state.num_waves(ids, num_needed)
    num_rows = 1 + (num_waves if state.place_of is None else 2 * num_waves)
    tables = torch.empty(num_rows, num_experts, dtype=torch.int32, device=ids.device)
    _cache_access_kernel[(1,)](
        ids,
        state.slot_of,
        state.keys,
        state.ranks,
        state.protected,
        state.uses,
        state.counts,
        state.sums,
        state.slot_of if state.place_of is None else state.place_of,
        tables,
        ids.numel(),
        num_experts,
        state.num_slots,
        layer,
        num_waves,
        expert_ranks.wave_limit(state.num_slots),
        SLRU=state.policy == "slru",
        PLACES=state.place_of is not None,
        BP=_BP,
        BE=max(32, triton.next_power_of_2(num_experts)),
        BS=min(_MOST_BS, max(32, triton.next_power_of_2(state.num_slots))),
        num_warps=8,
    )
    return tables
