"""The fleet on Ray: carries out the fleet machine's instructions and reports events to it.

A private local Ray or a running cluster, one actor per process of a rank. Ray is the control plane only: it places,
starts and watches the workers. Requests, tokens and activations never cross it.
"""

import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from moeyard import __version__, entry
from moeyard.fleet.control import Say
from moeyard.fleet.machine import FleetMachine
from moeyard.fleet.messages import (
    Answered,
    Call,
    Command,
    CommandName,
    End,
    Event,
    Examine,
    Failed,
    Fence,
    Finish,
    FleetError,
    FleetFailed,
    FleetLost,
    HandOver,
    Instruction,
    Make,
    Missed,
    Order,
    Rank,
    RayEnded,
    Refused,
    RenewStandby,
    ReservePlaces,
    Returned,
    Silent,
    StandbyReady,
    StartRay,
    Tell,
    Tick,
    named,
)
from moeyard.fleet.ray.places import PLACEMENT_SECONDS, Places, Standby, apart, ask_pending, never_ran
from moeyard.fleet.ray.processes import RAYLET, Guard, LocalRay, Vitals, fence_process, is_tracker, kill_process
from moeyard.fleet.ray.start import check_reachable, connect, first_line
from moeyard.fleet.routers import RouterProcesses
from moeyard.fleet.weights_api import FleetState
from moeyard.logs import LogConfig
from moeyard.signals import Interrupts
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.membership.shared_files import sweep
from moeyard_worker.keys import FleetKeys

log = logging.getLogger(__name__)

LISTEN_SECONDS = 0.2
STOP_SECONDS = 3.0
# Time limit for leaving Ray. Without an answer of its GCS, Ray's own code waits for minutes, or for ever.
LEAVE_SECONDS = 10.0
# Interval between heartbeat requests to processes with open calls.
ASK_SECONDS = 1.0
# Longest silence of a starting process: in the first start, when files may be cold, and later. An import of torch
# from a cold disk holds the GIL for many seconds, so the later limit is at least the duration of the first start.
FIRST_SIGN_SECONDS, SIGN_SECONDS = 300.0, 60.0


class Stopped(Exception):
    """The fleet stops."""


@dataclass(slots=True, eq=False)
class Actor:
    """The actor of a process. `place`: node, pid and start time of the process, once known. `beside`: see `Make`.

    `begun`: whether Ray was seen to have started a process that has given no sign yet. `pending`: the open question
    whether it has.
    """

    handle: Any
    rank: int
    beside: bool = False
    begun: bool = False
    place: Mapping[str, Any] | None = None
    asked_at: float | None = None
    answered: bool = True
    pending: Future[bool] | None = None


