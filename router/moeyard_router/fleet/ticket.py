"""The mailbox between the fleet and one HTTP request."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moeyard_router.fleet.instructions import Event
from moeyard_router.fleet.policy import Route
from moeyard_worker.protocol import PromptExperts, PromptLogprobs, Tokens


@dataclass(slots=True)
class Ticket:
    """The sequences of one request, and the mailbox of their events in order of arrival.

    Every sequence gets exactly one terminal event (`Done`, `Rejected`, `Lost` or `Aborted`), unless it is aborted
    first. The request's prompt and max_tokens limit the size of the mailbox. The fleet calls `opened`, `moved`, `put`
    and `read`.
    """

    _abandon: Callable[[str], None]
    _announce: "Callable[[Ticket], None]"  # asks the fleet to call `read` after its other deliveries
    _on_move: Callable[[float, int, int | None], None] | None = None
    routes: list[Route] = field(default_factory=list)  # of every sequence, by index
    _open: dict[int, str] = field(default_factory=dict)  # index -> request id at the worker
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _waiting: asyncio.Future[None] | None = None  # of the only waiter
    _woken: bool = False
    _reader: Callable[[], None] | None = None  # called for tokens instead of waking the waiter
    _announced: bool = False

    async def events(self) -> list[tuple[float, int, Event]]:
        """Wait for events and take all of them: (monotonic seconds, sequence index, event)."""
        if not self._events and not self._woken:
            # asyncio.Event would create such a future for every wait too, plus a queue of waiters.
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._woken = False
        return self.take()

    def take(self) -> list[tuple[float, int, Event]]:
        """Take all events in the mailbox."""
        taken, self._events = self._events, []
        return taken

    async def push(self, reader: Callable[[], None]) -> None:
        """Call `reader` whenever tokens arrive, without waking a task. It may `take` them, or `wake` this waiter.

        Returns when another event arrives, or at once if the mailbox is not empty. Events that were not taken remain.
        """
        if self._events or self._woken:
            return
        self._reader = reader
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._reader = None

    def read(self) -> None:
        """Call the reader, because all announced tokens have arrived."""
        self._announced = False
        if self._reader is not None:
            self._reader()

    def abort(self, index: int) -> None:
        """Abort one sequence and drop its events. Ended sequences are ignored."""
        request_id = self._open.pop(index, None)
        if request_id is not None:
            self._events = [e for e in self._events if e[1] != index]
            self._abandon(request_id)

    def close(self) -> None:
        """Abort all sequences that have not ended."""
        for index in list(self._open):
            self.abort(index)

    def opened(self, index: int, request_id: str, route: Route) -> None:
        """Add sequence `index`, in order of the indices, with its request id and route."""
        self._open[index] = request_id
        self.routes.append(route)

    def moved(self, index: int, route: Route) -> None:
        """Change the route of sequence `index`."""
        self.routes[index] = route
        if self._on_move is not None:
            self._on_move(time.monotonic(), index, route.rank)

    def runs(self, index: int, request_id: str) -> bool:
        """Return whether sequence `index` runs under this request id."""
        return self._open.get(index) == request_id

    def wake(self) -> None:
        """Let a waiting `events` return, even with an empty list."""
        self._woken = True
        self._resume()

    def put(self, now: float, index: int, event: Event) -> None:
        """Deliver an event."""
        self._events.append((now, index, event))
        if isinstance(event, Tokens) and self._reader is not None:
            if not self._announced:
                self._announced = True
                self._announce(self)
            return
        if not isinstance(event, Tokens | PromptLogprobs | PromptExperts):
            self._open.pop(index, None)
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
