"""Missed experts of all ranks of a host, read by all of them. See `ops`, and `fetch_window` for who reads what."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from moeyard_kernels.types.expert_residency import BY_PEERS, FOR_PEERS
from moeyard_kernels.types.fetch_window import MISSED, PLACES, SHARED, STAMP, FetchWindow
from moeyard_kernels.types.peer_window import DISPATCHED, FAILED, FETCH, POISONED, SILENT


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
) -> None:
    """See `moeyard_kernels.ops.fetch_experts`; what is not here by now does not come."""
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
