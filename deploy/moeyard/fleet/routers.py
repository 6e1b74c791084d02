"""The router processes in front of one fleet. They share one port and stop together."""

import dataclasses
import logging
import math
import multiprocessing
import queue
import signal
import socket
import threading
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
from moeyard_router.fleet.orders import UNKNOWN, Drain, FleetOrder, Hold
from moeyard_router.http.process import (
    GiveUp,
    Obeyed,
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

# A router that ends by itself is restarted, at most three times a minute.
_LIMIT, _WINDOW_SECONDS = 3, 60.0
# Time limit for a router's exit, beyond the grace of its streams. A stopped router receives no message.
_END_SECONDS = 10.0
# Time limit for the answer to an order. The caller asks a busy router again.
ORDER_SECONDS = 5.0
_log = logging.getLogger(__name__)


def addresses(ranks: Sequence[Rank], drained: Collection[int] = ()) -> tuple[WorkerAddress, ...]:
    """Return the router's addresses of these ranks. `drained` ranks take no new requests."""
    return tuple(
        WorkerAddress(
            rank=r.rank,
            endpoint=r.frontend,
            metrics_url=r.metrics_url or None,
            draining=r.rank in drained,
            changes=tuple((name.replace("_", "-"), value) for name, value in sorted(r.changes.items())),
        )
        for r in ranks
    )


def run_logged(config: RouterConfig, seat: Seat, pipe: Connection, log: LogConfig | None) -> None:
    """Run a router process with the launcher's log format."""
    if log is not None:
        logs.start(log, context=log_context)
    run_router_process(config, seat, pipe)


class _Router:
    """One router process, its pipe, and its state as last reported."""

    def __init__(self, config: RouterConfig, seat: Seat, log: LogConfig | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.seat = seat
        self.ready = False
        self.replacing = False
        self.answer: int | None = 0  # its answer to the last order, None: none yet
        self.owed = 0  # answers to orders outstanding; a busy router answers late, but in order
        self.process: BaseProcess = context.Process(
            target=run_logged, args=(config, seat, theirs, log), name=f"router-{seat.index}", daemon=True
        )
        # Ctrl-C in a terminal also reaches the new process before it installs its handlers, so block signals. Start the
        # tracker first: its own start would unblock them.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        theirs.close()

    def say(self, message: Replace | FleetOrder | GiveUp | Stop) -> None:
        """Send a message. A process that has ended misses it; `RouterProcesses` notices the exit separately."""
        try:
            self.pipe.send(message)
            self.owed += isinstance(message, FleetOrder)
        except (BrokenPipeError, ConnectionResetError):
            self.replacing, self.answer = False, self.answer or 0


class RouterProcesses:
    """`count` routers with one config. Same callbacks as `RouterServer`, with `run` in place of `serve`.

    Every router has its own connections to all workers and admits by the workers' reports. A request ends with the
    router that accepted it. `sock` is bound to the port and reserves it without listening. `on_lost` is called once per
    lost worker, even if several routers lose it. `failure` is set when the fleet fails or the restarts are used up.
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
        self._lost: set[str] = set()  # endpoints already passed to `on_lost`
        self._budget = RestartBudget(_LIMIT, _WINDOW_SECONDS)
        self._routers: list[_Router] = []
        self._heard, self._tell = multiprocessing.Pipe(duplex=False)
        # Several threads write to the pipe, in several writes per message. A handler of signals may interrupt one.
        self._telling = threading.RLock()
        self._then: Callable[[], None] | None = None
        self._answered: Callable[[int], None] | None = None
        self._stopping = False
        self._until = math.inf  # when remaining routers are killed

    def replace_workers(
        self,
        workers: tuple[WorkerAddress, ...],
        then: Callable[[], None],
        incident: Mapping[str, Any] | None = None,
    ) -> None:
        """As `RouterServer.replace_workers`; `then` is called when all routers have them. From any thread."""
        self._then = then
        self._tell_loop(Replace(workers, incident))

    def hand_over(self, ranks: Sequence[Rank], drained: Collection[int], incident: Mapping[str, Any] | None) -> None:
        """Have all routers continue with these ranks of a new epoch. From any thread."""
        self.replace_workers(addresses(ranks, drained), lambda: None, incident)

    def ordered(self, order: FleetOrder) -> int:
        """Return the sum of all routers' answers to an order, or UNKNOWN. Blocks: not for the thread of `run`."""
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.obey(order, answers.put)
        try:
            return answers.get(timeout=ORDER_SECONDS)
        except queue.Empty:
            return UNKNOWN

    def obey(self, order: FleetOrder, then: Callable[[int], None]) -> None:
        """As `RouterServer.obey`; `then` gets the sum over all routers. From any thread, one order at a time."""
        self._answered = then
        self._tell_loop(order)

    def give_up(self, reason: str) -> None:
        """As `RouterServer.give_up`: `run` returns. From any thread."""
        self._tell_loop(GiveUp(reason))

    def stop(self) -> None:
        """Begin a graceful shutdown; a second call ends open streams at once. From any thread.

        A router that has not exited `_END_SECONDS` after the grace of its streams is killed.
        """
        self._tell_loop(Stop())

    @property
    def stopping(self) -> bool:
        """Whether the routers shut down."""
        return self._stopping

    def _tell_loop(self, message: Replace | FleetOrder | GiveUp | Stop) -> None:
        """Hand a message to the thread of `run`. From any thread."""
        with self._telling:
            self._tell.send(message)

    def run(self) -> None:
        """Run until `stop`, SIGINT, SIGTERM or SIGHUP (main thread only), then shut down gracefully."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, on_signal) for number in ending_signals()}
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
        """Wait for the next event and handle it."""
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
                continue  # its exit was noticed in this turn
            elif isinstance(source, Connection):
                self._take(router)
            else:
                self._ended(router)

    def _told(self, message: Replace | FleetOrder | GiveUp | Stop) -> None:
        if isinstance(message, Replace):
            self._lost.clear()
            self._config = dataclasses.replace(self._config, workers=message.workers)
        elif isinstance(message, FleetOrder):
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

    def _order(self, order: FleetOrder) -> None:
        """Send the order to all routers, and note it for routers that start later."""
        if isinstance(order, Hold):
            held = self._config.held if order.switches else order.mode is not None
            asleep = self._config.asleep if order.asleep is None else order.asleep
            self._config = dataclasses.replace(self._config, held=held, asleep=asleep)
        elif isinstance(order, Drain):
            workers = tuple(dataclasses.replace(w, draining=w.rank in order.ranks) for w in self._config.workers)
            self._config = dataclasses.replace(self._config, workers=workers)
        for router in self._routers:
            router.answer = None
            router.say(order)
        self._all_answered()

    def _all_answered(self) -> None:
        counts = [router.answer for router in self._routers]
        if self._answered is not None and None not in counts:
            then, self._answered = self._answered, None
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
        elif isinstance(message, Obeyed):
            router.owed -= 1
            if not router.owed:
                router.answer = message.sequences
                self._all_answered()

    def _take_loss(self, loss: WorkerLost) -> None:
        """Report each loss once. Ignore a worker that has been replaced since."""
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
        self._all_answered()
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
