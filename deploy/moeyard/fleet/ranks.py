"""The processes of a fleet's ranks, and the epochs in which they serve. Pure.

An epoch is the life of one mesh. When ranks are lost, survivors keep their processes and state. Lost ranks get new
processes, every rank binds a mesh for the next epoch, and all continue together. A failure on the way raises RanksLost:
call `replace` again with its ranks, and it continues with the healthy ones.

A method that waits is a script: a generator that yields a question to the machine, or None to wait for the next event.
"""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
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
from moeyard_worker.config.worker_spec import AS_STARTED, ServedWeights

T = TypeVar("T")
Script = Generator[Instruction | None, Any, T]
Identity = Mapping[str, tuple[str, str]]  # of weights, as in checkpoint/identity.py

log = logging.getLogger(__name__)

# Time limit of a call to a live rank, beyond the step deadline. Its host may be busy with the start of another rank.
CALL_SECONDS = 15.0
MEET_SECONDS = 20.0
REMEET_SECONDS = 5.0
# Calls without a time limit. Their processes send heartbeats instead.
WATCHED = frozenset(
    ("seat", "setup", "load", "prepare", "stage_weights", "use_weights", "weight_checksums", "sleep", "wake")
)


@dataclass(slots=True, eq=False)
class Pending:
    """A call to a process. Once it is `over`, it has a value or an error."""

    process: "Process"
    method: str
    over: bool = False
    value: Any = None
    error: FleetError | None = None


@dataclass(slots=True, eq=False)
class Process:
    """One process of a rank and its progress towards serving.

    `epoch` and `placement` are those of its setup. The call `wait` returns when the process stops or loses a peer;
    `loss` is that report until the process rejoins. `has`: experts that it serves, or will serve when it starts.
    `read`: experts that it has read for a later epoch. `silent`: seconds without a heartbeat, 0 while within limits.
    `weights`: served, or to be served when it starts. `asleep`: the level at which it sleeps, 0 if awake. `changes`:
    fields in which its config differs from the fleet's.
    """

    number: int
    rank: int
    placement: Placement
    weights: ServedWeights = AS_STARTED
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
    asleep: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The result of its setup."""
        assert self.setup is not None, "a rank is set up before it meets others"
        return self.setup

    @property
    def error(self) -> FleetError | None:
        """The reason that it cannot start, or has ended; None while it is healthy."""
        calls = (self.wait,) if self.started else (self.setting_up, self.loading)
        found = first_error(call for call in calls if call is not None)
        return found or (silence([self]) if self.silent and not self.started else None)


@dataclass(slots=True)
class Resizing:
    """A resize in preparation: `coming` ranks start, and ranks that stay are `reading` experts.

    `asked`: the last liveness calls to coming ranks, which must return before `limit`.
    """

    plan: ResizePlan
    coming: dict[int, Process]
    reading: dict[int, Pending]
    asked: dict[int, Pending] = field(default_factory=dict)
    limit: float = 0.0


@dataclass(slots=True)
class Updating:
    """An update in preparation: every rank checks and reads `weights` while it serves."""

    weights: ServedWeights
    reading: dict[int, Pending]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A fleet in a new epoch: all ranks, the survivors' loss reports, and the seconds of each phase in order."""

    ranks: tuple[Rank, ...]
    losses: tuple[dict[str, Any], ...]
    seconds: Mapping[str, float]


def silence(processes: Collection[Process]) -> RanksLost:
    """Return the loss of processes that sent no heartbeat."""
    ranks, seconds = [process.rank for process in processes], max(process.silent for process in processes)
    return RanksLost(ranks, f"{named(ranks)} gave no sign of life for {seconds:.0f} s while starting")


def first_error(found: Iterable[Pending | Process]) -> FleetError | None:
    """Return the first error among calls or processes, None if there is none."""
    return next((each.error for each in found if each.error is not None), None)


def differing(known: dict[str, Identity], node: str, weights: Identity) -> str:
    """Compare a rank's weights with the first ones of the fleet and of its node. Return the file that differs, or "".

    known: the first identity by node, with "" for the fleet. Weights that are the first are added.
    """
    for place in ("", node):
        if name := difference(known.setdefault(place, weights), weights, one_host=bool(place)):
            return name
    return ""


