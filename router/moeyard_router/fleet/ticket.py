"""The mailbox between the fleet and one HTTP request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moeyard_router.fleet.policy import Route
from moeyard_worker.protocol import Done, PromptLogprobs, Rejected, Tokens


@dataclass(frozen=True, slots=True)
class Lost:
    """The terminal event of a sequence that no worker will end any more."""

    reason: str


Event = PromptLogprobs | Tokens | Done | Rejected | Lost


@dataclass(slots=True)
class Ticket:
    """The sequences of one request and the mailbox of their events, in order of arrival.

    Every sequence gets exactly one terminal event (`Done`, `Rejected` or `Lost`) unless it is aborted first.
    The mailbox is bounded by the request's own prompt and max_tokens.
    """

    _abandon: Callable[[str], None]
    routes: list[Route] = field(default_factory=list)  # of every sequence, in order
    _open: dict[int, str] = field(default_factory=dict)  # index -> request id at the worker
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _waiting: asyncio.Future[None] | None = None  # of whoever waits, who is one
    _woken: bool = False

    async def events(self) -> list[tuple[float, int, Event]]:
        """Wait for events and take them all: (monotonic seconds, sequence index, event)."""
        if not self._events and not self._woken:
            # A future is what asyncio.Event would make for every wait, without its queue of others who wait.
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._woken = False
        taken, self._events = self._events, []
        return taken

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
        """For the fleet: sequence `index` runs under this id where `route` says, or waits; they come in order first."""
        self._open[index] = request_id
        if index < len(self.routes):
            self.routes[index] = route
        else:
            self.routes.append(route)

    def runs(self, index: int, request_id: str) -> bool:
        """Whether sequence `index` runs under this id."""
        return self._open.get(index) == request_id

    def wake(self) -> None:
        """Let a waiting `events` return, if only with an empty list."""
        self._woken = True
        self._resume()

    def put(self, now: float, index: int, event: Event) -> None:
        """For the fleet: deliver an event."""
        if not isinstance(event, Tokens | PromptLogprobs):
            self._open.pop(index, None)
        self._events.append((now, index, event))
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
