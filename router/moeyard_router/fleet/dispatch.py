"""Sequences on their way to a rank: chosen, counted, sent."""

import asyncio
from collections.abc import Iterable, Sequence

from moeyard_router.fleet.flights import Flight, Flights
from moeyard_router.fleet.members import Members
from moeyard_router.fleet.placement import Placement
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.worker_state import loads
from moeyard_worker.protocol import Abort


class Dispatch:
    """Gives sequences that wait to ranks, by the policy, and takes them back."""

    def __init__(self, members: Members, flights: Flights, *, prefix_caching: bool) -> None:
        self._members = members
        self._flights = flights
        self._prefix_caching = prefix_caching
        self._placement = Placement(len(members.addresses), prefix_caching=prefix_caching)

    async def read(self, prompts: Iterable[Sequence[int]]) -> None:
        """What `send` wants to know of prompts, one in a turn of the event loop: a long one takes half a ms."""
        known = loads(self._members.workers)
        for prompt in prompts if known and self._prefix_caching else ():
            self._placement.read(prompt, known[0].page_size)
            await asyncio.sleep(0)

    def send(self, flight: Flight, rank: int | None = None) -> bool:
        """Give one that waits to the rank that the policy chooses, or to `rank`; False if none can be used."""
        if rank is None:
            route = self._placement.choose(loads(self._members.workers), flight.prompt, client=flight.client)
        else:
            route = Route(rank=rank, reason="asked")
        if route is None or route.rank is None:
            return False
        assert flight.ticket is not None, "somebody listens to what waits"
        self._flights.place(flight, route.rank, route.cached_tokens)
        flight.ticket.moved(flight.index, route)
        self._members.workers[route.rank].link.send(flight.submit())
        return True

    def abort(self, flight: Flight) -> None:
        """Tell its rank, if it has one, to stop it."""
        if flight.rank is not None:
            self._members.workers[flight.rank].link.send(Abort(request_id=flight.name))

    def forget(self, ranks: Iterable[int]) -> None:
        """Other workers are at these ranks now."""
        self._placement.forget(ranks)