class Ranks:
    """Owner of all processes. `emit` receives instructions. `now` is the time of the current event."""

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
        """Create ranks without processes. `placement` covers the whole fleet. `seats`: query GPUs before any setup."""
        # A fleet that starts with peers keeps an exchange between ranks. GPU ranks choose theirs at setup.
        if config.num_workers > 1 and config.exchange == "auto" and config.device == "cpu":
            config = dataclasses.replace(config, exchange="zmq")
        self.config, self._takeover, self._emit = config, takeover, emit
        self.now = 0.0
        self.members: list[Process] = []
        self.spares: dict[int, Process] = {}  # the next process of a rank that still serves
        self.resizing: Resizing | None = None
        self.updating: Updating | None = None
        self.weights = AS_STARTED  # the weights that every rank of an epoch serves
        self.paused = False  # whether ranks only take part in steps of their peers
        self.asleep = 0  # the level at which every rank of an epoch sleeps, 0 if awake
        self.freed = 0  # memory that all sleeping ranks have freed, in bytes
        self.whole = self.placed = placement  # placement of all ranks, and of the current or last epoch
        self.runs = self.forming = False
        self.ray_ended: str | None = None
        self._reports: list[dict[str, Any]] = []  # load reports of each rank's first start
        self._start_seconds = math.inf  # from a rank's creation to its first step
        self._outside: tuple[Process, ...] = ()  # processes that a resize removed
        self._late_readings: tuple[Pending, ...] = ()  # reads for a resize or an update that was cancelled
        self._seats: dict[int, tuple[str, int]] | None = {} if seats else None  # node and GPU of each rank
        self._nodes: dict[int, str] = {}  # the node of each rank, lost ranks included
        self._weights: dict[str, Identity] = {}  # first identity by node; "": of the fleet
        self._changes: dict[int, Mapping[str, Any]] = {}  # how the config of a rank differs from the fleet's
        self._unused: dict[int, Mapping[str, Any]] = {}  # old changes of ranks that do not use new ones yet
        self._open: dict[int, Pending] = {}
        self._calls = self._processes = 0
        self._epoch = first_epoch

    @property
    def size(self) -> int:
        """The number of ranks, away or not."""
        return self.config.num_workers

    @property
    def starting(self) -> bool:
        """Whether any process is still starting."""
        return not self.runs or self.resizing is not None or bool(self.spares) or bool(self.away)

    @property
    def serving(self) -> list[int]:
        """Numbers of the processes that serve."""
        return [process.number for process in list(self.members) if process.started] if self.runs else []

    @property
    def away(self) -> list[Process]:
        """New processes of absent ranks; the other ranks serve without them."""
        return [process for process in list(self.members) if not process.started] if self.runs else []

    # Calls.

    def end_call(self, event: Returned | Failed) -> None:
        """Record the result of a call."""
        pending = self._open.pop(event.call, None)
        if pending is None:
            return  # the process was fenced
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
            elif pending.method == "use_weights":
                process.weights, process.read = self.weights, None
                process.report = {**(process.report or {}), "fingerprint": event.value["fingerprint"]}
                process.setup = {**process.facts, "weights": event.value["weights"]}
            elif pending.method in ("sleep", "wake"):
                process.asleep = self.asleep
                self.freed = self.freed + event.value if self.asleep else 0
            elif pending.method == "wait":
                process.loss = event.value
                if event.value is None:
                    raise RanksLost([process.rank], "it stopped")
        except FleetError as error:
            pending.error = error

    def silent(self, processes: Collection[int], seconds: float) -> None:
        """Note processes that send no heartbeat."""
        for pending in self._open.values():
            if pending.process.number in processes:
                pending.process.silent = seconds

    def check(self) -> None:
        """Raise RanksLost with all ranks when Ray has ended, or Unrecoverable during the first start."""
        if self.ray_ended is not None and not self._reports:
            raise Unrecoverable(f"Ray's {self.ray_ended} has ended while the fleet was starting; start it again")
        if self.ray_ended is not None:
            raise RanksLost(range(self.size), f"Ray's {self.ray_ended} has ended")

    def gather(self, calls: Mapping[int, Pending], timeout: float | None = None) -> Script[dict[int, Any]]:
        """Return the results of one call per rank. Raises RanksLost with the reason of one that failed.

        The first start fails with the first failure. Later, wait for all calls, so that healthy ranks need not repeat
        theirs. Blame a rank that ended or timed out before a rank that misses a peer, because it may be that peer.
        Calls without a `timeout` may take any time while their processes send heartbeats.
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
            raise next((each for each in lost if not each.reported), lost[0])
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
        """Start the setup of a process. It repeats the decisions in the report of the rank's first process."""
        rank, config = process.rank, self.config if plan is None else plan.config
        process.epoch, process.placement = epoch, self.whole if plan is None else plan.placement
        process.weights = self.weights
        if plan is None and self._reports:
            decided = {name: self._reports[rank][name] for name in ("max_model_len", "expert_slots")}
            process.changes = self._changes.get(rank, {})
            config = dataclasses.replace(config, **{**decided, "expert_memory": None, **process.changes})
        spec = {"config": config, "rank": rank, "epoch": epoch, "placement": process.placement, "seat": None}
        spec["weights"] = process.weights
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
            # The node of all ranks was lost. Query every rank's GPU again, because peers store each other's GPU ids.
            raise RanksLost(range(self.size), f"rank {process.rank} has moved to {facts['moved']}")
        process.setup = now = (process.setup or {}) | facts
        self._nodes[process.rank] = now["node"]
        if name := differing(self._weights, now["node"], now["weights"]):
            raise Unrecoverable(
                f"{name} of rank {process.rank} differs from the fleet's: it has changed since it was loaded, and "
                "answers cannot continue with other weights; start moeyard serve again"
            )

    def _load(self, process: Process, ranks_on_host: int) -> Pending:
        process.loading = self._call(process, "load", ranks_on_host)
        return process.loading

    def _fence(self, process: Process) -> None:
        self._emit(Fence(process.number))
        self._forget([process])

    def _forget(self, processes: Collection[Process]) -> None:
        """Fail all open calls to processes that end."""
        for number in [number for number, pending in self._open.items() if pending.process in processes]:
            pending = self._open.pop(number)
            rank = pending.process.rank
            pending.over, pending.error = True, RanksLost([rank], f"rank {rank} was lost")

    def tend(self) -> None:
        """Start the load of absent ranks that are set up, while the others serve."""
        for process in self.away:
            if process.setup is not None and process.loading is None:
                self._load(process, 1)

    def losses(self) -> tuple[dict[int, str], list[dict[str, Any]]]:
        """Return the lost ranks of the running epoch with reasons, and the survivors' reports."""
        lost = {process.rank: str(process.error) for process in self.members if process.error is not None}
        reports = [process.loss for process in self.members if process.loss is not None]
        for report in reports:
            for rank in set(report["ranks"]).intersection(range(self.size)):
                lost.setdefault(rank, report["reason"])
        return lost, reports

    # Epochs.

    def launch(self) -> Script[Recovered]:
        """Create all ranks and bring them to their first step. Raises FleetError that names the first failure."""
        begun = self.now
        self.members = [self._make(rank) for rank in range(self.size)]
        recovered = yield from self._form((self.whole, {}), meet=MEET_SECONDS)
        self._start_seconds = self.now - begun
        self._reports = [rank.report for rank in recovered.ranks]
        return recovered

    def replace(self, dead: Collection[int], *, whole: bool) -> Script[Recovered | None]:
        """Give `dead` ranks new processes and form a new epoch: of all ranks if `whole`, else survivors may take over.

        Returns None if all of them were away, which needs no new epoch. Restarts a private Ray that has ended, with all
        ranks. Raises RanksLost (call again with its ranks), or Unrecoverable if Ray does not restart.
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
        self.updating = None
        self._outside, self._late_readings = (), ()
        self._forget([pending.process for pending in self._open.values()])
        problem = yield StartRay(ended)
        if problem is not None:
            raise Unrecoverable(f"Ray's {ended} has ended, and {problem}")
        self.ray_ended = None

    @property
    def ready(self) -> list[int]:
        """Absent ranks that have loaded their experts."""
        return [process.rank for process in self.away if process.report is not None]

    def admit(self) -> Script[Recovered]:
        """Form an epoch that includes `ready` ranks, between steps. Raises RanksLost: call `replace`."""
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
            self.check()  # the other ranks report a rank that has ended

    def _next_epoch(self) -> int:
        """Return the next epoch's number. 0 means no epoch."""
        self._epoch = self._epoch % (2**31 - 1) + 1
        return self._epoch

    def _form(
        self,
        to: tuple[Placement, Mapping[int, int]] | None,
        *,
        meet: float = REMEET_SECONDS,
        planned: bool = False,
    ) -> Script[Recovered]:
        """Bring every rank of the next epoch from its present state to its first step there.

        `to`: the placement and extra slots by rank; None: decide once losses are known. `planned`: the last epoch was
        ended on purpose.
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
        # A survivor may still be in its step. After a planned end a step may take any time, because peers report a rank
        # that hangs.
        losses = yield from self._hear_losses(math.inf if planned else STALL * self.config.step_deadline + CALL_SECONDS)
        lap("losses")
        yield from self._use_weights()
        placement, slots = to if to is not None else (yield from self._take_over())
        # A rank must finish a load that is under way before it meets others.
        loading = {p.rank: p.loading for p in self.members if p.loading is not None and p.report is None}
        yield from self.gather({rank: call for rank, call in loading.items() if rank in placement.ranks})
        members = {rank: self.members[rank] for rank in placement.ranks}
        new = {r: p.setting_up for r, p in members.items() if p.setup is None and p.setting_up is not None}
        old = {r: self._call(p, "rebind", epoch, placement) for r, p in members.items() if r not in new}
        yield from self.gather(old, patience)
        yield from self.gather(new)
        # Ranks whose setup began in an earlier epoch.
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
        yield from self._change_sleep(members.values())
        if self.paused:
            yield from self.gather({r: self._call(p, "pause") for r, p in members.items()}, patience)
        step = max((process.loss["steps"] for process in members.values() if process.loss is not None), default=0)
        begun = {r: self._call(p, "rejoin" if p.started else "start", step) for r, p in members.items()}
        for rank, process in members.items():
            # Set this before all have started: ranks that have started report those that have not.
            process.started, process.loss, process.wait = True, None, self._call(process, "wait")
            process.has, process.read = placement.experts(rank), None
        self.placed = placement
        yield from self.gather(begun, patience)
        lap("rejoining")
        self.runs = True
        return Recovered(ranks=tuple(map(rank_of, self.members)), losses=losses, seconds=seconds)

    def _use_weights(self) -> Script[None]:
        """Have survivors change to the weights of the fleet. They have read them, and no rank runs a step."""
        behind = [p for p in self.members if p.started and p.weights != self.weights]
        yield from self.gather({p.rank: self._call(p, "use_weights", self.weights) for p in behind})

    def _change_sleep(self, members: Iterable[Process]) -> Script[None]:
        """Have ranks fall asleep or wake up, until all are at the level `asleep`. No rank runs a step."""
        behind = [process for process in members if process.asleep != self.asleep]
        call = ("sleep", self.asleep) if self.asleep else ("wake",)
        yield from self.gather({p.rank: self._call(p, *call) for p in behind})

    def _set_all_up(self, epoch: int) -> None:
        for process in self.members:
            if process.setting_up is None:
                self._set_up(process, epoch)

    def _hear_losses(self, patience: float) -> Script[tuple[dict[str, Any], ...]]:
        """Wait for the loss reports of all started ranks.

        Raises RanksLost for a started rank that ends, is named by another's report, or reports nothing in time.
        """
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
            # Fence a live rank that a peer has named before it meets others again.
            if named_alive := {process.rank for process in started}.intersection(loss["ranks"]):
                raise RanksLost(named_alive, loss["reason"])
        return losses

    def _take_over(self) -> Script[tuple[Placement, Mapping[int, int]]]:
        """Return the placement to serve with, and the extra slots that its ranks may take."""
        survivors = [process for process in self.members if process.started]
        away = {process.rank for process in self.members if not process.started}
        # Sleeping ranks have freed their memory and run no steps.
        if not away or not survivors or self.asleep:
            return self.whole, {}
        return without(
            away,
            mode=self._takeover,
            whole=self.whole,
            before=self.placed,
            rooms=(yield from self._rooms(survivors)),
            nodes=self._nodes,
            reports=self._reports,
            start_seconds=self._start_seconds,
        )

    def _rooms(self, processes: Collection[Process]) -> Script[dict[int, Headroom]]:
        found = yield from self.gather({p.rank: self._call(p, "room") for p in processes}, CALL_SECONDS)
        return {rank: Headroom(**room) for rank, room in found.items()}

    def _meet(self, calls: Mapping[int, Pending], timeout: float) -> Script[None]:
        """Connect all ranks. If ranks miss a peer and none has ended, blame the ranks that have not served yet."""
        try:
            yield from self.gather(calls, timeout)
        except RanksLost as lost:
            fresh = {rank for rank in calls if not self.members[rank].started}
            if not lost.reported or not fresh:
                raise
            raise RanksLost(fresh, str(lost), reported=True) from lost

    # Processes that start while the ranks serve.

    def prepare(self, rank: int, changes: Mapping[str, Any], *, beside: bool) -> None:
        """Apply `changes` (EngineConfig fields) to the rank's next processes. Start one now if `beside`."""
        self.check()
        self._unused[rank] = self._changes.get(rank, {})
        self._changes[rank] = {**self._unused[rank], **changes}
        if beside:
            # Epoch 0: the epoch that it will join is not known yet.
            self.spares[rank] = self._set_up(self._make(rank, beside=True), 0)

    def prepared(self, rank: int) -> bool:
        """Return whether the rank's next process is set up. Raises FleetError if it cannot be."""
        self.check()
        spare = self.spares.get(rank)  # None after a restart of Ray and all ranks
        if spare is not None and spare.error is not None:
            raise spare.error
        return spare is None or spare.setup is not None

    def abandon(self, rank: int) -> None:
        """End the rank's next process. Undo its changes unless they are in use."""
        if (spare := self.spares.pop(rank, None)) is not None:
            self._end([spare])
        if rank in self._unused:
            self._changes[rank] = self._unused.pop(rank)

    def _end(self, processes: Collection[Process]) -> None:
        self._forget(processes)
        self._emit(End(tuple(process.number for process in processes)))

    # Resizing. Nothing takes effect before `resize`.

    def begin_resize(self, size: int) -> Script[bool]:
        """Start new ranks, or have ranks that stay read the experts of ranks that leave.

        Returns False while ranks still read for a cancelled resize: call again. Raises FleetError for an impossible
        size.
        """
        self.check()
        # Report a permanently impossible size before a temporary shortage.
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
        """Return the stage of a resize as text, "" during a liveness check, None when ready. Raises FleetError."""
        self.check()
        resizing = self.resizing
        if resizing is None:
            raise FleetError("Ray has ended, and the new ranks with it")
        coming, plan = resizing.coming, resizing.plan
        if error := first_error(coming.values()):
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
        """Return whether all new ranks have just answered, so that the others may stop for them."""
        if not resizing.asked:
            resizing.asked = {rank: self._call(process, "progress") for rank, process in resizing.coming.items()}
            resizing.limit = self.now + CALL_SECONDS
            return not resizing.asked
        if error := first_error(resizing.asked.values()):
            raise error
        silent = [rank for rank, call in resizing.asked.items() if not call.over]
        if silent and self.now > resizing.limit:
            raise RanksLost(silent, f"worker {silent[0]} has loaded its experts, and does not answer any more")
        resizing.asked = resizing.asked if silent else {}
        return not silent

    def resize(self) -> Script[Recovered]:
        """End the epoch between steps, and form one with the planned number of ranks.

        Raises RanksLost after a rollback to the old size: call `replace`.
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
                # Fence, not End: some may serve already.
                self._fence(process)
            raise RanksLost(error.ranks.intersection(range(self.size)), str(error)) from error
        self._changes = {rank: changes for rank, changes in self._changes.items() if rank < plan.size}
        return recovered

    def end_resize(self) -> None:
        """End ranks that have left, or cancel the resize and end its new ranks. Release their places."""
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

    # New weights.

    def begin_update(self, weights: ServedWeights) -> bool:
        """Have all ranks check and read other weights while they serve. Raises FleetError.

        Returns False while ranks still read for an update that was refused: call again.
        """
        self.check()
        if not all(call.over for call in self._late_readings):
            return False
        self.updating = Updating(weights, {p.rank: self._call(p, "stage_weights", weights) for p in self.members})
        return True

    def update_is_read(self) -> bool:
        """Return whether all ranks have read the new weights. Raises FleetError with the first reason of a rank."""
        self.check()
        updating = self.updating
        assert updating is not None, "an update is under way"
        calls = updating.reading
        if error := first_error(calls.values()):
            raise error
        silent = [call.process for call in calls.values() if not call.over and call.process.silent]
        if silent:
            raise silence(silent)
        if not all(call.over for call in calls.values()):
            return False
        self._identities(updating)
        return True

    def _identities(self, updating: Updating) -> dict[str, Identity]:
        """Return the identity of the new weights by node. Raises FleetError if ranks have read different files."""
        found: dict[str, Identity] = {}
        for rank, call in updating.reading.items():
            if name := differing(found, self._nodes[rank], call.value["weights"]):
                raise FleetError(f"{name} is not the same file for rank {rank} as for rank 0")
        return found

    def update(self) -> Script[Recovered]:
        """End the epoch between steps, and form one in which every rank serves the new weights.

        From the first call on, no rank serves the old ones again: RanksLost means `replace`, whose new processes load
        the new weights.
        """
        updating = self.updating
        assert updating is not None, "all ranks have read the weights"
        self._weights = self._identities(updating)
        self.weights, self.updating = updating.weights, None
        yield from self._end_epoch(f"changing to weights {self.weights}")
        return (yield from self._form((self.whole, {}), planned=True))

    def end_update(self) -> None:
        """Have all ranks forget weights that they have read and do not serve."""
        if self.updating is not None:
            self._late_readings = (*self._late_readings, *self.updating.reading.values())
            self.ask("discard_weights")
        self.updating = None

    def pause(self, *, paused: bool) -> list[Pending]:
        """Have ranks run no steps of their own, or run them again. Return the calls. One fails if its rank is lost."""
        self.paused = paused
        return self.ask("pause" if paused else "resume")

    def sleep(self, level: int) -> Script[Recovered]:
        """End the epoch between steps, and form one in which every rank sleeps at this level, or is awake (0).

        From the first call on there is no way back: RanksLost means `replace`, whose new processes get the same level.
        """
        self.asleep = level
        yield from self._end_epoch("falling asleep" if level else "waking up")
        return (yield from self._form((self.whole, {}), planned=True))

    def ask(self, method: str, *args: Any) -> list[Pending]:
        """Call a method of all ranks of the epoch. Return the calls. One fails if its rank refuses or is lost."""
        return [self._call(process, method, *args) for process in self.members if process.started]

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
            alike = all(p.weights == self.weights for p in self.members if p.started)
            assert alike or self.forming, "an epoch has one set of weights"
            states = {process.asleep for process in self.members if process.started}
            assert states <= {self.asleep} or self.forming, "the ranks of an epoch sleep together"
            started = {process.rank for process in self.members if process.started}
            assert started == set(self.placed.ranks) or self.forming, "the ranks of the epoch serve, and no others"
            assert set(self.placed.ranks) <= set(range(self.size))


def failure(pending: Pending, event: Failed) -> RanksLost:
    """Return the loss of a rank whose call failed, with the rank's own error if there is one."""
    rank, reason, reported = pending.process.rank, event.reason, event.how == "raised"
    if pending.method == "wait" and event.how == "ended":
        reason = f"the process of rank {rank} has ended"
    elif event.how == "ended":
        reason = f"worker {rank} died while starting: {reason}"
    elif event.how == "unrun" and pending.method != "wait":
        reason = f"Ray could not run worker {rank}: {reason}"
    return RanksLost([rank], reason, reported=reported)


def rank_of(process: Process) -> Rank:
    """Return a rank as routers and Prometheus see it."""
    if not process.started:
        return Rank(rank=process.rank, frontend="", metrics_url="", report={})
    facts = process.facts
    return Rank(
        rank=process.rank,
        frontend=facts["frontend"],
        metrics_url=facts["metrics_url"],
        report=process.report or {},
        changes=process.changes,
    )
