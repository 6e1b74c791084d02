"""Whether survivors take a dead rank's experts over until it is back, or wait for it. Pure."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeyard_worker.config.placement import Placement

log = logging.getLogger(__name__)
MODES: tuple[str, ...] = ("auto", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a survivor says of itself: bytes `available` on its host, those of one slot, and how it keeps experts.

    all_resident: each of its experts has a slot; without that no more slots are taken. movable: experts come and go.
    regroups: its exchange can do with fewer ranks.
    """

    available: int
    slot_bytes: int
    all_resident: bool
    movable: bool
    regroups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """`slots`: how many more each survivor may take; None if the fleet waits. `reason`: in words, for the log."""

    slots: Mapping[int, int] | None
    reason: str


def decide(
    mode: str,
    *,
    before: Placement,
    after: Placement,
    rooms: Mapping[int, Room],
    nodes: Mapping[int, str],
    kept_free: Mapping[str, int],
    read_rate: float | None,
    start_seconds: float,
) -> Takeover:
    """Whether the ranks of `after` go on as it says, or wait for those that only `before` has.

    `rooms` and `nodes` (which host) are the survivors'; `kept_free`: bytes per host for ranks that start there again.
    auto: where all who keep every expert in a slot have room for those that come, and reading them, at `read_rate`
    bytes/s per rank (None: not known), takes less time than the `start_seconds` of a rank. Who does not hold all its
    experts needs no room: it reads from the host's store what it needs, as always. always: room or not.
    """
    if mode == "never":
        return Takeover(slots=None, reason="--expert-takeover never")
    moved = [rank for rank in after.ranks if after.experts(rank) != before.experts(rank)]
    if fixed := [rank for rank in moved if not rooms[rank].movable]:
        return Takeover(slots=None, reason=f"the experts of rank {fixed[0]} are fixed")
    if after.ranks != before.ranks and not all(rooms[rank].regroups for rank in after.ranks):
        return Takeover(slots=None, reason="the nvlink exchange is one of all ranks")
    sharing, slots, slowest = Counter(nodes[rank] for rank in after.ranks), dict[int, int](), 0.0
    for rank in after.ranks:
        room, gained = rooms[rank], max(0, after.num_owned(rank) - before.num_owned(rank))
        free = max(0, room.available - kept_free.get(nodes[rank], 0)) // sharing[nodes[rank]]
        slots[rank] = min(gained, free // room.slot_bytes) if room.all_resident else 0
        if room.all_resident and slots[rank] < gained and mode == "auto":
            return Takeover(
                slots=None, reason=f"rank {rank} has room for {slots[rank]} of {gained} experts that would come"
            )
        slowest = max(slowest, slots[rank] * room.slot_bytes / read_rate if read_rate else 0.0)
    if mode == "auto" and slowest >= start_seconds:
        took = f"reading the experts would take {slowest:.0f} s, a rank starts in {start_seconds:.0f} s"
        return Takeover(slots=None, reason=took)
    return Takeover(slots=slots, reason=f"{sum(slots.values())} experts go into slots of the others")


def without(
    away: Collection[int],
    *,
    mode: str,
    whole: Placement,
    before: Placement,
    rooms: Mapping[int, Room],
    nodes: Mapping[int, str],
    reports: Sequence[Mapping[str, Any]],
    start_seconds: float,
) -> tuple[Placement, Mapping[int, int]]:
    """The placement to go on with, and how many slots more its ranks may take: without those `away`, or `whole`.

    `reports` are what all ranks said when they first loaded; `nodes` where each rank is, or was.
    """
    kept_free: Counter[str] = Counter()
    for rank in away:
        # Its successor is set up at its place.
        kept_free[nodes[rank]] += reports[rank]["held_bytes"]
    rates = [each["loaded_bytes"] / each["seconds"]["weights"] for each in reports if each["seconds"]["weights"]]
    after = whole.without(away)
    decided = decide(
        mode,
        before=before,
        after=after,
        rooms=rooms,
        nodes=nodes,
        kept_free=kept_free,
        read_rate=min(rates, default=None),
        start_seconds=start_seconds,
    )
    then = "the others wait" if decided.slots is None else "the others take over"
    log.warning("without ranks %s %s: %s", ", ".join(map(str, sorted(away))), then, decided.reason)
    return (whole, {}) if decided.slots is None else (after, decided.slots)
