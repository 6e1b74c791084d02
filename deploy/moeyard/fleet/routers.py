"""The routers before one fleet: a process each, one port, one end."""

import dataclasses
import logging
import math
import multiprocessing
import queue
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from moeyard import logs
from moeyard.fleet.decisions import RestartBudget
from moeyard.fleet.messages import Rank
from moeyard.last_resort import ENDING
from moeyard.logs import LogConfig
from moeyard.signals import ending_signals
from moeyard_router.api.request_scope import log_context
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.orders import UNKNOWN, Drain
from moeyard_router.http.process import (
    Drained,
    GiveUp,
    Ready,
    Replace,
    Replaced,
    Seat,
    SharedAddress,
    Stop,
    WorkerLost,
    run_router_process,
)
from moeyard_worker.exchange.membership.shared_files import Folder

# A router that ends by itself is started again: three times a minute, then it is no accident.
_LIMIT, _WINDOW_SECONDS = 3, 60.0
# What a router takes to end, beyond what its streams are given. One that stands still hears of no end.
_END_SECONDS = 10.0
# Routers have so long to take an order; one that is busy for longer is asked again.
ORDER_SECONDS = 5.0
_log = logging.getLogger(__name__)


def addresses(ranks: Sequence[Rank], drained: Collection[int] = ()) -> tuple[WorkerAddress, ...]:
    """Return where a router finds these ranks, some of which take no new requests."""
    return tuple(
        WorkerAddress(rank=r.rank, endpoint=r.frontend, metrics_url=r.metrics_url or None, draining=r.rank in drained)
        for r in ranks
    )


def run_logged(config: RouterConfig, seat: Seat, pipe: Connection, log: LogConfig | None) -> None:
    """The life of a process: its log lines are as the others'."""
    if log is not None:
        logs.start(log, context=log_context)
    run_router_process(config, seat, pipe)


