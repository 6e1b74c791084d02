"""Pure decisions of a fleet: one more restart, serving without a rank, another number of ranks."""

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeyard.fleet.messages import FleetError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement

log = logging.getLogger(__name__)

LIMIT, WINDOW_SECONDS = 3, 60.0
TAKEOVERS: tuple[str, ...] = ("auto", "always", "never")


class RestartBudget:
    """At most `limit` restarts in any `seconds`, so that a fault that comes back at once does not go on for ever."""

    def __init__(self, limit: int = LIMIT, seconds: float = WINDOW_SECONDS) -> None:
        self.limit, self.seconds = limit, seconds
        self._taken: deque[float] = deque()

    def used(self, now: float) -> int:
        """Return the number of restarts within the last `seconds`."""
        return sum(at > now - self.seconds for at in self._taken)

    def renew(self, now: float) -> None:
        """Count all restarts so far as if they were now."""
        self._taken = deque([now] * len(self._taken))

    def take(self, now: float) -> bool:
        """Count one more if there is one left."""
        while self._taken and self._taken[0] <= now - self.seconds:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True


class RankBudgets:
    """The budgets of a fleet's ranks: a rank that is lost `limit` times within `seconds` is not replaced any more.

    Time passes only while a rank serves, so processes that each take long to fail count as too many, too.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._budgets: dict[int, RestartBudget] = {}
        self._unproven: set[int] = set()  # ranks that were replaced and have not served since

    def take(self, rank: int, now: float) -> str | None:
        """Count a loss of `rank`, which is replaced; or return why it is not."""
        budget = self._budgets.setdefault(rank, RestartBudget(self._limit - 1, self._seconds))
        lost = f"rank {rank} was lost {self._limit} times"
        if budget.used(now) >= self._limit - 1:
            return f"{lost} in {self._seconds:g} s"
        if rank in self._unproven:
            budget.renew(now)
        self._unproven.add(rank)
        return None if budget.take(now) else f"{lost} without serving in between"

    def serves(self, rank: int) -> None:
        """Note that the process in the place of a lost one serves."""
        self._unproven.discard(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A rank's room for more experts: bytes `available` on its host, bytes of one slot, and how it keeps experts.

    all_resident: each of its experts has a slot; otherwise it takes no more slots. movable: experts come and go.
    regroups: its exchange works with fewer ranks.
    """

    available: int
    slot_bytes: int
    all_resident: bool
    movable: bool
    regroups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """`slots`: how many more each survivor may take; None if the fleet waits. `reason`: text for the log."""

    slots: Mapping[int, int] | None
    reason: str


def decide(
    mode: str,
    *,
    before: Placement,
    after: Placement,
    rooms: Mapping[int, Headroom],
    nodes: Mapping[int, str],
    kept_free: Mapping[str, int],
    read_rate: float | None,
    start_seconds: float,
) -> Takeover:
    """Decide whether the ranks of `after` serve by it, or wait for the ranks that only `before` has.

    `rooms` and `nodes` (hosts) are the survivors'; `kept_free`: bytes per host for ranks that start there again.
    auto: each survivor that keeps every expert in a slot must have room for those that come, and to read them, at
    `read_rate` bytes/s per rank (None: unknown), must take less than the `start_seconds` of a rank. A survivor that
    does not hold all its experts needs no room: it reads what it needs from the host's store. always: room or not.
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
    rooms: Mapping[int, Headroom],
    nodes: Mapping[int, str],
    reports: Sequence[Mapping[str, Any]],
    start_seconds: float,
) -> tuple[Placement, Mapping[int, int]]:
    """Return the next placement and how many more slots its ranks may take: without those `away`, or `whole`.

    `reports` are those of all ranks when they first loaded; `nodes` says where each rank is, or was.
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


class Impossible(FleetError):
    """A number of ranks that this fleet can never have."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """`size` ranks with experts by `placement`. `slots`: how many more each rank that stays may take.

    `config` is that of ranks that come. `reports` are the later reports of ranks that stay: those of their start, but
    for the slots that they have by then.
    """

    size: int
    placement: Placement
    slots: Mapping[int, int]
    config: EngineConfig
    reports: tuple[dict[str, Any], ...]


def placement_for(size: int, *, whole: Placement, config: EngineConfig) -> Placement:
    """Return the placement of `size` ranks. Raises Impossible for a number that this fleet can never have."""
    if size > 1 and config.num_workers == 1 and config.exchange in ("auto", "local"):
        raise Impossible(
            "a fleet that began with one worker has no exchange between workers; start it with --exchange zmq"
        )
    try:
        dataclasses.replace(config, num_workers=size)
        return whole.resized(size)
    except ValueError as error:
        raise Impossible(str(error)) from error


def plan_resize(
    size: int,
    *,
    whole: Placement,
    config: EngineConfig,
    rooms: Mapping[int, Headroom],
    nodes: Mapping[int, str],
    reports: Sequence[Mapping[str, Any]],
    mode: str,
) -> ResizePlan:
    """Plan the way from `whole` to `size` ranks. `rooms`, `nodes` (hosts) and `reports` are those of today's ranks.

    `mode` is --expert-takeover. With "always" experts that find no slot are read on demand. Otherwise a rank that
    holds all its experts must have room for those that come, beside all that is there now. No rank takes more slots
    than --expert-slots or --expert-memory say. Raises FleetError where there is no room, Impossible where experts are
    fixed.
    """
    placement = placement_for(size, whole=whole, config=config)
    stay = range(min(size, len(reports)))
    if fixed := [rank for rank in stay if not rooms[rank].movable]:
        why = "--record-routing is of one shard" if config.record_routing else f"not on {config.device}"
        raise Impossible(f"the experts of rank {fixed[0]} cannot move: {why}")
    slots: dict[int, int] = {}
    if size < len(reports):
        decided = decide(
            "always" if mode == "always" else "auto",
            before=whole,
            after=placement,
            rooms=rooms,
            nodes=nodes,
            kept_free={},
            read_rate=None,
            start_seconds=1.0,
        )
        if decided.slots is None:
            raise FleetError(decided.reason)
        slots = {r: min(decided.slots[r], _allowed(config, rooms[r], whole.num_owned(r))) for r in stay}
    return ResizePlan(
        size=size,
        placement=placement,
        slots=slots,
        # Sequences of the length that routers promise must fit everywhere.
        config=dataclasses.replace(
            config, num_workers=size, max_model_len=min(report["max_model_len"] for report in reports)
        ),
        reports=tuple(
            _after(reports[r], rooms[r], whole.num_owned(r), placement.num_owned(r), slots.get(r, 0)) for r in stay
        ),
    )


def _allowed(config: EngineConfig, room: Headroom, now: int) -> int:
    """Return the slots that a rank with all its `now` experts in slots may take beside them, by its flags."""
    most = config.expert_slots
    if most is None and config.expert_memory is not None:
        most = config.expert_memory // room.slot_bytes
    return 1 << 62 if most is None else max(0, most - now)


def _after(report: Mapping[str, Any], room: Headroom, owned: int, owns: int, gained: int) -> dict[str, Any]:
    """Return a rank's report once it has `owns` experts in place of `owned`, and may have `gained` more slots."""
    before = owned if room.all_resident else report["expert_slots"]
    slots = min(owns, before + (gained if room.all_resident else 0))
    return {**report, "expert_slots": slots, "held_bytes": report["held_bytes"] + (slots - before) * room.slot_bytes}
