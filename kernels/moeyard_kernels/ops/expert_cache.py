"""A cache of experts whose residency the GPU decides: who has a slot, and how missed experts get into theirs."""

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
    **{"state.slot_of": "int32 [L, E]"},
)
def cache_access(
    ids: torch.Tensor, state: ResidencyState, *, layer: int, num_needed: int | None = None
) -> torch.Tensor:
    """Make the experts resident that decode rows of one layer need -> tables [1 + waves, E] int32 of slots.

    ids [T, K] (int64 or int32) count from 0 within the layer, -1 is masked; at most `num_needed` are distinct, if the
    caller knows. Row 0 of the result names the slots of the experts that have one. Row 1 + w names those of the experts
    that are to be copied for wave w. All others are -1. The slots of row w > 1 may be in use until the wave before is
    computed. Hits and the misses of wave 0 are at most half of the slots, unless there are more hits; later waves have
    at most half, so there are `max_waves`.

    Changes `state` as the policy that it names does (`moeyard_worker.experts`): the same victims, the same slots. The
    reference finds each by a search through all slots. No host sync; nothing changes where no id is left. Ids must lie
    in [-1, E): checked on a CPU, and on a GPU within `launch.checked()`.
    """
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


@op("experts.gather_experts", *_STORE_RULES, **_STORE)
def gather_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
) -> None:
    """Copy the experts of one layer that have a slot in `table` [E] int32 (-1: none) from host memory into it.

    store [L E, 2 I H + H I] holds an expert per row, gate_up's values before down's; on a GPU it is pinned memory of
    the host. gate_up [S, 2 I, H] and down [S, H, I] are the slots, in the same dtype (fp32 or bf16). `counts`: those of
    a `ResidencyState`, to which the time of this copy is added. No host sync: the launch leaves at once if the table is
    empty.
    """
    split = gate_up[0].numel()
    for expert, slot in enumerate(table.tolist()):
        if slot >= 0:
            blob = store[layer * table.shape[0] + expert]
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
    """`gather_experts` of all ranks of a host over the links of all: a rank that misses few reads for one with many.

    All ranks call it or none, once, between `dispatch_rows` and `combine_rows` of an exchange. Arguments and their
    contents when the launch has ended are those of `gather_experts`; `counts` also counts the bytes read for peers and
    by them. A call tells peers its misses, reads, and moves what peers have read, unless a flag leaves out a part; on a
    CPU nothing arrives while it waits. Ranks that do not share (`FetchWindow.share`), or that have failed, read alone.
    No host sync. A unit that does not come within the exchange's limit is in its record of failure, as of
    `dispatch_rows`, in the phase FETCH, and the rank reads the rest by itself. `fetch_window` says which rank reads
    which unit.
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
    shares = share_out([int(n) * shape.units for n in mine.heads[:, MISSED]], shape.staged_units)
    if late.any():
        _fail(window, epoch, [peer for peer in range(shape.world_size) if late[peer]])
        shares = share_out([0] * shape.world_size, 0)
    kept = len(wanted) - shares.lent[rank]
    if read:
        begin, end = shares.reads[rank]
        for at in range(begin, end):
            owner, number = shares.owner(at)
            theirs, head = window.views(owner), mine.heads[owner]
            expert, unit = divmod(shares.units[owner] - shares.lent[owner] + number, shape.units)
            named = expert - max(0, shares.units[owner] // shape.units - shape.staged)
            found = _read(int(window.stores[owner]) + int(head[PLACES + named]) * slots.size, *window.part(unit))
            theirs.units[number, : len(found)] = found.to(theirs.units.device)
            theirs.flags[number] = epoch
        for place, slot, unit in wanted[:kept]:
            slots.fill(slot, unit, slots.stored(place, unit))
        if counts is not None:
            counts[FOR_PEERS] += (end - begin) * shape.unit_bytes
            counts[BY_PEERS] += shares.lent[rank] * shape.unit_bytes
    for number, (place, slot, unit) in enumerate(wanted[kept:] if move else ()):
        first, last = window.part(unit)
        if int(mine.flags[number]) >= epoch:
            slots.fill(slot, unit, mine.units[number, : last - first])
            continue
        if not state[POISONED]:
            _fail(window, epoch, [shares.reader(rank, number)])
        slots.fill(slot, unit, slots.stored(place, unit))


@dataclass(frozen=True, slots=True)
class Shares:
    """Of every rank the units that it misses and that it lends, and what it reads of all that is lent: [begin, end)."""

    units: tuple[int, ...]
    lent: tuple[int, ...]
    reads: tuple[tuple[int, int], ...]

    def owner(self, lent: int) -> tuple[int, int]:
        """Whose a unit of all that is lent is, and its number among what that rank lends."""
        rank = 0
        while lent >= self.lent[rank]:
            lent -= self.lent[rank]
            rank += 1
        return rank, lent

    def reader(self, rank: int, unit: int) -> int:
        """Who reads a unit that a rank lends."""
        at = sum(self.lent[:rank]) + unit
        return next(reader for reader, (begin, end) in enumerate(self.reads) if begin <= at < end)


def share_out(units: Sequence[int], most_lent: int) -> Shares:
    """What ranks that miss so many units lend and read."""
    share = -(-sum(units) // len(units))
    lent = [min(max(0, each - share), most_lent) for each in units]
    ends = [min(end, sum(lent)) for end in accumulate(max(0, share - each) for each in units)]
    return Shares(tuple(units), tuple(lent), tuple(zip([0, *ends], ends, strict=False)))


class _Slots:
    """A rank's experts and their slots, as bytes."""

    def __init__(self, window: FetchWindow, store: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._window, self._up_bytes = window, window.shape.up_bytes
        self._store, self._gate_up, self._down = (
            x.view(len(x), -1).view(torch.uint8) for x in (store, gate_up, down)
        )  # fmt: skip
        self.size = self._store.shape[1]

    def stored(self, place: int, unit: int) -> torch.Tensor:
        """A unit of an expert of this rank's store."""
        return self._store[place, slice(*self._window.part(unit))]

    def fill(self, slot: int, unit: int, found: torch.Tensor) -> None:
        """Put a unit into its place in a slot."""
        begin, end = self._window.part(unit)
        if end <= self._up_bytes:
            self._gate_up[slot, begin:end] = found
        else:
            self._down[slot, begin - self._up_bytes : end - self._up_bytes] = found


def _read(address: int, begin: int, end: int) -> torch.Tensor:
    """Bytes of a peer's store, which is memory of this process that no tensor of this rank holds."""
    return torch.frombuffer(bytearray(ctypes.string_at(address + begin, end - begin)), dtype=torch.uint8)


def _fail(window: FetchWindow, epoch: int, ranks: Sequence[int]) -> None:
    record = (1, FETCH, window.layer, sum(1 << rank for rank in ranks), epoch, SILENT)
    window.peer.fault[FAILED : len(record)] = torch.tensor(record, device=window.peer.fault.device)
    window.peer.state[POISONED] = 1
