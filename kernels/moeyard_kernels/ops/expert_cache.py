"""A cache of experts whose residency the GPU decides: the choice of slots, and copies of missed experts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ops.op import op
from moeyard_kernels.types import expert_ranks as order
from moeyard_kernels.types.expert_residency import (
    BY_PEERS,
    EVICTED_PROBATION,
    EVICTED_PROTECTED,
    FOR_PEERS,
    HITS_PROBATION,
    HITS_PROTECTED,
    LAYER,
    MISSES,
    NUM_COUNTS,
    STEP,
    VISIT,
    ResidencyState,
)
from moeyard_kernels.types.fetch_window import MISSED, PLACES, SHARED, STAMP, FetchWindow
from moeyard_kernels.types.peer_window import DISPATCHED, FAILED, FETCH, POISONED, SILENT

_STORE = MappingProxyType(
    {
        "table": "int32 [E]",
        "gate_up": "any [S, U, V]",
        "down": "gate_up [S, X, Y]",
        "store": "gate_up [rows, U * V + X * Y] host",
        "counts": f"int64 [{NUM_COUNTS}]?",
    }
)
_STORE_RULES = ("0 <= layer and (layer + 1) * E <= rows", "store.itemsize in (2, 4)")


@op(
    "experts.cache_access",
    "0 <= layer < L",
    "T * K > 0 and (num_needed is None or num_needed >= 1)",
    ids="int [T, K]",
    **{"state.slot_of": "int32 [L, E]", "state.place_of": "int32 [L, E]?"},
)
def cache_access(
    ids: torch.Tensor, state: ResidencyState, *, layer: int, num_needed: int | None = None
) -> torch.Tensor:
    """Make the experts resident that decode rows of one layer need -> tables [1 + waves, E] int32 of slots.

    With `state.place_of` there are `waves` more rows. They hold the place in host memory of each expert that the wave
    copies. The evicted expert goes to that place.

    ids [T, K] (int64 or int32) count from 0 within the layer, and -1 is masked. num_needed: a bound on the distinct
    ids, if known. Row 0 of the result holds the slots of resident experts. Row 1 + w holds the slots of the experts to
    copy for wave w. Other values are -1. The slots of row w > 1 may be in use until the wave before is computed. Hits
    and misses of wave 0 take at most half of the slots, unless there are more hits. Later waves take at most half, so
    there are at most `max_waves`.

    `state` changes as its policy does in `moeyard_worker.experts`: the same victims and slots. The reference searches
    all slots for each victim. There is no host sync, and without unmasked ids nothing changes. Ids must lie in [-1, E).
    This is checked on a CPU, and on a GPU within `launch.checked()`.
    """
    num_experts = state.slot_of.shape[1]
    check_indices("cache_access", low=-1, high=num_experts, ids=ids)
    num_waves = state.num_waves(ids, num_needed)
    num_rows = 1 + (num_waves if state.place_of is None else 2 * num_waves)
    tables = torch.full((num_rows, num_experts), -1, dtype=torch.int32)
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
        if state.place_of is not None:
            tables[num_waves + wave, e] = state.place_of.view(-1)[state.keys[victim]] = state.place_of[layer, e]
            state.place_of[layer, e] = -1
        state.keys[victim] = layer * num_experts + e
        slots[e] = tables[wave, e] = victim
        state.protected[victim] = 0
        state.ranks[victim] = rank(e, missed=True)
        pinned.add(victim)
    return tables


@op(
    "experts.gather_experts",
    "0 <= layer and (places is not None or (layer + 1) * E <= rows)",
    "store.itemsize in (2, 4)",
    **_STORE,
    places="int32 [E]?",
)
def gather_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> None:
    """Copy the experts of one layer that have a slot in `table` [E] int32 (-1: none) from host memory into it.

    store [L E, 2 I H + H I] holds one expert per row, gate_up's values before down's. For a GPU it is pinned host
    memory. gate_up [S, 2 I, H] and down [S, H, I] are the slots, in the same dtype (fp32 or bf16). With `places` [E]
    int32 an expert lies in that row of the store, and the two experts change places. The time of the copy is added to
    `counts` of a `ResidencyState`. There is no host sync: the launch returns at once for an empty table.
    """
    split = gate_up[0].numel()
    for expert, slot in enumerate(table.tolist()):
        if slot >= 0:
            row = layer * table.shape[0] + expert if places is None else int(places[expert])
            blob = store[row].clone()
            if places is not None:
                store[row] = torch.cat((gate_up[slot].flatten(), down[slot].flatten()))
            gate_up[slot] = blob[:split].view_as(gate_up[slot])
            down[slot] = blob[split:].view_as(down[slot])


@op(
    "experts.fetch_experts",
    *_STORE_RULES,
    "gate_up[0].nbytes == window.shape.up_bytes",
    "down[0].nbytes == window.shape.down_bytes",
    **_STORE,
    **{"window.table": "int64 [_]"},
)
def fetch_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    window: FetchWindow,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
    tell: bool = True,
    read: bool = True,
    move: bool = True,
) -> None:
    """`gather_experts` for all ranks of a host over all their links: ranks with few misses read for ranks with many.

    All ranks call it or none, once, between `dispatch_rows` and `combine_rows` of an exchange. Arguments and results
    are those of `gather_experts`. `counts` also counts the bytes read for peers and by peers. A call tells peers its
    misses, reads, and moves the units that peers have read. The flags `tell`, `read` and `move` leave out a part; on a
    CPU nothing arrives during a wait. Ranks that do not share (`FetchWindow.share`) or have failed read alone. There is
    no host sync. A unit that misses the exchange's time limit is recorded as a failure of the phase FETCH, as in
    `dispatch_rows`, and the rank reads the rest itself. `fetch_window` says which rank reads which unit.
    """
    shape, rank, state = window.shape, window.peer.rank, window.peer.state
    missed = [(layer * table.shape[0] + e, slot) for e, slot in enumerate(table.tolist()) if slot >= 0]
    slots = _Slots(window, store, gate_up, down)
    wanted = [(place, slot, unit) for place, slot in missed for unit in range(shape.units)]
    if not window.state[SHARED] or state[POISONED]:
        for place, slot, unit in wanted if read else ():
            slots.fill(slot, unit, slots.stored(place, unit))
        return
    epoch, mine = int(state[DISPATCHED]), window.views(rank)
    if tell:
        places = [place for place, _ in missed[-shape.staged :]]
        places += [0] * (shape.staged - len(places))
        for peer in range(shape.world_size):
            head = window.views(peer).heads[rank]
            head[MISSED] = len(missed)
            head[PLACES : PLACES + len(places)] = torch.tensor(places, device=head.device)
            head[STAMP] = epoch
    if not (read or move):
        return
    late = mine.heads[:, STAMP] < epoch
    reads = plan_reads([int(n) * shape.units for n in mine.heads[:, MISSED]], shape.staged_units)
    if late.any():
        _fail(window, epoch, [peer for peer in range(shape.world_size) if late[peer]])
        reads = plan_reads([0] * shape.world_size, 0)
    num_alone = len(wanted) - reads.by_peers[rank]
    if read:
        begin, end = reads.ranges[rank]
        for at in range(begin, end):
            owner, number = reads.owner(at)
            theirs, head = window.views(owner), mine.heads[owner]
            expert, unit = divmod(reads.units[owner] - reads.by_peers[owner] + number, shape.units)
            named = expert - max(0, reads.units[owner] // shape.units - shape.staged)
            found = _read(int(window.stores[owner]) + int(head[PLACES + named]) * slots.size, *window.part(unit))
            theirs.units[number, : len(found)] = found.to(theirs.units.device)
            theirs.flags[number] = epoch
        for place, slot, unit in wanted[:num_alone]:
            slots.fill(slot, unit, slots.stored(place, unit))
        if counts is not None:
            counts[FOR_PEERS] += (end - begin) * shape.unit_bytes
            counts[BY_PEERS] += reads.by_peers[rank] * shape.unit_bytes
    for number, (place, slot, unit) in enumerate(wanted[num_alone:] if move else ()):
        first, last = window.part(unit)
        if int(mine.flags[number]) >= epoch:
            slots.fill(slot, unit, mine.units[number, : last - first])
            continue
        if not state[POISONED]:
            _fail(window, epoch, [reads.reader(rank, number)])
        slots.fill(slot, unit, slots.stored(place, unit))


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Per rank: the units that it misses, those that peers read for it, and the range [begin, end) that it reads."""

    units: tuple[int, ...]
    by_peers: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def owner(self, number: int) -> tuple[int, int]:
        """Return the rank of a unit that peers read, counted over all ranks, and its number within that rank."""
        rank = 0
        while number >= self.by_peers[rank]:
            number -= self.by_peers[rank]
            rank += 1
        return rank, number

    def reader(self, rank: int, unit: int) -> int:
        """Return the peer that reads a unit of `rank`, counted among those that peers read for it."""
        at = sum(self.by_peers[:rank]) + unit
        return next(reader for reader, (begin, end) in enumerate(self.ranges) if begin <= at < end)


