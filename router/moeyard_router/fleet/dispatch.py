"""Sequences on their way to a rank: chosen, counted, sent."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from moeyard_router.fleet.flights import MOST_DEATHS, Flight, Flights
from moeyard_router.fleet.members import Members
from moeyard_router.fleet.placement import Placement
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.waiters import Waiters
from moeyard_router.fleet.worker_state import has_room, loads
from moeyard_worker.protocol import Abort

_SOON_SECONDS = 0.02
# How long the fleet must have been whole before a request runs whose next lost worker would be its last.
CALM_SECONDS = 3.0


class Dispatch:
    """Gives sequences that wait to ranks, by the policy, and takes them back.

    `waits` is told why when a sequence finds no rank at all: it waits for the fleet.
    """

    def __init__(
        self,
        members: Members,
        flights: Flights,
        waiters: Waiters,
        *,
        prefix_caching: bool,
        waits: Callable[[str], None],
    ) -> None:
        self.members = members
        self.flights = flights
        self.waiters = waiters
        self._prefix_caching = prefix_caching
        self._waits = waits
        self._times_whole = 0
        self._placement = Placement(len(members.addresses), prefix_caching=prefix_caching)

    async def read(self, prompts: Iterable[Sequence[int]]) -> None:
        """What `send` wants to know of prompts, one in a turn of the event loop: a long one takes half a ms."""
        known = loads(self.members.workers)
        for prompt in prompts if known and self._prefix_caching else ():
            self._placement.read(prompt, known[0].page_size)
            await asyncio.sleep(0)

    def take(self, now: float, flights: Sequence[Flight], rank: int | None, *, whole: bool) -> None:
        """Send a new request, or let it wait for its turn; one for a `rank` does not wait. `whole`: the fleet runs."""
        if rank is None and (self.waiters.num_sequences or not whole or not self.has_room()):
            self.waiters.push(now, flights)
            return
        for flight in flights:
            self.waiters.started(now, flight)
            self.send(flight, rank)

    def has_room(self) -> bool:
        """Whether a rank takes one more of those that wait for their turn."""
        places = self.waiters.worker_places
        return any(has_room(worker, places) for worker in self.members.workers)

    def drain(self) -> None:
        """Send those whose turn it is while a rank has room for them."""
        now = time.monotonic()
        while self.has_room() and (flights := self.waiters.pop(now)):
            for flight in flights:
                self.send(flight)
        if self.waiters.num_sequences and not self.members.any_usable():
            self._waits(self.members.unready() or "no worker takes requests")

    def send(self, flight: Flight, rank: int | None = None) -> None:
        """Give one that waits to the rank that the policy chooses, or to `rank`; if none can be used it still waits."""
        if rank is None:
            known = loads(self.members.workers, self.waiters.worker_places)
            route = self._placement.choose(known, flight.prompt, client=flight.client)
        else:
            route = Route(rank=rank, reason="asked")
        if route is None or route.rank is None:
            self._waits(self.members.unready() or "no worker takes requests")
            return
        if route.rank in flight.left:
            # What that rank says of it might be of the time before, until it has said that this is over.
            self.again(flight, _SOON_SECONDS)
            return
        assert flight.ticket is not None, "somebody listens to what waits"
        self.flights.place(flight, route.rank, route.cached_tokens)
        flight.ticket.moved(flight.index, route)
        self.members.workers[route.rank].link.send(flight.submit())

    def again(self, flight: Flight, seconds: float) -> None:
        """A rank will not have it: another may, after so many seconds."""
        self.flights.unplace(flight)
        if not seconds:
            self.send(flight)
            return

        def send() -> None:
            flight.pauses = False
            if self.flights.by_name.get(flight.name) is flight and flight.rank is None:
                self.send(flight)

        flight.pauses = True
        asyncio.get_running_loop().call_later(seconds, send)

    def resume(self, waiting: Iterable[Flight]) -> None:
        """The fleet is whole: send those that wait.

        A request with one loss left waits for CALM_SECONDS. Workers that are lost one after the other, for a reason of
        their own, do not end it then. If it is what kills them, it meets the last one as late as that.
        """
        self._times_whole += 1
        for flight in waiting:
            if flight.deaths < MOST_DEATHS - 1:
                self.send(flight)
            else:
                self._send_when_calm(flight, self._times_whole)

    def _send_when_calm(self, flight: Flight, time_whole: int) -> None:
        def send() -> None:
            here = self.flights.by_name.get(flight.name) is flight and flight.rank is None
            # A fleet that is not whole resumes later, and then it waits again.
            if here and time_whole == self._times_whole and self.members.unready() is None:
                flight.pauses = False
                self.send(flight)

        flight.pauses = True
        asyncio.get_running_loop().call_later(CALM_SECONDS, send)

    def carry(self, flight: Flight, *, whole: bool) -> None:
        """Take it from its rank, which runs, and give it to another; if the fleet is not `whole` it waits for that."""
        self.abort(flight)
        assert flight.rank is not None, f"{flight.name} is at no rank"
        flight.left |= {flight.rank}
        self.flights.unplace(flight)
        if whole:
            self.send(flight)

    def abort(self, flight: Flight) -> None:
        """Tell its rank, if it has one, to stop it."""
        if flight.rank is not None:
            self.members.workers[flight.rank].link.send(Abort(request_id=flight.name))

    def forget(self, ranks: Iterable[int]) -> None:
        """Other workers are at these ranks now."""
        self._placement.forget(ranks)
