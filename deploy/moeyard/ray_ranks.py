"""The actors of all ranks: made, taken through a worker's life, listened to, fenced off and replaced.

An epoch is the life of one mesh. When ranks are lost the others keep their processes and all that they hold: the dead
ones get new actors, every rank binds a mesh of the next epoch, and all go on together. Whatever fails on the way names
ranks (`RanksLost`), and `recover` may be called again with these: it goes on with what is sound.
"""

import contextlib
import dataclasses
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from moeyard.rank import Event, Rank, RanksLost, Recovered, Unrecoverable, named
from moeyard.ray_calls import Calls
from moeyard.ray_member import (
    PROGRESS_SECONDS,
    Laps,
    Member,
    Progress,
    end_all,
    fence,
    is_here,
    is_new,
    lost_of,
    rank_of,
    setup_of,
    sized,
    told,
)
from moeyard.ray_places import Seats
from moeyard.same_weights import SameWeights
from moeyard.spares import Spares
from moeyard.takeover import Room, without
from moeyard.vitals import Vitals
from moeyard_worker.config.engine_config import STALL, EngineConfig
from moeyard_worker.config.placement import Placement

# What a rank that lives may take for a call, beyond the step deadline: its host may be busy starting another.
CALL_SECONDS = 15.0
MEET_SECONDS = 20.0
REMEET_SECONDS = 5.0