def plan_reads(units: Sequence[int], most_by_peers: int) -> ReadPlan:
    """Plan the reads of ranks that miss `units` units each, where peers read at most `most_by_peers` for each rank."""
    share = -(-sum(units) // len(units))
    by_peers = [min(max(0, each - share), most_by_peers) for each in units]
    ends = [min(end, sum(by_peers)) for end in accumulate(max(0, share - each) for each in units)]
    return ReadPlan(tuple(units), tuple(by_peers), tuple(zip([0, *ends], ends, strict=False)))


class _Slots:
    """A rank's stored experts and their slots, as bytes."""

    def __init__(self, window: FetchWindow, store: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._window, self._up_bytes = window, window.shape.up_bytes
        self._store, self._gate_up, self._down = (x.view(len(x), -1).view(torch.uint8) for x in (store, gate_up, down))
        self.size = self._store.shape[1]

    def stored(self, place: int, unit: int) -> torch.Tensor:
        """Return a unit of an expert in this rank's store."""
        return self._store[place, slice(*self._window.part(unit))]

    def fill(self, slot: int, unit: int, found: torch.Tensor) -> None:
        """Copy a unit to its place in a slot."""
        begin, end = self._window.part(unit)
        if end <= self._up_bytes:
            self._gate_up[slot, begin:end] = found
        else:
            self._down[slot, begin - self._up_bytes : end - self._up_bytes] = found


def _read(address: int, begin: int, end: int) -> torch.Tensor:
    """Return bytes of a peer's store, which is mapped into this process but not held by a tensor of this rank."""
    return torch.frombuffer(bytearray(ctypes.string_at(address + begin, end - begin)), dtype=torch.uint8)


def _fail(window: FetchWindow, epoch: int, ranks: Sequence[int]) -> None:
    record = (1, FETCH, window.layer, sum(1 << rank for rank in ranks), epoch, SILENT)
    window.peer.fault[FAILED : len(record)] = torch.tensor(record, device=window.peer.fault.device)
    window.peer.state[POISONED] = 1
