"""The mailbox between the fleet and one HTTP request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moeyard_router.fleet.instructions import Event
from moeyard_router.fleet.policy import Route
from moeyard_worker.protocol import PromptLogprobs, Tokens


@dataclass(slots=True)
class Ticket:
    """The sequences of one request and the mailbox of their events, in order of arrival.

    Every sequence gets exactly one terminal event (`Done`, `Rejected` or `Lost`) unless it is aborted first.
    The mailbox is bounded by the request's own prompt and max_tokens.
    """

    _abandon: Callable[[str], None]
    _announce: "Callable[[Ticket], None]"  # to the fleet, which calls `read` once it has delivered all that it has
    routes: list[Route] = field(default_factory=list)  # of every sequence, in order
    _open: dict[int, str] = field(default_factory=dict)  # index -> request id at the worker
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _waiting: asyncio.Future[None] | None = None  # of the only waiter
    _woken: bool = False
    _reader: Callable[[], None] | None = None  # called for tokens instead of waking the waiter
    _announced: bool = False

    async def events(self) -> list[tuple[float, int, Event]]:
        """Wait for events and take them all: (monotonic seconds, sequence index, event)."""
        if not self._events and not self._woken:
            # A future is what asyncio.Event would make for every wait, without its queue of others who wait.
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._woken = False
        return self.take()

    def take(self) -> list[tuple[float, int, Event]]:
        """Take the events that are there."""
        taken, self._events = self._events, []
        return taken

    async def push(self, reader: Callable[[], None]) -> None:
        """Have `reader` called whenever tokens have come: no task is woken for them. It may `take` them or `wake` us.

        Returns when something else has come, with whatever was not taken still there, or is there to begin with.
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
        """For the fleet: tokens that were announced are all here."""
        self._announced = False
        if self._reader is not None:
            self._reader()

    def abort(self, index: int) -> None:
        """Stop one sequence and free its place at the worker; no further events of it. Ended ones are ignored."""
        request_id = self._open.pop(index, None)
        if request_id is not None:
            self._events = [e for e in self._events if e[1] != index]
            self._abandon(request_id)

    def close(self) -> None:
        """Abort whatever still runs."""
        for index in list(self._open):
            self.abort(index)

    def opened(self, index: int, request_id: str, route: Route) -> None:
        """For the fleet: sequence `index` (they come in order) runs under this id where `route` says."""
        self._open[index] = request_id
        self.routes.append(route)

    def moved(self, index: int, route: Route) -> None:
        """For the fleet: sequence `index` goes on where `route` says."""
        self.routes[index] = route

    def runs(self, index: int, request_id: str) -> bool:
        """Whether sequence `index` runs under this id."""
        return self._open.get(index) == request_id

    def wake(self) -> None:
        """Let a waiting `events` return, if only with an empty list."""
        self._woken = True
        self._resume()

    def put(self, now: float, index: int, event: Event) -> None:
        """For the fleet: deliver an event."""
        self._events.append((now, index, event))
        if isinstance(event, Tokens) and self._reader is not None:
            if not self._announced:
                self._announced = True
                self._announce(self)
            return
        if not isinstance(event, Tokens | PromptLogprobs):
            self._open.pop(index, None)
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
