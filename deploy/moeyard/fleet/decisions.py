"""Pure decisions of a fleet: whether to restart, to serve without a rank, and how to resize."""

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
    """At most `limit` restarts in any `seconds`, so that a permanent fault does not cause endless restarts."""

    def __init__(self, limit: int = LIMIT, seconds: float = WINDOW_SECONDS) -> None:
        self.limit, self.seconds = limit, seconds
        self._taken: deque[float] = deque()

    def used(self, now: float) -> int:
        """Return the number of restarts within the last `seconds`."""
        return sum(at > now - self.seconds for at in self._taken)

    def renew(self, now: float) -> None:
        """Set the time of all counted restarts to `now`."""
        self._taken = deque([now] * len(self._taken))

    def take(self, now: float) -> bool:
        """Count a restart and return True, unless the budget is spent."""
        while self._taken and self._taken[0] <= now - self.seconds:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True


class RankBudgets:
    """Restart budgets by rank: a rank that is lost `limit` times within `seconds` is not replaced again.

    Only time in service counts, so a rank whose processes each fail slowly also spends its budget.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._budgets: dict[int, RestartBudget] = {}
        self._unproven: set[int] = set()  # ranks that were replaced and have not served since

    def take(self, rank: int, now: float) -> str | None:
        """Count a loss of `rank`. Returns None if it may be replaced, else the reason why not."""
        budget = self._budgets.setdefault(rank, RestartBudget(self._limit - 1, self._seconds))
        lost = f"rank {rank} was lost {self._limit} times"
        if budget.used(now) >= self._limit - 1:
            return f"{lost} in {self._seconds:g} s"
        if rank in self._unproven:
            budget.renew(now)
        self._unproven.add(rank)
        return None if budget.take(now) else f"{lost} without serving in between"

    def serves(self, rank: int) -> None:
        """Note that the rank's new process serves."""
        self._unproven.discard(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """A rank's room for more experts: bytes `available` on its host, bytes of one slot, and how it stores experts.

    all_resident: every expert has a slot; otherwise the rank takes no extra slots. movable: its experts can change.
    regroups: its exchange works with fewer ranks.
    """

    available: int
    slot_bytes: int
    all_resident: bool
    movable: bool
    regroups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """`slots`: extra slots by survivor; None if the fleet waits. `reason`: text for the log."""

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
    """Decide whether the ranks of `after` serve with it, or wait for the ranks that only `before` has.

    `rooms` and `nodes` (hosts) describe survivors. `kept_free`: bytes per host reserved for ranks that restart there.
    Mode "auto" has two conditions. A survivor with every expert in a slot needs room for the experts it gains. It must
    also read them, at `read_rate` bytes/s per rank (None: unknown), faster than a rank starts (`start_seconds`).
    A survivor that does not hold all its experts needs no room: it reads experts from the host's store on demand.
    Mode "always" ignores both conditions.
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
    """Return the next placement and the extra slots of its ranks: without ranks `away`, or `whole` if the fleet waits.

    `reports` are the load reports of all ranks at their first start. `nodes`: the present or last host of each rank.
    """
    kept_free: Counter[str] = Counter()
    for rank in away:
        # The rank's next process starts on the same host.
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
    """This fleet can never have that number of ranks."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """A fleet of `size` ranks with experts by `placement`. `slots`: extra slots by remaining rank.

    `config` is for new ranks. `reports` are the remaining ranks' load reports with their new number of slots.
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
    """Plan the change from `whole` to `size` ranks. `rooms`, `nodes` (hosts) and `reports` describe the present ranks.

    `mode` is --expert-takeover. With "always", experts without a slot are read on demand. Otherwise a rank that holds
    all its experts needs room for new ones next to its present ones. --expert-slots and --expert-memory limit the
    slots. Raises FleetError without room, Impossible if experts are fixed.
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
        # Every rank must fit sequences of the length that routers accept.
        config=dataclasses.replace(
            config, num_workers=size, max_model_len=min(report["max_model_len"] for report in reports)
        ),
        reports=tuple(
            _after(reports[r], rooms[r], whole.num_owned(r), placement.num_owned(r), slots.get(r, 0)) for r in stay
        ),
    )


def _allowed(config: EngineConfig, room: Headroom, now: int) -> int:
    """Return the extra slots that the flags allow a rank whose `now` experts all have slots."""
    most = config.expert_slots
    if most is None and config.expert_memory is not None:
        most = config.expert_memory // room.slot_bytes
    return 1 << 62 if most is None else max(0, most - now)


def _after(report: Mapping[str, Any], room: Headroom, owned: int, owns: int, gained: int) -> dict[str, Any]:
    """Return a rank's report after its experts change from `owned` to `owns`, with up to `gained` extra slots."""
    before = owned if room.all_resident else report["expert_slots"]
    slots = min(owns, before + (gained if room.all_resident else 0))
    return {**report, "expert_slots": slots, "held_bytes": report["held_bytes"] + (slots - before) * room.slot_bytes}
