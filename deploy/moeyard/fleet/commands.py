"""Operator commands of a running fleet: drain, undrain, rolling restart, scale, pause, update of the weights, sleep.

One command runs at a time. A loss goes first, and a command pauses until the fleet has recovered. Pure.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moeyard.fleet.messages import (
    Command,
    Finish,
    FleetError,
    Instruction,
    Order,
    RanksLost,
    Refused,
    RenewStandby,
    Tell,
)
from moeyard.fleet.ranks import Pending, Ranks, Script, first_error
from moeyard_router.fleet.orders import UNKNOWN, Cancel, Drain, Forget, Hold
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.protocol import FIRST_VERSION


class GivenBack(FleetError):
    """The operator cancels the command."""


class RankReplaced(FleetError):
    """A rank of the command was lost and has been replaced."""


@dataclass(slots=True)
class Task:
    """A command under way. `rank` drains or restarts now, `done` ranks are finished, `leaving` ranks drain to leave.

    `drained`: ranks that were drained before the command. `committed`: it is too late to cancel. `thrown` is raised in
    the script at the next tick. `since`: when leaving ranks began to drain; `left`: their last known sequence count.
    """

    command: Command
    began: float
    rank: int | None = None
    done: tuple[int, ...] = ()
    leaving: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    committed: bool = False
    thrown: FleetError | None = None
    since: float = 0.0
    left: int = UNKNOWN


class Commands:
    """The commands of a fleet: `take` a command, `resume` the current one, `close`.

    `recover(rank)` replaces a rank on purpose. `switch()` changes to the prepared size, `update()` to the weights that
    all ranks have read, and `sleep(level)` to another level of sleep. They return whether the fleet continues; `switch`
    raises FleetError if it continues with the old size. `beside`: a rank's next process can start while the rank
    serves. `standby`: spare processes have imported everything.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        emit: Callable[[Instruction], None],
        recover: Callable[[int], Script[bool]],
        switch: Callable[[], Script[bool]],
        update: Callable[[], Script[bool]],
        sleep: Callable[[int], Script[bool]],
        beside: bool,
        standby: bool,
    ) -> None:
        self._ranks, self._emit, self._recover, self._switch, self._update_all = ranks, emit, recover, switch, update
        self._sleep_all = sleep
        self._beside, self._standby = beside, standby
        self._standby_ready, self._standby_problem = True, ""
        self.drained: frozenset[int] = frozenset()  # ranks that take no new requests
        self._num_updates = 0
        self._closed: str | None = None
        self.task: Task | None = None
        self._script: Script[str]

    @property
    def script(self) -> Script[str] | None:
        """The script of the command under way."""
        return None if self.task is None else self._script

    def take(self, command: Command) -> None:
        """Begin a command, or finish it at once."""
        try:
            text = self._begin(command)
        except Refused as error:
            self._emit(Finish(command.number, str(error), error.exit_code))
            return
        if text is not None:
            self._emit(Finish(command.number, text))

    def resume(self, value: int | str | None) -> Instruction | None:
        """Continue the command with the answer to its question, if any. Returns its next question."""
        task = self.task
        assert task is not None, "a command is under way"
        thrown, task.thrown = task.thrown, None
        try:
            return self._script.send(value) if thrown is None else self._script.throw(thrown)
        except StopIteration as end:
            self._finish(task, str(end.value), None)
        except Refused as error:
            self._finish(task, str(error), error.exit_code)
        return None

    def standby_is_ready(self, problem: str | None) -> None:
        """Note that the renewed standby processes have started, or why they cannot."""
        self._standby_ready, self._standby_problem = True, problem or ""

    def replaced(self, ranks: frozenset[int]) -> None:
        """Tell the current command that these ranks were lost and have new processes."""
        task = self.task
        if task is None or task.committed or not ranks:
            return
        if task.leaving or (task.command.name == "restart" and task.rank in ranks):
            task.thrown = RankReplaced()
        elif task.command.name == "update":
            task.thrown = RankReplaced(f"{listed(sorted(ranks))} was lost before all ranks had read the new weights")

    def failed(self, rank: int) -> None:
        """Note that the rank's new process failed to start. The next one gets the old flags."""
        self._ranks.abandon(rank)
        if self.task is not None:
            self._say(self.task, f"rank {rank}: its new process failed; another starts with the flags as before")

    def close(self, reason: str) -> None:
        """Refuse the current command and all later ones."""
        self._closed = reason
        if self.task is not None:
            self._finish(self.task, reason, 1)

    def validate(self) -> None:
        """Assert all invariants."""
        everyone = frozenset(range(self._ranks.size))
        assert self.drained <= everyone or self._ranks.forming, "drained ranks are ranks"
        assert self.task is None or self._closed is None, "nothing is carried out after the end"
        if self._closed is None:
            name = None if self.task is None else self.task.command.name
            assert self._ranks.updating is None or name == "update", "weights come by a command"
            assert self._ranks.resizing is None or name == "scale", "ranks come by a command"
            assert not self._ranks.spares or name == "restart", "next processes come by a command"

    def _begin(self, command: Command) -> str | None:
        """Begin the task of a command, or return the text of one that finishes at once. Raises Refused."""
        size, task = self._ranks.size, self.task
        for rank in command.ranks:
            if not 0 <= rank < size:
                raise Refused(f"there is no rank {rank}; this server has {listed(range(size))}", 2)
        if command.name == "undrain":
            return self._undrain(command.ranks[0])
        if command.name == "drain" and not set(range(size)) - self.drained - set(command.ranks):
            rank = command.ranks[0]
            raise Refused(
                f"no other rank than {rank} takes requests; `moeyard restart --worker {rank}` lets them wait meanwhile",
                2,
            )
        version = "" if command.weights is None else command.weights.version
        if version and version in (self._ranks.weights.version, FIRST_VERSION):
            raise Refused(f"other weights have the weight_version '{version}'; choose another name", 2)
        if command.name == "scale":
            if command.size < 1:
                raise Refused("a fleet has one worker at least; to end it, end `moeyard serve`", 2)
            resizes = task is not None and task.command.name == "scale"
            if command.size == size and not resizes:
                return f"there are {counted(size)} already"
            if command.size == size and task is not None and not task.committed:
                task.thrown = GivenBack("given up")
                return f"{counted(size)}, as before: going on with {task.command.size} is given up"
            if not set(range(command.size)) - self.drained:
                raise Refused(f"none of {listed(range(command.size))} takes requests; see `moeyard undrain`", 2)
        if self._closed is not None:
            raise Refused(self._closed)
        if command.name == "cancel":
            self._emit(Order(Cancel(names=command.names), answered=False))
            return "aborted"
        if command.name == "resume" and task is not None and task.command.name == "pause" and not task.committed:
            task.thrown = GivenBack("given up by /resume")
            return "resumed"
        if task is None or task.command.name not in ("sleep", "wake"):
            if command.name == "sleep" and command.level <= self._ranks.asleep:
                return f"asleep at level {self._ranks.asleep}"
            if command.name == "wake" and not self._ranks.asleep:
                return "awake"
        if self._ranks.asleep and command.name in ("restart", "scale", "checksum"):
            raise Refused(f"the server sleeps; wake it up before a {command.name}")
        if command.name in ("pause", "resume") and self._ranks.paused == (command.name == "pause"):
            return "paused" if self._ranks.paused else "resumed"
        if task is not None:
            raise Refused(f"busy: {doing(task)}, for {self._ranks.now - task.began:.0f} s; wait for its end")
        scripts = {"drain": self._drain, "restart": self._restart, "scale": self._scale}
        scripts |= {"pause": self._pause, "resume": self._resume, "update": self._update, "checksum": self._checksum}
        scripts |= {"flush": self._flush, "sleep": self._sleep, "wake": self._wake}
        first = (command.ranks or (0,))[0] if command.name in ("drain", "restart") else None
        self.task = Task(command, self._ranks.now, first)
        self._script = scripts[command.name](self.task)
        next(self._script)  # up to its first wait, where it can be cancelled
        return None

    def _finish(self, task: Task, text: str, exit_code: int | None) -> None:
        if self.task is task:
            self.task = None
            self._emit(Finish(task.command.number, text, exit_code))

    def _say(self, task: Task, text: str) -> None:
        self._emit(Tell(task.command.number, text))

    def _order(self, rank: int = 0, *, carry: bool = False, leaves: bool = False, size: int | None = None) -> Order:
        drained = tuple(sorted(self.drained))
        return Order(Drain(ranks=drained, rank=rank, carry=carry, leaves=leaves, size=size))

    def _release(self, rank: int) -> None:
        """Let a rank take requests again."""
        self.drained -= {rank}
        self._emit(Order(self._order(rank).order, answered=False))

    def _undrain(self, rank: int) -> str:
        task = self.task
        self.drained -= {rank}
        if task is not None and not task.committed and (rank == task.rank or rank in task.leaving):
            task.thrown = GivenBack(f"rank {rank} was given back by `moeyard undrain`")
        else:
            self._release(rank)
        return f"rank {rank} takes requests"

    def _settle(self, task: Task, rank: int) -> Script[None]:
        """Wait until routers are connected to the whole fleet."""
        waits = False
        while (yield self._order(rank)) == UNKNOWN:
            if not waits:
                self._say(task, "waiting for the fleet to be whole")
            waits = True
            yield None

    def _empty(self, task: Task, rank: int) -> Script[None]:
        """Drain a rank until it has no sequences or its time is over."""
        self.drained |= {rank}
        since, before = self._ranks.now, UNKNOWN
        while left := (yield self._order(rank)):
            if left != UNKNOWN and before == UNKNOWN:
                self._say(task, f"rank {rank} takes no new requests, and has {left}")
            before = left if left != UNKNOWN else before
            if left != UNKNOWN and self._ranks.now - since >= task.command.seconds:
                stays = yield self._order(rank, carry=True)
                if stays != UNKNOWN:
                    self._say(task, f"rank {rank}: {left - stays} of its {left} requests go on elsewhere")
                    return
            yield None
        if before == UNKNOWN:
            self._say(task, f"rank {rank} takes no new requests, and has 0")

    def _drain(self, task: Task) -> Script[str]:
        rank = task.command.ranks[0]
        try:
            yield None
            yield from self._settle(task, rank)
            yield from self._empty(task, rank)
        except GivenBack as error:
            self._release(rank)
            raise Refused(f"{error}; it goes on as it was") from error
        return (
            f"rank {rank} is drained: it computes its experts for the others and takes no requests until "
            f"`moeyard undrain --worker {rank}` or `moeyard restart --worker {rank}`"
        )

    def _restart(self, task: Task) -> Script[str]:
        ranks = task.command.ranks or tuple(range(self._ranks.size))
        for rank in ranks:
            task.rank, task.committed = rank, False
            try:
                yield None
                yield from self._restart_rank(task, rank)
            except FleetError as error:
                self._ranks.abandon(rank)
                self._release(rank)
                if not isinstance(error, RankReplaced):
                    starts = f"the next process of rank {rank} does not start: {error}"
                    why = error if isinstance(error, GivenBack) else starts
                    before = f"; {listed(task.done)} restarted before" if task.done else ""
                    raise Refused(f"{why}; it goes on as it was{before}") from error
                self._say(task, f"rank {rank} was lost, and is replaced")
            task.done = (*task.done, rank)
        return f"{listed(ranks)} restarted in {self._ranks.now - task.began:.1f} s"

    def _restart_rank(self, task: Task, rank: int) -> Script[None]:
        yield from self._settle(task, rank)
        # Standby processes may hold older code than the disk.
        self._emit(RenewStandby())
        self._standby_ready, self._standby_problem = not self._standby, ""
        self._ranks.prepare(rank, task.command.changes, beside=self._beside)
        if self._beside or self._standby:
            self._say(task, f"rank {rank}: its next process starts")
        while not (self._ranks.prepared(rank) if self._beside else self._standby_ready):
            yield None
            self._ranks.check()
        if self._standby_problem and not self._beside:
            raise RanksLost([rank], self._standby_problem)
        yield from self._empty(task, rank)
        yield self._order(rank, leaves=True)
        self.drained -= {rank}
        task.committed, now = True, self._ranks.now
        if (yield from self._recover(rank)):
            self._say(task, f"rank {rank} is restarted, {self._ranks.now - now:.1f} s without steps")

    def _pause(self, task: Task) -> Script[str]:
        try:
            yield None
            yield from self._settle(task, 0)
            yield from self._quiet(task, task.command.mode)
        except GivenBack as error:
            self._start_requests()
            raise Refused(f"the pause was {error}") from error
        task.committed = True
        yield from self._answers(self._ranks.pause(paused=True))
        return "paused"

    def _resume(self, task: Task) -> Script[str]:
        task.committed = True
        yield None
        yield from self._answers(self._ranks.pause(paused=False))
        self._start_requests()
        return "resumed"

    def _answers(self, calls: Sequence[Pending]) -> Script[None]:
        """Wait for calls. The call of a lost rank fails, and the rank's next process starts in the same state."""
        while not all(call.over for call in calls):
            yield None

    def _quiet(self, task: Task, mode: Literal["abort", "wait", "keep"]) -> Script[int]:
        """Start no more requests. Unless they are kept, wait until all that have started are over.

        Return how many have started and are not over.
        """
        said, left = False, UNKNOWN
        while (left := (yield Order(Hold(mode=mode)))) and (mode != "keep" or left == UNKNOWN):
            if left != UNKNOWN and not said:
                self._say(task, f"{left} requests are {'aborted' if mode == 'abort' else 'running to their ends'}")
                said = True
            yield None
        return left

    def _update(self, task: Task) -> Script[str]:
        weights, mode, held = task.command.weights, task.command.mode, False
        assert weights is not None, "an update names its weights"
        if not weights.version:
            number = self._num_updates + 1
            # An operator may have used this number as a name.
            number += self._ranks.weights.version == str(number)
            weights = replace(weights, version=str(number))
        try:
            yield None
            yield from self._settle(task, 0)
            while not self._ranks.begin_update(weights):
                yield None
            self._say(task, f"all ranks begin to read {weights}")
            while not self._ranks.update_is_read():
                yield None
            # During a pause nothing runs, and the pause has decided about the requests.
            if not (self._ranks.paused or self._ranks.asleep) and mode != "keep":
                held = True
                yield from self._quiet(task, mode)
            yield Order(Hold(mode="keep", switches=True))
        except FleetError as error:
            self._ranks.end_update()
            if held:
                self._start_requests()
            raise Refused(f"{error}; the old weights remain in service", getattr(error, "exit_code", 1)) from error
        task.committed, now = True, self._ranks.now
        self._num_updates += 1
        if not (yield from self._update_all()):
            return ""
        if not self._ranks.paused:
            self._start_requests()
        seconds = self._ranks.now - now
        return f"all ranks serve {weights} after {self._ranks.now - task.began:.1f} s, {seconds:.1f} s without steps"

    def _checksum(self, task: Task) -> Script[str]:
        """Return each rank's digests of its weights, as JSON."""
        yield None
        yield from self._settle(task, 0)
        calls = self._ranks.ask("weight_checksums")
        yield from self._answers(calls)
        if error := first_error(calls):
            raise Refused(f"the weights could not be read: {error}") from error
        return json.dumps([call.value for call in calls])

    def _sleep(self, task: Task) -> Script[str]:
        """Free memory on all ranks in one epoch. Nothing may run, unless the server is paused."""
        level, mode = task.command.level, task.command.mode
        try:
            yield None
            yield from self._settle(task, 0)
            if not (self._ranks.paused or self._ranks.asleep):
                left = yield from self._quiet(task, mode)
                if left:
                    raise Refused(f"{left} requests run; pause the server or end them before it sleeps")
            yield from self._ready(self._ranks.ask("check_sleep", level))
            yield Order(Hold(mode="keep", switches=True, asleep=level))
        except (FleetError, Refused) as error:
            if not (self._ranks.paused or self._ranks.asleep):
                self._start_requests()
            raise Refused(str(error), getattr(error, "exit_code", 1)) from error
        task.committed = True
        if not (yield from self._sleep_all(level)):
            return ""
        return f"asleep at level {level}, all ranks have freed {format_size(self._ranks.freed)}"

    def _wake(self, task: Task) -> Script[str]:
        """Allocate the memory again on all ranks in one epoch."""
        yield None
        yield from self._settle(task, 0)
        yield from self._ready(self._ranks.ask("check_wake"))
        yield Order(Hold(mode="keep", switches=True, asleep=self._ranks.asleep))
        task.committed, now = True, self._ranks.now
        if not (yield from self._sleep_all(0)):
            return ""
        self._emit(Order(Hold(mode="keep" if self._ranks.paused else None, asleep=0), answered=False))
        return f"awake after {self._ranks.now - now:.1f} s"

    def _ready(self, calls: Sequence[Pending]) -> Script[None]:
        """Wait for calls that ask ranks whether they are able to change. Raises Refused with the first reason."""
        yield from self._answers(calls)
        if error := first_error(calls):
            raise Refused(str(error), 1) from error

    def _flush(self, task: Task) -> Script[str]:
        """Drop the prefix caches of all ranks. As in SGLang, nothing may run or wait."""
        yield None
        yield from self._settle(task, 0)
        while (left := (yield Order(Cancel()))) == UNKNOWN:
            yield None
        if left:
            raise Refused(f"{left} requests run or wait; the prefix caches are dropped when nothing does")
        yield from self._answers(self._ranks.ask("forget_prefixes"))
        self._emit(Order(Forget(), answered=False))
        return "flushed"

    def _start_requests(self) -> None:
        """Let routers start requests again."""
        self._emit(Order(Hold(mode=None), answered=False))

    def _scale(self, task: Task) -> Script[str]:
        size, before = task.command.size, self._ranks.size
        try:
            while True:
                try:
                    yield from self._prepare_resize(task, size)
                    break
                except RankReplaced:
                    # Start again: the new process must read its experts, too.
                    self._ranks.end_resize()
            yield self._order(size=size)
            task.committed, now = True, self._ranks.now
            if not (yield from self._switch()):
                return ""
        except FleetError as error:
            self._ranks.end_resize()
            self.drained -= task.leaving - task.drained
            self._emit(Order(self._order().order, answered=False))
            reason = f"{error}; the fleet goes on with {counted(self._ranks.size)}"
            raise Refused(reason, getattr(error, "exit_code", 1)) from error
        self._say(task, f"going on with {counted(size)}, {self._ranks.now - now:.1f} s without steps")
        self.drained = self.drained.intersection(range(size))
        return f"{counted(size)} in place of {before}, after {self._ranks.now - task.began:.1f} s"

    def _prepare_resize(self, task: Task, size: int) -> Script[None]:
        """Prepare a new size while the ranks serve, and drain the ranks that leave."""
        yield None
        yield from self._settle(task, 0)
        while not (yield from self._ranks.begin_resize(size)):
            yield None
            yield from self._settle(task, 0)
        if size < self._ranks.size and not task.leaving:
            task.leaving, task.since = frozenset(range(size, self._ranks.size)), self._ranks.now
            task.drained, self.drained = self.drained, self.drained | task.leaving
        shown: str | None = None
        while True:
            stage = self._ranks.resize_stage()
            if stage and stage != shown:
                self._say(task, stage)
            shown = stage
            empty = yield from self._emptied(task, ready=stage is None)
            if empty and stage is None and (yield self._order()) != UNKNOWN:
                return
            yield None

    def _emptied(self, task: Task, *, ready: bool) -> Script[bool]:
        """Return whether leaving ranks have no sequences. After their time, once `ready`, move the rest elsewhere."""
        leaving = sorted(task.leaving)
        left = yield from self._held(leaving, carry=False)
        if left == UNKNOWN:
            return False
        if leaving and task.left == UNKNOWN:
            takes, has = ("takes", "has") if len(leaving) == 1 else ("take", "have")
            self._say(task, f"{listed(leaving)} {takes} no new requests, and {has} {left}")
        task.left = left
        if not left:
            return True
        if self._ranks.now - task.since < task.command.seconds or not ready:
            return False
        stay = yield from self._held(leaving, carry=True)
        if stay == UNKNOWN:
            return False
        self._say(task, f"{left - stay} of {left} requests go on at ranks that stay")
        task.left = stay
        return True

    def _held(self, ranks: Sequence[int], *, carry: bool) -> Script[int]:
        """Return the number of sequences at these ranks, or UNKNOWN."""
        held = []
        for rank in ranks:
            held.append((yield self._order(rank, carry=carry)))
        return UNKNOWN if UNKNOWN in held else sum(held)


def listed(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def counted(size: int) -> str:
    """Format a number of workers for a sentence."""
    return "one worker" if size == 1 else f"{size} workers"


def doing(task: Task) -> str:
    """Describe a task in a sentence."""
    names = {"pause": "the server pauses", "resume": "the server resumes", "update": "the weights are being updated"}
    names |= {"checksum": "the weights are being read", "flush": "the prefix caches are being dropped"}
    names |= {"sleep": "the server falls asleep", "wake": "the server wakes up"}
    if task.command.name in names:
        return names[task.command.name]
    if task.command.name == "scale":
        return f"the fleet is to have {counted(task.command.size)}"
    rank = task.rank if task.rank is not None else next(iter(task.command.ranks), 0)
    return f"rank {rank} is being {'drained' if task.command.name == 'drain' else 'restarted'}"