class RayRanks:
    """Owner of the actors. `make(rank)` makes one in its place; `spec(config, rank, epoch, placement)` tells its setup.

    `placement` is that of the whole fleet, and `takeover` says when others go on without a rank. `seats`: where Ray
    gives out GPUs, told of each rank's before any is set up.

    `check` is called between calls of Ray and ends what is going on by an exception.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        make: Callable[[int], Any],
        spec: Callable[[EngineConfig, int, int, Placement], dict[str, Any]],
        placement: Placement,
        takeover: str = "auto",
        seats: Seats | None = None,
    ) -> None:
        self.check: Callable[[], None] = lambda: None
        # Of the fleet as it began: with one rank left it is still one that had peers, and may have them again.
        # Ranks on GPUs find out what theirs can do; their fleet keeps its size.
        if config.num_workers > 1 and config.exchange == "auto" and config.device == "cpu":
            config = dataclasses.replace(config, exchange="zmq")
        self._config, self._make, self._spec = config, make, spec
        self._members: list[Member] = []
        self._whole = self._now = placement  # of all, and of the epoch that runs or ran last
        self._runs, self._takeover, self._seats = False, takeover, seats
        self._start_seconds = math.inf  # how long a rank takes from its making to its first step
        self._call = Calls(lambda: self._members, check=lambda: self.check(), at_once=lambda: not self._reports)
        self.spares, self.weights = Spares(), SameWeights()
        self._reports: list[dict[str, Any]] = []  # of the first start
        self._nodes: dict[int, str] = {}  # where each rank is, or was last
        self._vitals, self._laps = Vitals(), Laps()
        self._losses: dict[int, dict[str, Any]] = {}  # what was told of the epoch before, by rank

    def launch(self, progress: Progress, made: Callable[[], None] = lambda: None) -> list[Rank]:
        """Make all actors (then `made`), take them to their first step. Raises RanksLost naming the first at fault."""
        begun = time.monotonic()
        self._members = [Member(self._make(rank)) for rank in range(self._config.num_workers)]
        made()
        ranks = self._begin_epoch(progress, meet=MEET_SECONDS)
        self._start_seconds = time.monotonic() - begun
        self._call.signs.started(self._start_seconds)
        self._reports = [rank.report for rank in ranks]
        return ranks

    @property
    def size(self) -> int:
        """Ranks, away or not."""
        return self._config.num_workers

    def events(self, timeout: float) -> list[Event]:
        """What ranks have told within `timeout` seconds, at the latest: each its end, or the loss of a peer.

        Those that are away go on with their start meanwhile.
        """
        self._vitals.look(setup_of(m)["pid"] for m in self._members if is_here(m))
        waits = {m.wait: rank for rank, m in enumerate(self._members) if m.wait is not None}
        starts = {m.loading or m.setting_up: rank for rank, m in self._away() if m.report is None}
        if not waits and not starts:
            time.sleep(timeout)
            return []
        done, _ = ray.wait([*waits, *starts], num_returns=1, timeout=timeout)
        events = [self._event(waits[ref], ref) if ref in waits else self._advance(starts[ref], ref) for ref in done]
        if not done and (lost := self._call.signs.lost({r: self._members[r] for r in starts.values()})) is not None:
            events = [Event(rank=rank, reason=str(lost)) for rank in lost.ranks]
        return [event for event in events if event is not None]

    def _away(self) -> list[tuple[int, Member]]:
        """Who has been made anew while an epoch of the others runs."""
        return [(r, m) for r, m in enumerate(self._members) if self._runs and not m.started and m.setting_up]

    def _advance(self, rank: int, ref: Any) -> Event | None:
        """A rank that is away was set up, or has loaded its shard, or could not."""
        member = self._members[rank]
        try:
            result = ray.get(ref)
            if member.loading is None:
                # One that was set up beside the rank whose place it took is so before this, too.
                self._set_up(rank, result)
                member.loading = member.actor.load.remote(1)
                return None
        except (RayError, Unrecoverable, RanksLost) as error:
            return Event(rank=rank, reason=str(lost_of(rank, error)))
        self._loaded(rank, result)
        return Event(rank=rank, reason=f"rank {rank} has loaded its experts", ready=True)

    def _event(self, rank: int, ref: Any) -> Event:
        member, event = self._members[rank], told(rank, ref)
        member.wait, member.loss = None, event.loss
        return event

    def recover(self, dead: Collection[int], *, whole: bool = False) -> Recovered | None:
        """New actors for `dead`, whatever these do, and another epoch: for all (if `whole`), or for who can take over.

        None if no other epoch is needed, as they were away. Raises RanksLost: call it again.
        """
        for rank in dead if self._members else ():
            fence(self._members[rank])
            self._members[rank] = self.spares.take(rank) or Member(self._make(rank))
        self._members = self._members or [Member(self._make(rank)) for rank in range(self.size)]
        if self._runs and not set(dead).intersection(self._now.ranks):
            self._set_all_up(secrets.randbits(31))
            return None
        recovered = self._go_on((lambda: (self._whole, {})) if whole else self._taken_over)
        self.spares.used(dead)
        return recovered

    def admit(self) -> Recovered | None:
        """Give those that were away and have loaded their experts back, between steps, in another epoch.

        None if there is nobody. Raises RanksLost: call `recover`.
        """
        ready = [rank for rank, member in self._away() if member.report is not None]
        if not ready:
            return None
        missing = [r for r, m in enumerate(self._members) if not m.started and r not in ready]
        self._end_epoch(f"{named(ready)} is back")
        return self._go_on(lambda: (self._whole.without(missing) if missing else self._whole, {}), planned=True)

    def _end_epoch(self, reason: str) -> None:
        """Have all ranks stop between steps."""
        with contextlib.suppress(RayError):  # boundary: who has ended is found by the others
            who = self._members[self._now.ranks[0]].actor
            ray.get(who.end_epoch.remote(reason), timeout=CALL_SECONDS)

    def _go_on(self, choose: Callable[[], tuple[Placement, Mapping[int, int]]], *, planned: bool = False) -> Recovered:
        self._losses, self._runs = {}, False
        ranks = self._begin_epoch(lambda done, total: None, meet=REMEET_SECONDS, choose=choose, planned=planned)
        return Recovered(ranks=tuple(ranks), losses=tuple(self._losses.values()), seconds=dict(self._laps.seconds))

    def _taken_over(self) -> tuple[Placement, Mapping[int, int]]:
        """The placement to go on with now that losses are known, and the slots that its ranks may take in addition."""
        there = {r: m for r, m in enumerate(self._members) if m.started}
        away = set(range(len(self._members))).difference(there)
        if not away or not there:
            return self._whole, {}
        rooms: dict[int, Room] = {}
        asked = {r: m.actor.room.remote() for r, m in there.items()}
        self._call(asked, lambda rank, room: rooms.update({rank: Room(**room)}), timeout=CALL_SECONDS)
        return without(
            away, mode=self._takeover, whole=self._whole, before=self._now, rooms=rooms, nodes=self._nodes,
            reports=self._reports, start_seconds=self._start_seconds,
        )  # fmt: skip

    def prepare(self, rank: int, changes: Mapping[str, Any], actor: Any) -> None:
        """Set `actor`, unless it is None, up for a rank's place, and note how it and its successors are to differ."""
        self.spares.note(rank, changes)
        if actor is not None:
            # The epoch of its mesh is not known yet: 0 is nobody's.
            self.spares.members[rank] = Member(actor, actor.setup.remote(self._spec_of(rank, 0)))

    def end_of(self, rank: int) -> str | None:
        """How the process of a lost rank was last seen; None where it is on another host, or not known."""
        if not self._members:
            return None
        member = self._members[rank]
        return self._vitals.describe(setup_of(member)["pid"]) if is_here(member) else None

    def _begin_epoch(
        self, progress: Progress, *, meet: float,
        choose: Callable[[], tuple[Placement, Mapping[int, int]]] | None = None, planned: bool = False,
    ) -> list[Rank]:  # fmt: skip
        """Take every member of the epoch's placement from where it is to its first step in it.

        `choose` says which placement, once losses are known; None: that of all. `planned`: the last epoch was ended.
        """
        epoch, patience = secrets.randbits(31), self._config.step_deadline + CALL_SECONDS
        self._laps = lap = Laps()
        self._set_all_up(epoch)
        # A survivor may still be in its step, and binds when it has found out. It looks between steps where the epoch
        # was ended, and a step of many layers may take any time; who hangs in it is named by the others.
        self._hear_losses(math.inf if planned else STALL * self._config.step_deadline + CALL_SECONDS)
        lap("losses")
        placement, slots = choose() if choose is not None else (self._whole, {})
        # Nobody meets others while it still loads on its own.
        self._call(
            {r: m.loading for r, m in enumerate(self._members) if r in placement.ranks and m.loads}, self._loaded
        )
        members = {rank: self._members[rank] for rank in placement.ranks}
        new = {r: m.setting_up for r, m in members.items() if is_new(m)}
        old = {r: m.actor.rebind.remote(epoch, placement) for r, m in members.items() if not is_new(m)}
        self._call(old, self._set_up, timeout=patience)
        self._call(new, self._set_up)
        # Those that were being set up while another epoch began.
        late = {r: members[r].actor.rebind.remote(epoch, placement) for r in new if members[r].epoch != epoch}
        self._call(late, self._set_up, timeout=patience)
        lap("processes")
        mesh = [setup_of(m)["mesh"] for m in members.values()]
        self._connect({r: m.actor.connect.remote(mesh, meet) for r, m in members.items()}, meet + patience)
        lap("meeting")
        unloaded = {r: m for r, m in members.items() if m.report is None}
        per_node = Counter(setup_of(m)["node"] for m in unloaded.values())
        loads = {r: m.actor.load.remote(per_node[setup_of(m)["node"]]) for r, m in unloaded.items()}
        self._call(loads, self._loaded, progress=progress)
        moved = {r: m for r, m in members.items() if placement.experts(r) not in (m.has, m.read)}
        self._call({r: m.actor.prepare.remote(placement, slots.get(r, 0)) for r, m in moved.items()})
        lap("experts")
        step = max((m.loss["steps"] for m in members.values() if m.loss is not None), default=0)
        begun = {r: (m.actor.rejoin if m.started else m.actor.start).remote(step) for r, m in members.items()}
        for rank, member in members.items():
            # Before it is known whether all have begun: those that have will tell of those that have not.
            member.started, member.loss, member.wait = True, None, member.actor.wait.remote()
            member.has, member.read = placement.experts(rank), None
        self._now = placement
        self._call(begun, timeout=patience)
        lap("rejoining")
        self._runs = True
        return [rank_of(rank, member) for rank, member in enumerate(self._members)]

    def _set_all_up(self, epoch: int) -> None:
        """Have every new actor begin its setup; others do not wait for that."""
        new = {r: m for r, m in enumerate(self._members) if is_new(m) and m.setting_up is None}
        if self._seats is not None and len(new) == len(self._members):
            self._call({r: m.actor.seat.remote() for r, m in new.items()}, self._seats.take)
            self._laps("places")
        for rank, member in new.items():
            member.setting_up, member.epoch = member.actor.setup.remote(self._spec_of(rank, epoch)), epoch

    def _set_up(self, rank: int, setup: dict[str, Any]) -> None:
        if "moved" in setup:
            # All were on one node, which was lost. All are asked anew where they are, for peers know each other's GPUs.
            raise RanksLost(range(len(self._members)), f"rank {rank} has come to {setup['moved']}")
        self._members[rank].setup = now = (self._members[rank].setup or {}) | setup
        self.weights.check(rank, now)
        self._nodes[rank] = setup_of(self._members[rank])["node"]

    def _loaded(self, rank: int, report: dict[str, Any]) -> None:
        self._members[rank].take(rank, report, first=not self._reports)
        self._members[rank].has = self._whole.experts(rank)

    def _spec_of(self, rank: int, epoch: int) -> dict[str, Any]:
        """What a rank's process is told."""
        config = sized(self._config, self._reports[rank] if self._reports else None, self.spares.changes.get(rank, {}))
        return self._spec(config, rank, epoch, self._whole)

    def _hear_losses(self, patience: float) -> None:
        """Wait until every started rank has told its loss; raises RanksLost for who ends, is named, or is silent."""
        limit = time.monotonic() + patience
        while silent := {r for r, m in enumerate(self._members) if m.started and m.loss is None}:
            for event in self.events(PROGRESS_SECONDS):
                if event.loss is None and not event.ready:
                    raise RanksLost([event.rank], event.reason)
            self.check()
            if time.monotonic() > limit:
                raise RanksLost(silent, f"worker {min(silent)} does not notice that the others have lost a peer")
        self._losses = {rank: m.loss for rank, m in enumerate(self._members) if m.loss is not None}
        for member in self._members:
            # Whoever was named and stands there still, started, is fenced before anybody meets it again.
            # (One that leaves anyway may be named, too.)
            there = {r for r, m in enumerate(self._members) if m.started}
            named = there.intersection((member.loss or {}).get("ranks", ()))
            if named and member.loss is not None:
                raise RanksLost(named, member.loss["reason"])

    def _connect(self, calls: dict[int, Any], timeout: float) -> None:
        """Let all meet. That one does not answer is said by another, so where nobody died, who is new is named."""
        try:
            self._call(calls, timeout=timeout)
        except RanksLost as lost:
            fresh = {r for r in calls if not self._members[r].started}
            if not isinstance(lost.__cause__, RayTaskError) or not fresh:
                raise
            raise RanksLost(fresh, str(lost), exit_code=lost.exit_code) from lost

    def stop(self) -> None:
        """See `end_all`."""
        end_all([*self._members, *self.spares.members.values()])
        self._members = []