class _Router:
    """One process, the pipe to it, and what it has said."""

    def __init__(self, config: RouterConfig, seat: Seat, log: LogConfig | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.seat = seat
        self.ready = False
        self.replacing = False
        self.drained: int | None = 0  # what it said to the last `Drain`, None: nothing yet
        self.owed = 0  # answers to `Drain`s: one that is busy answers late, but in turn
        self.process: BaseProcess = context.Process(
            target=run_logged, args=(config, seat, theirs, log), name=f"router-{seat.index}", daemon=True
        )
        # Ctrl-C in a terminal reaches it too, before it can say that it does not listen. (The tracker, started with the
        # first process, would unblock what is blocked here.)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        theirs.close()

    def say(self, message: Replace | Drain | GiveUp | Stop) -> None:
        """Nothing is heard by a process that has ended; `RouterProcesses` notices that by itself."""
        try:
            self.pipe.send(message)
            self.owed += isinstance(message, Drain)
        except (BrokenPipeError, ConnectionResetError):
            self.replacing, self.drained = False, self.drained or 0


class RouterProcesses:
    """`count` routers of one config, which stand in `RouterServer`'s place: same callbacks, `run` instead of `serve`.

    Every router has its own connections to the workers, sees the whole fleet, and admits by what the workers say; a
    request lives and dies with the router that took it. `sock` is bound to the port, does not listen, and keeps it.
    `on_lost` is called once per lost worker, however many routers lose it. `failure` is set when the fleet was given
    up, or routers ended by themselves more often than they are started again.
    """

    def __init__(
        self,
        config: RouterConfig,
        sock: socket.socket,
        *,
        count: int,
        on_ready: Callable[[], None],
        on_lost: Callable[[int, str], None],
        log: LogConfig | None = None,
    ) -> None:
        self._log = log
        self.failure: str | None = None
        self._config = config
        self._sock = sock
        self._count = count
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_lost = on_lost
        self._lost: set[str] = set()  # endpoints that were told
        self._budget = RestartBudget(_LIMIT, _WINDOW_SECONDS)
        self._routers: list[_Router] = []
        self._heard, self._tell = multiprocessing.Pipe(duplex=False)
        self._then: Callable[[], None] | None = None
        self._drained: Callable[[int], None] | None = None
        self._stopping = False
        self._until = math.inf  # when those are killed that have not ended by then

    def replace_workers(
        self,
        workers: tuple[WorkerAddress, ...],
        then: Callable[[], None],
        incident: Mapping[str, Any] | None = None,
    ) -> None:
        """As `RouterServer.replace_workers`; `then` is called when all routers have them. From any thread."""
        self._then = then
        self._tell.send(Replace(workers, incident))

    def hand_over(self, ranks: Sequence[Rank], drained: Collection[int], incident: Mapping[str, Any] | None) -> None:
        """Have all routers continue with these ranks of a new epoch. From any thread."""
        self.replace_workers(addresses(ranks, drained), lambda: None, incident)

    def ordered(self, order: Drain) -> int:
        """Return the sum of what all routers answer to an order, or UNKNOWN. Waits, in another thread than theirs."""
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.drain(order, answers.put)
        try:
            return answers.get(timeout=ORDER_SECONDS)
        except queue.Empty:
            return UNKNOWN

    def drain(self, order: Drain, then: Callable[[int], None]) -> None:
        """As `RouterServer.drain`; `then` gets the sum over all routers. From any thread, one order at a time."""
        self._drained = then
        self._tell.send(order)

    def give_up(self, reason: str) -> None:
        """As `RouterServer.give_up`: `run` returns. From any thread."""
        self._tell.send(GiveUp(reason))

    def stop(self) -> None:
        """Begin an orderly end; a second call ends open streams at once. From any thread.

        A router that is still there `_END_SECONDS` after its streams had to end is killed.
        """
        self._tell.send(Stop())

    def run(self) -> None:
        """Until `stop`, SIGINT, SIGTERM or SIGHUP (which only the main thread hears), then to an orderly end."""

        def heard(signum: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, heard) for number in ending_signals()}
        folder = Folder()
        try:
            self._routers = [
                _Router(self._config, self._seat(i, Path(folder.path)), self._log) for i in range(self._count)
            ]
            while self._routers:
                self._turn()
        finally:
            for router in self._routers:
                router.process.kill()
                router.process.join()
            folder.remove()
            self._sock.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _seat(self, index: int, directory: Path) -> Seat:
        return Seat(
            index=index,
            count=self._count,
            address=SharedAddress.of(self._sock),
            directory=directory,
        )

    def _turn(self) -> None:
        """Take whatever happens next."""
        sources: dict[Any, _Router | None] = {self._heard: None}
        sources |= {router.pipe: router for router in self._routers}
        sources |= {router.process.sentinel: router for router in self._routers}
        if time.monotonic() >= self._until:
            self._until = math.inf
            for late in self._routers:
                _log.error("router %d does not end; its process is killed", late.seat.index)
                late.process.kill()
        timeout = None if math.isinf(self._until) else max(0.0, self._until - time.monotonic())
        for source in wait(list(sources), timeout):
            router = sources[source]
            if router is None:
                self._told(self._heard.recv())
            elif router not in self._routers:
                continue  # its end was noticed in this turn
            elif isinstance(source, Connection):
                self._take(router)
            else:
                self._ended(router)

    def _told(self, message: Replace | Drain | GiveUp | Stop) -> None:
        if isinstance(message, Replace):
            self._lost.clear()
            self._config = dataclasses.replace(self._config, workers=message.workers)
        elif isinstance(message, Drain):
            self._order(message)
            return
        else:
            grace = 0.0 if self._stopping else self._config.shutdown_grace
            self._stopping = True
            self._until = min(self._until, time.monotonic() + grace + _END_SECONDS)
            self.failure = self.failure or (message.reason if isinstance(message, GiveUp) else None)
        for router in self._routers:
            router.replacing = isinstance(message, Replace)
            router.say(message)

    def _order(self, order: Drain) -> None:
        """All routers take it, and those that are started later know of it."""
        workers = tuple(dataclasses.replace(w, draining=w.rank in order.ranks) for w in self._config.workers)
        self._config = dataclasses.replace(self._config, workers=workers)
        for router in self._routers:
            router.drained = None
            router.say(order)
        self._all_drained()

    def _all_drained(self) -> None:
        counts = [router.drained for router in self._routers]
        if self._drained is not None and None not in counts:
            then, self._drained = self._drained, None
            then(UNKNOWN if UNKNOWN in counts else sum(count or 0 for count in counts))

    def _take(self, router: _Router) -> None:
        try:
            message = router.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._ended(router)
            return
        if isinstance(message, Ready):
            router.ready = True
            if self._on_ready is not None and all(each.ready for each in self._routers):
                on_ready, self._on_ready = self._on_ready, None
                on_ready()
        elif isinstance(message, WorkerLost):
            self._take_loss(message)
        elif isinstance(message, Replaced):
            router.replacing = False
            self._replaced()
        elif isinstance(message, Drained):
            router.owed -= 1
            if not router.owed:
                router.drained = message.sequences
                self._all_drained()

    def _take_loss(self, loss: WorkerLost) -> None:
        """Pass on what no other router has told; a worker that was replaced meanwhile is nobody's loss."""
        if loss.endpoint not in self._lost and loss.endpoint in {w.endpoint for w in self._config.workers}:
            self._lost.add(loss.endpoint)
            self._on_lost(loss.rank, loss.reason)

    def _replaced(self) -> None:
        if self._then is not None and not any(router.replacing for router in self._routers):
            then, self._then = self._then, None
            then()

    def _ended(self, router: _Router) -> None:
        router.process.join()
        self._routers.remove(router)
        router.pipe.close()
        self._replaced()
        self._all_drained()
        if self._stopping:
            return
        _log.error(
            "router %d ended by itself (exit code %s); its requests are lost",
            router.seat.index,
            router.process.exitcode,
        )
        if self._budget.take(time.monotonic()):
            config = dataclasses.replace(self._config, restarted=self._on_ready is None)
            self._routers.append(_Router(config, router.seat, self._log))
            return
        self.failure = f"routers ended {_LIMIT + 1} times in {_WINDOW_SECONDS:g} s"
        _log.error("%s; restart moeyard serve", self.failure)
        self._told(Stop())
