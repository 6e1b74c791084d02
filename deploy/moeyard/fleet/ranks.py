"""The processes of a fleet's ranks, and the epochs in which they serve. Pure.

An epoch is the life of one mesh. When ranks are lost, the others keep their processes and all that they hold. The lost
ranks get new processes, every rank binds a mesh of the next epoch, and all continue together. A failure on the way
names ranks (RanksLost): `replace` may be called again with these, and continues with what is sound.

A method that waits is a script: a generator that yields a question of the machine, or None until the next event.
"""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moeyard.fleet.decisions import Headroom, ResizePlan, placement_for, plan_resize, without
from moeyard.fleet.messages import (
    Call,
    End,
    Failed,
    Fence,
    FleetError,
    Instruction,
    Make,
    Rank,
    RanksLost,
    ReservePlaces,
    Returned,
    StartRay,
    Unrecoverable,
    named,
    parts,
)
from moeyard_worker.checkpoint.identity import difference
from moeyard_worker.config.engine_config import STALL, EngineConfig
from moeyard_worker.config.placement import Placement

T = TypeVar("T")
Script = Generator[Instruction | None, Any, T]

log = logging.getLogger(__name__)

# Time for a call of a rank that lives, beyond the step deadline: its host may be busy starting another.
CALL_SECONDS = 15.0
MEET_SECONDS = 20.0
REMEET_SECONDS = 5.0
# Calls without a time limit: their processes have to give signs of life instead.
WATCHED = frozenset(("seat", "setup", "load", "prepare"))


@dataclass(slots=True, eq=False)
class Pending:
    """A call of a process: its value, or the error in its place, once it is `over`."""

    process: "Process"
    method: str
    over: bool = False
    value: Any = None
    error: FleetError | None = None


@dataclass(slots=True, eq=False)
class Process:
    """One process of a rank, and how far it has come.

    `epoch` and `placement` are those of its setup. `wait` is the call that ends when it ends or loses a peer, and
    `loss` its report of that, until it rejoins. `has`: the experts that it serves with, or will when it starts;
    `read`: those that it has read for an epoch to come. `silent`: seconds without a sign of life, if too many.
    """

    number: int
    rank: int
    placement: Placement
    epoch: int = 0
    setting_up: Pending | None = None
    loading: Pending | None = None
    wait: Pending | None = None
    setup: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    started: bool = False
    loss: dict[str, Any] | None = None
    has: Any = None
    read: Any = None
    silent: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """The result of its setup."""
        assert self.setup is not None, "a rank is set up before it meets others"
        return self.setup

    @property
    def error(self) -> FleetError | None:
        """Why it cannot come, or has ended."""
        calls = (self.wait,) if self.started else (self.setting_up, self.loading)
        found = next((call.error for call in calls if call is not None and call.error is not None), None)
        return found or (silence([self]) if self.silent and not self.started else None)


