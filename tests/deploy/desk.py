"""A supervisor and its upkeep over a fleet that a test plays, and routers of so many sequences."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tests.limits import HANG_SECONDS

from moeyard.rank import Event
from moeyard.supervisor import Supervisor
from moeyard.upkeep import Refused, Upkeep
from moeyard_router.fleet.orders import UNKNOWN, Drain

F = TypeVar("F")


class Desk(Generic[F]):
    """Supervisor, upkeep, and routers that have `held` sequences per rank; all is noted in the fleet's `log`."""

    def __init__(self, fleet: F, size: int, *, held: int, limit: int = 3) -> None:
        self.now = 100.0
        self.fleet: Any = fleet
        self.held = dict.fromkeys(range(8), held)
        self.whole = True
        self.orders: list[Drain] = []
        self.handed: list[tuple[int, dict[str, Any]]] = []
        self.given_up: list[str] = []
        self.upkeep = Upkeep(self.fleet, size, order=self._order, clock=lambda: self.now)
        self.supervisor = Supervisor(
            self.fleet,
            replace=lambda ranks, incident: self.handed.append((len(ranks), incident)),
            give_up=self.given_up.append,
            limit=limit,
            clock=lambda: self.now,
            upkeep=self.upkeep,
        )

    def _order(self, order: Drain) -> int:
        self.orders.append(order)
        if order.size is not None:
            self.fleet.log.append(("paused", order.size))
            return UNKNOWN
        if order.leaves:
            self.fleet.log.append(("leaves", order.rank))
        if not self.whole and not order.leaves:
            return UNKNOWN
        if order.carry:
            self.fleet.log.append(("carry", order.rank))
            self.held[order.rank] = 0
        return self.held[order.rank]

    def turn(self, *events: Event) -> None:
        """A round of the supervisor's thread."""
        self.fleet.heard.append(list(events))
        self.supervisor.turn()

    def begin(self, command: Callable[[list[str]], str]) -> "Asked":
        """Give a command from a thread of its own, up to the moment when it waits."""
        asked = Asked(command)
        while self.upkeep._errand is None and asked.thread.is_alive():
            asked.thread.join(0.001)
        return asked


class Asked:
    """A command under way: what it has said, and its end."""

    def __init__(self, command: Callable[[list[str]], str]) -> None:
        self.said: list[str] = []
        self._end: queue.SimpleQueue[str | Refused] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._end.put(command(self.said))
            except Refused as error:
                self._end.put(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> str | Refused:
        return self._end.get(timeout=HANG_SECONDS)