class RayFleet:
    """Owns the Ray session and the actors. Life: construct, `start`, `serve`, `stop`, which leaves no process behind.

    `failure` is set once the fleet has failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        log: LogConfig,
        *,
        address: str | None,
        worker_host: str | None,
        metrics_port_base: int,
        cluster_wait: float = 0.0,
        keys: FleetKeys,
        placement: Placement,
        takeover: str = "auto",
        standby: int | None = None,
        device: str = "",
        model_name: str = "",
        limit: int = 3,
        window: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings without starting anything.

        `standby`: number of standby processes; None: one on GPUs, where starts take longest. `device`: the workers'
        device in messages (default: that of `config`). `model_name` labels the workers' metrics. `limit`: losses of a
        rank within `window` seconds that fail the fleet.
        """
        self._config, self._address, self._cluster_wait, self._clock = config, address, cluster_wait, clock
        self._device, self._metrics_port_base = device or config.device, metrics_port_base
        self._common = {
            "keys": keys.of_worker(),
            "log": log,
            "host": worker_host if worker_host or address else "127.0.0.1",
            "version": __version__,
            "model_name": model_name,
        }
        self._places = Places(config, local=address is None)
        # In a cluster a process without a place has no node and no GPU, so no standbys.
        few = int(config.device != "cpu") if standby is None else standby
        self._standby = Standby(self._places.standby, few if address is None else 0)
        self._machine = FleetMachine(
            config,
            placement=placement,
            takeover=takeover,
            limit=limit,
            window=window,
            standby=self._standby.count > 0,
            fixed_ports=metrics_port_base > 0,
            seats=self._places.gpus > 0,
            first_epoch=secrets.randbits(31),
        )
        self._local, self._vitals = LocalRay(), Vitals()
        # All use of Ray goes through the guard.
        self.guard = Guard(self._local, starting=lambda: self._machine.ranks.starting, serving=self._serving)
        self._check: Callable[[], None] = self._check_stop
        self._actors: dict[int, Actor] = {}
        self._refs: dict[Any, tuple[int, Call | None]] = {}  # open calls with their processes; None: heartbeat
        self._patience = FIRST_SIGN_SECONDS
        self._renewed = False  # whether the machine waits for renewed standbys
        self._placing: tuple[float, tuple[int, ...]] | None = None  # deadline for the places of new ranks
        self._ended: str | None = None  # the daemon whose end was reported
        self._ranks: list[Rank] | None = None
        self._routers: RouterProcesses | None = None
        self._missed: queue.SimpleQueue[Missed] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._words: dict[int, queue.SimpleQueue[str | Finish]] = {}
        self._numbers, self._lock, self._closed = itertools.count(), threading.Lock(), ""
        self.failure: str | None = None

    def start(
        self, progress: Callable[[int, int], None], *, stage: Callable[[str], None], interrupts: Interrupts
    ) -> list[Rank]:
        """Start Ray and all ranks; `progress(done, total)` gets the bytes loaded over all ranks, `stage` what begins.

        `interrupts` are looked at between calls of Ray, and end the start by KeyboardInterrupt.

        Raises FleetError when Ray, the placement or a worker cannot start.
        """
        self._check = interrupts.check
        if self._address is not None:
            check_reachable(self._address)
        stage("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        with interrupts.at_once():
            connect(self._address, num_workers=self._config.num_workers, stage=stage)
        self._local.find()
        self._check()
        if self._address is None:
            self.guard.watch()
        workers = f"{self._config.num_workers} worker{'s' if self._config.num_workers > 1 else ''}"
        stage(f"starting {workers}, device {self._device}")
        begun = self._clock()
        try:
            with self.guard.call():
                self._places.reserve(wait=self._cluster_wait, stage=stage, check=self._check)
            while self._ranks is None:
                self.turn()
                self._check()
                self._tell_progress(progress)
        finally:
            # From here on only `stop` ends the fleet.
            self._check = self._check_stop
        self._patience = max(SIGN_SECONDS, self._clock() - begun)
        return self._ranks

    def serve(self, routers: RouterProcesses) -> None:
        """Watch the fleet in a thread, with these routers in front of it."""
        self._routers = routers
        self.guard.on_stuck = routers.give_up
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def lost(self, rank: int, reason: str) -> None:
        """Note that a router has lost a rank for good. From any thread."""
        self._missed.put(Missed(rank, reason))

    def command(
        self,
        name: CommandName,
        say: Say,
        **fields: Any,
    ) -> str:
        """Run an operator's command to its end and return its final text. From any thread but the fleet's.

        fields: of `Command`. Raises Refused.
        """
        words: queue.SimpleQueue[str | Finish] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise Refused(self._closed)
            number = next(self._numbers)
            self._words[number] = words
        self._asked.put(Command(number=number, name=name, **fields))
        while isinstance(word := words.get(), str):
            say(word)
        if word.exit_code is not None:
            raise Refused(word.text, word.exit_code)
        return word.text

    def state(self) -> FleetState:
        """Return what trainers may know. From any thread."""
        ranks, ended = self._machine.ranks, bool(self._closed) or self._machine.failure is not None
        return FleetState(weights=ranks.weights, paused=ranks.paused, asleep=ranks.asleep, size=ranks.size, ended=ended)

    def _close(self, reason: str) -> None:
        """Refuse all commands, also those under way."""
        with self._lock:
            self._closed = self._closed or reason
            for words in self._words.values():
                words.put(Finish(0, self._closed, 1))

    def _check_stop(self) -> None:
        if self.guard.stopping.is_set():
            raise Stopped

    def _run(self) -> None:
        try:
            while self.failure is None:
                self.turn()
        except Stopped:
            return
        except Exception as error:  # boundary: an unwatched fleet must not look healthy
            log.exception("the supervisor failed")
            self._give_up(FleetFailed(f"{type(error).__name__}: {error}", 1))

    def turn(self) -> None:
        """Wait briefly for events and report them."""
        for event in (*self._events(), Tick()):
            self._handle(event)

    def _events(self) -> list[Event]:
        before, ended = self._ended, self._local.ended()
        self._ended = ended
        if ended is not None:
            # Ray no longer answers, or will stop soon.
            return [RayEnded(ended, ended == RAYLET)] if ended != before else self._hear(headless=True)
        return self._hear()

    def _hear(self, *, headless: bool = False) -> list[Event]:
        """Return finished calls, routers' losses and operators' commands as events."""
        events: list[Event] = []
        for said in (self._missed, self._asked):
            while not said.empty():
                events.append(said.get())
        with self.guard.call():
            self._check_stop()
            if headless and self._ended == RAYLET:
                return events
            refs = list(self._refs)
            if not refs:
                time.sleep(LISTEN_SECONDS)
                return events
            # One at a time: its instructions may end others.
            for ref in ray.wait(refs, num_returns=1, timeout=0 if events else LISTEN_SECONDS)[0]:
                events += self._end_of(ref)
            self._vitals.look(self._pids(self._actors.values()))
            return [*events, *self._ask_for_signs(), *self._late()]

    def _end_of(self, ref: Any) -> list[Event]:
        process, call = self._refs.pop(ref)
        actor = self._actors[process]
        try:
            value = ray.get(ref)
        except RayError as error:
            # A failed heartbeat counts as an answer: other calls report the end of the process.
            actor.answered = True
            if call is not None and self._may_wait(actor) and never_ran(error):
                return self._make_again(process, call)
            return [] if call is None else [failed(call, error)]
        if call is None or (call.method == "setup" and "pid" in value):
            actor.place, actor.answered = value, True
        return [] if call is None else [Returned(call.number, value)]

    def _may_wait(self, actor: Actor) -> bool:
        """Return whether a process of a serving fleet has not begun, so that it may wait for a host of the cluster."""
        known = self._address is not None and self._ranks is not None and actor.rank < self._machine.ranks.size
        return known and actor.place is None and not actor.beside

    def _make_again(self, process: int, call: Call) -> list[Event]:
        """Replace an actor whose host was lost before it ran. Ray starts the new one once a host has room."""
        rank = self._actors[process].rank
        log.warning("rank %d waits for a host: Ray has lost the one on which its process was to start", rank)
        self._refs = {ref: each for ref, each in self._refs.items() if each[0] != process}
        try:
            self._actors[process] = Actor(self._places.actor(rank), rank)
            self._call(call)
        except RayError as error:
            return [failed(call, error)]
        return []

    def _ask_for_signs(self) -> list[Event]:
        """Send heartbeat requests to processes with open calls, each a second after its last answer."""
        now, silent = self._clock(), set()
        for process in {process for process, call in self._refs.values() if call is not None and call.watched}:
            actor = self._actors[process]
            if actor.asked_at is None or (actor.answered and now - actor.asked_at >= ASK_SECONDS):
                actor.asked_at, actor.answered = now, False
                self._refs[actor.handle.alive.remote()] = process, None
            elif now - actor.asked_at > self._patience:
                if not self._may_wait(actor) or actor.begun:
                    silent.add(process)
                    continue
                actor.pending = actor.pending or ask_pending(actor.handle)
                if not actor.pending.done():
                    continue
                # The time of a process counts from when Ray has started it.
                actor.asked_at, actor.begun, actor.pending = now, not actor.pending.result(), None
                if not actor.begun:
                    log.warning("rank %d waits for a host: the one of its last process is gone, or full", actor.rank)
        return [Silent(frozenset(silent), self._patience)] if silent else []

    def _late(self) -> list[Event]:
        """Return events of standbys and places that the machine waits for."""
        events: list[Event] = []
        # On CPUs the start of a standby would slow a recovery. A GPU rank's graph capture leaves CPU time for it.
        if self._config.device != "cpu" or self._ranks is None or not self._machine.ranks.starting:
            self._standby.fill()
        if self._renewed:
            try:
                self._renewed = not self._standby.ready()
                events += [] if self._renewed else [StandbyReady(None)]
            except RayError as error:
                self._renewed = False
                events.append(StandbyReady(first_line(getattr(error, "cause", None) or error)))
        if self._placing is not None and self._clock() > self._placing[0]:
            late, self._placing = self._places.waits(self._placing[1]), None
            reason = f"the Ray cluster has no place for {named(late)}; stop what else runs there"
            calls = [call for process, call in self._refs.values() if call and self._actors[process].rank in late]
            events += [Failed(call.number, reason, "unplaced") for call in calls if call.method == "setup"]
        return events

    def _handle(self, event: Event) -> None:
        events = deque([event])
        while events:
            for instruction in self._machine.handle(events.popleft(), self._clock()):
                try:
                    found = self._carry_out(instruction)
                except RayError as error:
                    found = self._not_done(instruction, error)
                if found is not None:
                    events.append(found)

    def _not_done(self, instruction: Instruction, error: RayError) -> Event | None:
        if isinstance(instruction, Call):
            return failed(instruction, error)
        if isinstance(instruction, Examine | ReservePlaces | StartRay):
            return Answered(first_line(error))
        log.warning("Ray could not carry out %s: %s", instruction, first_line(error))
        return None

    def _carry_out(self, instruction: Instruction) -> Event | None:
        """Carry out an instruction. Returns the answer to its question, or the failure of its call."""
        match instruction:
            case Order():
                assert self._routers is not None, "commands come when routers serve"
                count = self._routers.ordered(instruction.order)
                return Answered(count) if instruction.answered else None
            case HandOver():
                self._hand_over(instruction)
                return None
            case Tell() | Finish():
                self._answer(instruction)
                return None
            case FleetFailed():
                self._give_up(instruction)
                return None
        with self.guard.call():
            self._check_stop()
            match instruction:
                case Make(process, rank, beside):
                    found = None if beside else self._standby.take()
                    self._actors[process] = Actor(found or self._places.actor(rank, beside=beside), rank, beside)
                case Call():
                    return self._call(instruction)
                case Fence(process):
                    self._fence(process)
                case End(processes):
                    self._end_all(processes)
                    self._places.give_back_from(self._machine.ranks.size)
                    self._placing = None
                case Examine(process):
                    pids = self._pids([self._actors[process]]) if process in self._actors else []
                    return Answered(self._vitals.describe(pids[0]) if pids else None)
                case ReservePlaces(ranks, size):
                    if (problem := self._places.extend(ranks, size)) is None:
                        self._placing = self._clock() + PLACEMENT_SECONDS, ranks
                    return Answered(problem)
                case RenewStandby():
                    self._standby.stop()
                    self._renewed = self._standby.count > 0
                case StartRay():
                    return Answered(self._start_again())
        return None

    def _call(self, call: Call) -> Event | None:
        actor = self._actors.get(call.process)
        if actor is None:
            return Failed(call.number, "it could not be made", "unrun")
        args = call.args
        if call.method == "setup":
            base = self._metrics_port_base
            args = ({**args[0], **self._common, "metrics_port": base + actor.rank if base else 0},)
        own = call.method in ("seat", "setup")
        made = getattr(actor.handle, call.method).remote(*args) if own else actor.handle.do.remote(call.method, *args)
        self._refs[made] = call.process, call
        return None

    def _fence(self, process: int) -> None:
        """Kill a process, even a stopped one, so that it cannot disturb others when it resumes."""
        self._refs = {ref: each for ref, each in self._refs.items() if each[0] != process}
        if (actor := self._actors.pop(process, None)) is not None:
            ray.kill(actor.handle)
            if actor.place is not None:
                fence_process(actor.place["node"], actor.place["pid"], actor.place["began"])

    def _end_all(self, processes: Collection[int]) -> None:
        """Let processes release their shared memory within a time limit, then end them."""
        setups = [ref for ref, (p, call) in self._refs.items() if p in processes and call and call.method == "setup"]
        self._refs = {ref: each for ref, each in self._refs.items() if each[0] not in processes}
        actors = [actor.handle for p in processes if (actor := self._actors.pop(p, None)) is not None]
        for waits in setups, [actor.do.remote("stop") for actor in actors]:
            if waits:
                ray.wait(waits, num_returns=len(waits), timeout=STOP_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _pids(self, actors: Collection[Actor]) -> list[int]:
        """Return the pids of those processes that run on this host."""
        here = ray.get_runtime_context().get_node_id() if any(actor.place for actor in actors) else None
        return [actor.place["pid"] for actor in actors if actor.place is not None and actor.place["node"] == here]

    def _serving(self) -> set[int]:
        """Return the pids of the serving ranks."""
        actors = [self._actors.get(process) for process in self._machine.ranks.serving]
        return {actor.place["pid"] for actor in actors if actor is not None and actor.place is not None}

    def _start_again(self) -> str | None:
        """End a private Ray and start a new one without ranks. Returns the reason of a failure, or None."""
        # Drop references to the old Ray's actors first.
        self._standby.stop(kill=False)
        self._local.kill()
        places = [actor.place for actor in self._actors.values() if actor.place is not None]
        self._actors, self._refs, self._ended = {}, {}, None
        for place in places:
            kill_process(place["pid"], place["began"])
        try:
            ray.shutdown()
            connect(self._address, num_workers=self._config.num_workers, stage=log.warning)
            self._local.find()
            self._places.reserve(wait=0.0, stage=lambda text: None, check=self._check)
        except (ValueError, RayError) as error:
            self._check_stop()
            return first_line(error)
        return None

    def _tell_progress(self, progress: Callable[[int, int], None]) -> None:
        """Query the progress of loading ranks and pass the sums to `progress`."""
        loads = [self._actors[process.number].handle for process in self._machine.ranks.members if process.loading]
        if loads:
            with self.guard.call(), contextlib.suppress(RayError):  # boundary: the load itself fails, too
                found = ray.get([actor.do.remote("progress") for actor in loads], timeout=STOP_SECONDS)
                progress(sum(done for done, _ in found), sum(total for _, total in found))

    def _hand_over(self, new: HandOver) -> None:
        # Routers' reports concern ranks that have been replaced.
        while not self._missed.empty():
            self._missed.get()
        self._ranks = list(new.ranks)
        if self._routers is not None:
            self._routers.hand_over(new.ranks, new.drained, new.incident)

    def _answer(self, word: Tell | Finish) -> None:
        with self._lock:
            words = self._words.get(word.command)
            if isinstance(word, Finish):
                self._words.pop(word.command, None)
        if words is not None:
            words.put(word if isinstance(word, Finish) else word.text)

    def _give_up(self, end: FleetFailed) -> None:
        if self._routers is None:
            raise (FleetLost if end.exit_code == 1 else FleetError)(end.reason)
        self.failure = end.reason
        self._close(f"the fleet has failed: {end.reason}")
        self._routers.give_up(end.reason)

    def stop(self) -> None:
        """Stop the actors and leave Ray (a private one ends with its processes). Safe to call twice.

        Ends the whole process, with code 1, if a call of Ray's never returns.
        """
        self._close("the server is stopping")
        # The thread notices at its next check. Wait for it: a call after `shutdown` would start another Ray.
        with self.guard.end():
            self._end()

    def _leave(self) -> None:
        if ray.is_initialized():
            self._places.close()
        # This also ends processes of an interrupted ray.init.
        ray.shutdown()

    def _end(self) -> None:
        children = psutil.Process().children(recursive=True)
        if ray.is_initialized():
            self._standby.stop()
            self._end_all([*self._actors])
        if self._local.ended() is not None:
            # Ray's own shutdown would wait for its dead daemon forever.
            self._local.kill()
        # Repeat while Ray lives: it may have been starting a rank's process.
        children = [*{*children, *psutil.Process().children(recursive=True)}]
        trackers = [process for process in children if is_tracker(process)]
        try:
            apart(self._leave).result(LEAVE_SECONDS)
        except TimeoutError:
            log.warning("Ray has not answered for %g s; moeyard serve ends without it", LEAVE_SECONDS)
            self._local.kill()
            entry.unclean.set()
        # Ray's agents would notice the end only half a minute later.
        _, alive = psutil.wait_procs([p for p in children if p not in trackers], timeout=STOP_SECONDS)
        for process in (*alive, *trackers):
            with contextlib.suppress(psutil.NoSuchProcess):  # boundary: it ended meanwhile
                process.kill()
        # Wait: processes hold ports and memory until they are gone.
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        # Ranks killed before they connected leave shared-memory names on this host.
        sweep()


def failed(call: Call, error: RayError) -> Failed:
    """Return how a call failed."""
    if isinstance(error, RayTaskError):
        return Failed(call.number, first_line(error.cause or error), "raised")
    return Failed(call.number, first_line(error), "ended" if isinstance(error, RayActorError) else "unrun")
