"""One visit of a layer by decode rows: which of its experts have slots, and whose slots the others get."""

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.types import expert_ranks as order
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


def cache_access(
    ids: torch.Tensor, state: ResidencyState, *, layer: int, num_needed: int | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.cache_access`; every choice is a search through all slots."""
    num_experts = state.slot_of.shape[1]
    check_indices("cache_access", low=-1, high=num_experts, ids=ids)
    tables = torch.full((1 + state.num_waves(ids, num_needed), num_experts), -1, dtype=torch.int32)
    needed = sorted({int(e) for e in ids.flatten()} - {-1})
    if not needed:
        return tables
    assert num_needed is None or len(needed) <= num_needed, (needed, num_needed)
    counts, slots = state.counts, state.slot_of[layer]
    counts[STEP] += int(layer <= int(counts[LAYER]))
    counts[LAYER] = layer
    counts[VISIT] += 1
    now = order.now_at(int(counts[STEP]))

    def rank(expert: int, *, missed: bool) -> int:
        key, visit = layer * num_experts + expert, int(counts[VISIT])
        if state.policy == "lru":
            return order.lru_rank(key, visit=visit, missed=missed)
        return order.recent_rank(key, uses=int(state.uses[layer, expert]), now=now, visit=visit)

    hits = [e for e in needed if slots[e] >= 0]
    misses = [e for e in needed if slots[e] < 0]
    if state.policy == "slru":
        for e in needed:
            state.uses[layer, e] = order.add_use(now, int(state.uses[layer, e]))
        for e in sorted(set(range(num_experts)) - set(needed)):
            if slots[e] >= 0 and state.ranks[slots[e]] >= order.RECENT:
                state.ranks[slots[e]] = order.idle_rank(layer * num_experts + e, uses=int(state.uses[layer, e]))
    for e in hits:
        slot = int(slots[e])
        tables[0, e] = slot
        counts[HITS_PROTECTED if state.protected[slot] else HITS_PROBATION] += 1
        state.protected[slot] = int(state.policy == "slru")
        state.ranks[slot] = rank(e, missed=False)
    wave, pinned = 1, {int(slots[e]) for e in hits}
    for e in misses:
        if len(pinned) >= order.wave_limit(state.num_slots):
            wave, pinned = wave + 1, set()
        victim = min((s for s in range(state.num_slots) if s not in pinned), key=lambda s: int(state.ranks[s]))
        counts[MISSES] += 1
        counts[EVICTED_PROTECTED if state.protected[victim] else EVICTED_PROBATION] += 1
        state.slot_of.view(-1)[state.keys[victim]] = -1
        state.keys[victim] = layer * num_experts + e
        slots[e] = tables[wave, e] = victim
        state.protected[victim] = 0
        state.ranks[victim] = rank(e, missed=True)
        pinned.add(victim)
    return tables