@dataclass(slots=True)
class Resizing:
    """Another number of ranks that is being prepared: `coming` ranks start, ranks that stay are `reading` experts.

    `asked`: ranks that have come are asked whether they are still there, until `limit`.
    """

    plan: ResizePlan
    coming: dict[int, Process]
    reading: dict[int, Pending]
    asked: dict[int, Pending] = field(default_factory=dict)
    limit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A fleet in a new epoch: all its ranks, and the survivors' reports of the loss.

    `seconds` went to each part of the way, by name, in order.
    """

    ranks: tuple[Rank, ...]
    losses: tuple[dict[str, Any], ...]
    seconds: Mapping[str, float]


def silence(processes: Collection[Process]) -> RanksLost:
    """Return the loss of processes that gave no sign of life."""
    ranks, seconds = [process.rank for process in processes], max(process.silent for process in processes)
    return RanksLost(ranks, f"{named(ranks)} gave no sign of life for {seconds:.0f} s while starting")


class Ranks:
    """Owner of all processes. `emit` takes instructions. `now` is the time of the event that is being handled."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        placement: Placement,
        takeover: str,
        seats: bool,
        first_epoch: int,
        emit: Callable[[Instruction], None],
    ) -> None:
        """`placement` is that of the whole fleet. `seats`: ranks tell their GPUs before any is set up."""
        # A fleet that began with peers keeps an exchange that allows them. Ranks on GPUs find out what theirs can do.
        if config.num_workers > 1 and config.exchange == "auto" and config.device == "cpu":
            config = dataclasses.replace(config, exchange="zmq")
        self.config, self._takeover, self._emit = config, takeover, emit
        self.now = 0.0
        self.members: list[Process] = []
        self.spares: dict[int, Process] = {}  # the next process of a rank that still serves
        self.resizing: Resizing | None = None
        self.whole = self.placed = placement  # of all ranks, and of the epoch that runs or ran last
        self.runs = self.forming = False
        self.ray_ended: str | None = None
        self._reports: list[dict[str, Any]] = []  # of the first start
        self._start_seconds = math.inf  # from the making of a rank to its first step
        self._outside: tuple[Process, ...] = ()  # processes that have left
        self._late_readings: tuple[Pending, ...] = ()  # of a resize that was given up
        self._seats: dict[int, tuple[str, int]] | None = {} if seats else None  # node and GPU of each rank
        self._nodes: dict[int, str] = {}  # the node of each rank, also of one that is lost
        self._weights: dict[str, Mapping[str, tuple[str, str]]] = {}  # the first identity, by node, and "" of all
        self._changes: dict[int, Mapping[str, Any]] = {}  # how the config of a rank differs from the fleet's
        self._unused: dict[int, Mapping[str, Any]] = {}  # the changes before, of ranks whose new ones are not in use
        self._open: dict[int, Pending] = {}
        self._calls = self._processes = 0
        self._epoch = first_epoch

    @property
    def size(self) -> int:
        """The number of ranks, away or not."""
        return self.config.num_workers

    @property
    def starting(self) -> bool:
        """Whether a process is on its way into the fleet."""
        return not self.runs or self.resizing is not None or bool(self.spares) or bool(self.away)

    @property
    def serving(self) -> list[int]:
        """Numbers of the processes whose epoch runs."""
        return [process.number for process in list(self.members) if process.started] if self.runs else []

    @property
    def away(self) -> list[Process]:
        """New processes of ranks without which the others serve."""
        return [process for process in list(self.members) if not process.started] if self.runs else []

    # Calls.

    def heard(self, event: Returned | Failed) -> None:
        """Take the end of a call."""
        pending = self._open.pop(event.call, None)
        if pending is None:
            return  # of a process that was fenced
        process, pending.over, pending.process.silent = pending.process, True, 0.0
        if isinstance(event, Failed):
            pending.error = failure(pending, event)
            return
        pending.value = event.value
        try:
            if pending.method in ("setup", "rebind"):
                self._was_set_up(process, event.value)
            elif pending.method == "load":
                process.report, process.has = event.value, process.placement.experts(process.rank)
                if self._reports:
                    spent = {**process.facts["seconds"], **event.value["seconds"]}
                    log.info("rank %d has loaded: %s", process.rank, parts(spent))
            elif pending.method == "wait":
                process.loss = event.value
                if event.value is None:
                    raise RanksLost([process.rank], "it stopped")
        except FleetError as error:
            pending.error = error

    def silent(self, processes: Collection[int], seconds: float) -> None:
        """Note processes that give no sign of life."""
        for pending in self._open.values():
            if pending.process.number in processes:
                pending.process.silent = seconds

    def check(self) -> None:
        """Raise RanksLost naming all ranks when Ray has ended, Unrecoverable where that is in the first start."""
        if self.ray_ended is not None and not self._reports:
            raise Unrecoverable(f"Ray's {self.ray_ended} has ended while the fleet was starting; start it again")
        if self.ray_ended is not None:
            raise RanksLost(range(self.size), f"Ray's {self.ray_ended} has ended")

    def gather(self, calls: Mapping[int, Pending], timeout: float | None = None) -> Script[dict[int, Any]]:
        """Return the results of one call per rank. Raises RanksLost with the reason of one that failed.

        The first start ends with the first failure. Otherwise all calls are waited for, so that sound ranks need not
        repeat theirs. A rank that ends or does not answer is then named before a rank that misses a peer, as it may be
        that peer. Calls without a `timeout` may take any time while their processes give signs of life.
        """
        waiting, lost = dict(calls), list[RanksLost]()
        limit = math.inf if timeout is None else self.now + timeout
        while True:
            for rank in [rank for rank, call in waiting.items() if call.over]:
                error = waiting.pop(rank).error
                if isinstance(error, RanksLost) and error.ranks == {rank}:
                    lost.append(error)
                elif error is not None:
                    raise error
            if timeout is None and (hung := {r: c.process for r, c in waiting.items() if c.process.silent}):
                lost.append(silence(list(hung.values())))
                waiting = {rank: call for rank, call in waiting.items() if rank not in hung}
            if waiting and self.now > limit:
                lost.append(RanksLost(waiting, f"worker {min(waiting)} did not answer within {timeout:.0f} s"))
                waiting = {}
            if not waiting or (lost and not self._reports):
                break
            self.check()
            yield None
        if lost:
            raise next((each for each in lost if not each.said), lost[0])
        return {rank: call.value for rank, call in calls.items()}

    def _call(self, process: Process, method: str, *args: Any) -> Pending:
        self._calls += 1
        pending = self._open[self._calls] = Pending(process, method)
        self._emit(Call(self._calls, process.number, method, args, method in WATCHED))
        return pending

    # Processes.

    def _make(self, rank: int, *, beside: bool = False) -> Process:
        self._processes += 1
        self._emit(Make(self._processes, rank, beside))
        return Process(self._processes, rank, self.whole)

    def _set_up(self, process: Process, epoch: int, plan: ResizePlan | None = None) -> Process:
        """Have a process begin its setup. It decides as the first process of the rank did, which its report says."""
        rank, config = process.rank, self.config if plan is None else plan.config
        process.epoch, process.placement = epoch, self.whole if plan is None else plan.placement
        if plan is None and self._reports:
            decided = {name: self._reports[rank][name] for name in ("max_model_len", "expert_slots")}
            config = dataclasses.replace(config, **{**decided, "expert_memory": None, **self._changes.get(rank, {})})
        spec = {"config": config, "rank": rank, "epoch": epoch, "placement": process.placement, "seat": None}
        if self._seats is None:
            spec |= {"gpu": rank, "peer_gpus": tuple(range(config.num_workers))}
        else:
            one_node = len({node for node, _ in self._seats.values()}) == 1
            gpus = tuple(self._seats[rank][1] for rank in sorted(self._seats)) if one_node else ()
            spec |= {"seat": self._seats[rank], "peer_gpus": gpus}
        process.setting_up = self._call(process, "setup", spec)
        return process

    def _was_set_up(self, process: Process, facts: dict[str, Any]) -> None:
        if "moved" in facts:
            # All were on one node, which was lost. All have to tell their GPUs again, as peers know each other's.
            raise RanksLost(range(self.size), f"rank {process.rank} has come to {facts['moved']}")
        process.setup = now = (process.setup or {}) | facts
        self._nodes[process.rank] = now["node"]
        for node in ("", now["node"]):
            first = self._weights.setdefault(node, now["weights"])
            if name := difference(first, now["weights"], one_host=bool(node)):
                raise Unrecoverable(
                    f"{name} is another for rank {process.rank} than for the fleet before: it has changed since it was "
                    "loaded, and answers cannot go on with other weights; start moeyard serve again"
                )

    def _load(self, process: Process, ranks_on_host: int) -> Pending:
        process.loading = self._call(process, "load", ranks_on_host)
        return process.loading

    def _fence(self, process: Process) -> None:
        self._emit(Fence(process.number))
        self._forget([process])

    def _forget(self, processes: Collection[Process]) -> None:
        """Wait for no call of processes that end."""
        for number in [number for number, pending in self._open.items() if pending.process in processes]:
            pending = self._open.pop(number)
            rank = pending.process.rank
            pending.over, pending.error = True, RanksLost([rank], f"rank {rank} was lost")

    def tend(self) -> None:
        """Have ranks that are away, and are set up, load beside the others' steps."""
        for process in self.away:
            if process.setup is not None and process.loading is None:
                self._load(process, 1)

    def losses(self) -> tuple[dict[int, str], list[dict[str, Any]]]:
        """Return the ranks of a running epoch that are lost, with reasons, and the survivors' reports."""
        lost = {process.rank: str(process.error) for process in self.members if process.error is not None}
        reports = [process.loss for process in self.members if process.loss is not None]
        for report in reports:
            for rank in set(report["ranks"]).intersection(range(self.size)):
                lost.setdefault(rank, report["reason"])
        return lost, reports

    # Epochs.

    def launch(self) -> Script[Recovered]:
        """Make all ranks and take them to their first step. Raises FleetError naming the first at fault."""
        begun = self.now
        self.members = [self._make(rank) for rank in range(self.size)]
        recovered = yield from self._form((self.whole, {}), meet=MEET_SECONDS)
        self._start_seconds = self.now - begun
        self._reports = [rank.report for rank in recovered.ranks]
        return recovered

    def replace(self, dead: Collection[int], *, whole: bool) -> Script[Recovered | None]:
        """Give `dead` new processes and form another epoch: of all ranks if `whole`, else of those that can take over.

        Returns None if no other epoch is needed, as they were away. A private Ray that has ended is started again with
        all ranks. Raises RanksLost: call it again; Unrecoverable if Ray does not start again.
        """
        if self.ray_ended is not None:
            yield from self._start_ray(self.ray_ended)
        for rank in sorted(dead) if self.members else ():
            self._fence(self.members[rank])
            spare = self.spares.pop(rank, None)
            self.members[rank] = spare or self._make(rank)
        self.members = self.members or [self._make(rank) for rank in range(self.size)]
        if self.runs and dead and not set(dead).intersection(self.placed.ranks):
            self._set_all_up(self._next_epoch())
            return None
        recovered = yield from self._form((self.whole, {}) if whole else None)
        self._unused = {rank: changes for rank, changes in self._unused.items() if rank not in dead}
        return recovered

    def _start_ray(self, ended: str) -> Script[None]:
        log.warning("Ray's %s has ended: starting Ray again, and all ranks", ended)
        self.members, self.spares, self.resizing, self.runs = [], {}, None, False
        self._outside, self._late_readings = (), ()
        self._forget([pending.process for pending in self._open.values()])
        problem = yield StartRay(ended)
        if problem is not None:
            raise Unrecoverable(f"Ray's {ended} has ended, and {problem}")
        self.ray_ended = None

    @property
    def ready(self) -> list[int]:
        """Ranks that are away and have loaded their experts."""
        return [process.rank for process in self.away if process.report is not None]

    def admit(self) -> Script[Recovered]:
        """Give `ready` ranks their experts back, between steps, in another epoch. Raises RanksLost: call `replace`."""
        ready, missing = self.ready, [process.rank for process in self.away if process.report is None]
        self.check()
        yield from self._end_epoch(f"{named(ready)} is back")
        placement = self.whole.without(missing) if missing else self.whole
        return (yield from self._form((placement, {}), planned=True))

    def _end_epoch(self, reason: str) -> Script[None]:
        """Have all ranks stop between steps."""
        first = self.placed.ranks[0]
        try:
            yield from self.gather({first: self._call(self.members[first], "end_epoch", reason)}, CALL_SECONDS)
        except RanksLost:
            self.check()  # a rank that has ended is found by the others

    def _next_epoch(self) -> int:
        """Return a number that is no other epoch's; 0 is none."""
        self._epoch = self._epoch % (2**31 - 1) + 1
        return self._epoch

    def _form(
        self,
        to: tuple[Placement, Mapping[int, int]] | None,
        *,
        meet: float = REMEET_SECONDS,
        planned: bool = False,
    ) -> Script[Recovered]:
        """Take every rank of the next epoch from where it is to its first step in it.

        `to`: its placement, and how many more slots ranks may take; None: decided once losses are known. `planned`:
        the last epoch was ended.
        """
        self.runs = False
        epoch, patience = self._next_epoch(), self.config.step_deadline + CALL_SECONDS
        seconds, since = dict[str, float](), self.now

        def lap(name: str) -> None:
            nonlocal since
            seconds[name], since = self.now - since, self.now

        if self._seats is not None and all(process.setting_up is None for process in self.members):
            asked = {process.rank: self._call(process, "seat") for process in self.members}
            self._seats = yield from self.gather(asked)
            lap("places")
        self._set_all_up(epoch)
        # A survivor may still be in its step. Where the epoch was ended on purpose a long step may take any time; the
        # others name a rank that hangs in it.
        losses = yield from self._hear_losses(math.inf if planned else STALL * self.config.step_deadline + CALL_SECONDS)
        lap("losses")
        placement, slots = to if to is not None else (yield from self._take_over())
        # No rank meets others while it still loads on its own.
        loading = {p.rank: p.loading for p in self.members if p.loading is not None and p.report is None}
        yield from self.gather({rank: call for rank, call in loading.items() if rank in placement.ranks})
        members = {rank: self.members[rank] for rank in placement.ranks}
        new = {r: p.setting_up for r, p in members.items() if p.setup is None and p.setting_up is not None}
        old = {r: self._call(p, "rebind", epoch, placement) for r, p in members.items() if r not in new}
        yield from self.gather(old, patience)
        yield from self.gather(new)
        # Ranks that were being set up while another epoch began.
        late = {r: self._call(members[r], "rebind", epoch, placement) for r in new if members[r].epoch != epoch}
        yield from self.gather(late, patience)
        lap("processes")
        mesh = [process.facts["mesh"] for process in members.values()]
        yield from self._meet({r: self._call(p, "connect", mesh, meet) for r, p in members.items()}, meet + patience)
        lap("meeting")
        unloaded = [process for process in members.values() if process.report is None]
        per_node = Counter(process.facts["node"] for process in unloaded)
        yield from self.gather({p.rank: self._load(p, per_node[p.facts["node"]]) for p in unloaded})
        moved = [r for r, p in members.items() if placement.experts(r) not in (p.has, p.read)]
        yield from self.gather({r: self._call(members[r], "prepare", placement, slots.get(r, 0)) for r in moved})
        lap("experts")
        step = max((process.loss["steps"] for process in members.values() if process.loss is not None), default=0)
        begun = {r: self._call(p, "rejoin" if p.started else "start", step) for r, p in members.items()}
        for rank, process in members.items():
            # Before it is known whether all have begun: those that have will report those that have not.
            process.started, process.loss, process.wait = True, None, self._call(process, "wait")
            process.has, process.read = placement.experts(rank), None
        self.placed = placement
        yield from self.gather(begun, patience)
        lap("rejoining")
        self.runs = True
        return Recovered(ranks=tuple(map(rank_of, self.members)), losses=losses, seconds=seconds)

    def _set_all_up(self, epoch: int) -> None:
        for process in self.members:
            if process.setting_up is None:
                self._set_up(process, epoch)

    def _hear_losses(self, patience: float) -> Script[tuple[dict[str, Any], ...]]:
        """Wait until started ranks have reported losses. Raises RanksLost for one that ends, is named or is silent."""
        limit, started = self.now + patience, [process for process in self.members if process.started]
        while silent := [process for process in started if process.loss is None]:
            for process in silent:
                if process.error is not None:
                    raise process.error
            self.check()
            if self.now > limit:
                ranks = [process.rank for process in silent]
                raise RanksLost(ranks, f"worker {min(ranks)} does not notice that the others have lost a peer")
            yield None
        losses = tuple(process.loss for process in started if process.loss is not None)
        for loss in losses:
            # A rank that was named and still stands is fenced before it meets anybody again.
            if there := {process.rank for process in started}.intersection(loss["ranks"]):
                raise RanksLost(there, loss["reason"])
        return losses

    def _take_over(self) -> Script[tuple[Placement, Mapping[int, int]]]:
        """Return the placement to serve with, and how many more slots its ranks may take."""
        there = [process for process in self.members if process.started]
        away = {process.rank for process in self.members if not process.started}
        if not away or not there:
            return self.whole, {}
        return without(
            away,
            mode=self._takeover,
            whole=self.whole,
            before=self.placed,
            rooms=(yield from self._rooms(there)),
            nodes=self._nodes,
            reports=self._reports,
            start_seconds=self._start_seconds,
        )

    def _rooms(self, processes: Collection[Process]) -> Script[dict[int, Headroom]]:
        found = yield from self.gather({p.rank: self._call(p, "room") for p in processes}, CALL_SECONDS)
        return {rank: Headroom(**room) for rank, room in found.items()}

    def _meet(self, calls: Mapping[int, Pending], timeout: float) -> Script[None]:
        """Let all meet. A rank that misses a peer says so itself, so where none has ended the new ones are named."""
        try:
            yield from self.gather(calls, timeout)
        except RanksLost as lost:
            fresh = {rank for rank in calls if not self.members[rank].started}
            if not lost.said or not fresh:
                raise
            raise RanksLost(fresh, str(lost), said=True) from lost

    # Processes that are prepared beside the ranks that serve.

    def prepare(self, rank: int, changes: Mapping[str, Any], *, beside: bool) -> None:
        """Have the rank's next processes differ by `changes` (fields of EngineConfig); start one now if `beside`."""
        self.check()
        self._unused[rank] = self._changes.get(rank, {})
        self._changes[rank] = {**self._unused[rank], **changes}
        if beside:
            # The epoch of its mesh is not known yet.
            self.spares[rank] = self._set_up(self._make(rank, beside=True), 0)

    def prepared(self, rank: int) -> bool:
        """Return whether the rank's next process is set up. Raises FleetError if it cannot be."""
        self.check()
        spare = self.spares.get(rank)  # None once Ray and all ranks were started again
        if spare is not None and spare.error is not None:
            raise spare.error
        return spare is None or spare.setup is not None

    def abandon(self, rank: int) -> None:
        """End the rank's next process and undo its changes, unless they are in use."""
        if (spare := self.spares.pop(rank, None)) is not None:
            self._end([spare])
        if rank in self._unused:
            self._changes[rank] = self._unused.pop(rank)

    def _end(self, processes: Collection[Process]) -> None:
        self._forget(processes)
        self._emit(End(tuple(process.number for process in processes)))

    # Another number of ranks. Without `resize` all stays as it was.

    def begin_resize(self, size: int) -> Script[bool]:
        """Start ranks that come, and have those that stay read the experts of those that leave.

        Returns False if it has to be asked again, as ranks still read for a resize that was given up. Raises
        FleetError for a size that cannot be.
        """
        self.check()
        # A size that can never be is refused before what is missing now.
        placement_for(size, whole=self.whole, config=self.config)
        come = tuple(range(self.size, size))
        if not all(call.over for call in self._late_readings):
            return False
        if come and (problem := (yield ReservePlaces(come, size))) is not None:
            raise FleetError(problem)
        plan = plan_resize(
            size,
            whole=self.whole,
            config=self.config,
            rooms=(yield from self._rooms(self.members)),
            nodes=self._nodes,
            reports=self._reports,
            mode=self._takeover,
        )
        coming = {rank: self._set_up(self._make(rank), 0, plan) for rank in come}
        stay = self.members[:size] if size < self.size else []
        reading = {p.rank: self._call(p, "prepare", plan.placement, plan.slots.get(p.rank, 0)) for p in stay}
        self.resizing = Resizing(plan, coming, reading)
        return True

    def resize_stage(self) -> str | None:
        """Return what a resize waits for, "" for a moment, None if nothing any more. Raises FleetError."""
        self.check()
        resizing = self.resizing
        if resizing is None:
            raise FleetError("Ray has ended, and the ranks that were to come with it")
        coming, plan = resizing.coming, resizing.plan
        if error := next((p.error for p in coming.values() if p.error is not None), None):
            raise error
        if starting := [rank for rank, process in coming.items() if process.setup is None]:
            return f"starting {named(starting)}"
        per_node = Counter(process.facts["node"] for process in coming.values())
        for process in coming.values():
            if process.loading is None:
                self._load(process, per_node[process.facts["node"]])
        if loading := [rank for rank, process in coming.items() if process.report is None]:
            return f"loading the experts of {named(loading)}"
        for rank in [rank for rank, call in resizing.reading.items() if call.over]:
            call = resizing.reading.pop(rank)
            if call.error is not None:
                raise call.error
            self.members[rank].read = plan.placement.experts(rank)
        if resizing.reading:
            return f"reading experts at {named(resizing.reading)}"
        return None if self._all_here(resizing) else ""

    def _all_here(self, resizing: Resizing) -> bool:
        """Return whether all that come have just answered, so that others may stop for them."""
        if not resizing.asked:
            resizing.asked = {rank: self._call(process, "progress") for rank, process in resizing.coming.items()}
            resizing.limit = self.now + CALL_SECONDS
            return not resizing.asked
        if error := next((call.error for call in resizing.asked.values() if call.error is not None), None):
            raise error
        silent = [rank for rank, call in resizing.asked.items() if not call.over]
        if silent and self.now > resizing.limit:
            raise RanksLost(silent, f"worker {silent[0]} has loaded its experts, and does not answer any more")
        resizing.asked = resizing.asked if silent else {}
        return not silent

    def resize(self) -> Script[Recovered]:
        """End the epoch between steps, and form another with the planned number of ranks.

        Raises RanksLost with all as it was before, for `replace`: no rank has left, and those that come do not.
        """
        resizing, self.resizing = self.resizing, None
        assert resizing is not None, "it was begun, and is ready"
        plan, before = resizing.plan, (self.members, self.whole, self.config, self._reports)
        come = list(resizing.coming.values())
        try:
            yield from self._end_epoch(f"going on with {plan.size} ranks")
            self._outside = tuple(self.members[plan.size :])
            self.members = [*self.members[: plan.size], *come]
            self.whole, self.config = plan.placement, dataclasses.replace(self.config, num_workers=plan.size)
            self._reports = [*map(dict, plan.reports), *(dict(process.report or {}) for process in come)]
            recovered = yield from self._form((plan.placement, plan.slots), planned=True)
        except RanksLost as error:
            self.members, self.whole, self.config, self._reports = before
            self._outside = ()
            for process in come:
                # Some of them may serve by now.
                self._fence(process)
            raise RanksLost(error.ranks.intersection(range(self.size)), str(error)) from error
        self._changes = {rank: changes for rank, changes in self._changes.items() if rank < plan.size}
        return recovered

    def end_resize(self) -> None:
        """End ranks that have left; or give up, and end those that were to come. Give their places back."""
        ended, self._outside = [*self._outside], ()
        if self.resizing is not None:
            ended += self.resizing.coming.values()
            self._late_readings = (*self._late_readings, *self.resizing.reading.values())
            self.resizing = None
        for process in self.members:
            if process.read is not None:
                process.read = None
                self._call(process, "prepare", self.placed, 0)  # forget what was read
        self._end(ended)

    def validate(self) -> None:
        """Assert all invariants."""
        coming = [] if self.resizing is None else list(self.resizing.coming.values())
        everyone = [*self.members, *self.spares.values(), *coming, *self._outside]
        numbers = [process.number for process in everyone]
        assert len({*numbers}) == len(numbers), "a process has one place"
        assert [process.rank for process in self.members] == list(range(len(self.members))), "members are in order"
        assert len(self.members) in (0, self.size) or self.forming, "each rank has one process"
        assert all(rank == spare.rank < self.size and not spare.started for rank, spare in self.spares.items())
        assert not any(process.started for process in coming), "ranks that come are in no epoch"
        assert all(pending.process in everyone for pending in self._open.values()), "calls are of known processes"
        assert all(not pending.over for pending in self._open.values()), "open calls are not over"
        for process in self.members:
            assert not process.started or (process.report is not None and process.wait is not None)
            assert process.loss is None or process.started, "only a rank that has served reports a loss"
        if self.runs:
            started = {process.rank for process in self.members if process.started}
            assert started == set(self.placed.ranks) or self.forming, "the ranks of the epoch serve, and no others"
            assert set(self.placed.ranks) <= set(range(self.size))


def failure(pending: Pending, event: Failed) -> RanksLost:
    """Return the loss of a rank whose call failed, in its own words if it has any."""
    rank, reason, said = pending.process.rank, event.reason, event.how == "raised"
    if pending.method == "wait" and event.how == "ended":
        reason = f"the process of rank {rank} has ended"
    elif event.how == "ended":
        reason = f"worker {rank} died while starting: {reason}"
    elif event.how == "unrun" and pending.method != "wait":
        reason = f"Ray could not run worker {rank}: {reason}"
    return RanksLost([rank], reason, said=said)


def rank_of(process: Process) -> Rank:
    """Return a rank as routers and Prometheus are told of it."""
    if not process.started:
        return Rank(rank=process.rank, frontend="", metrics_url="", report={})
    facts = process.facts
    return Rank(
        rank=process.rank, frontend=facts["frontend"], metrics_url=facts["metrics_url"], report=process.report or {}
    )
