"""Ranks that take no new sequences: what they have runs to its end there, or goes on elsewhere when it is told to.

A drained rank stays in lockstep with the others, whose tokens need its experts. So draining is the routers' affair
alone, and a rank does not know of it.
"""

import time
from collections.abc import Callable, Sequence

from moeyard_router.fleet.dispatch import Dispatch
from moeyard_router.fleet.flights import Flight
from moeyard_router.fleet.orders import UNKNOWN, Drain
from moeyard_router.fleet.recovery import Recovery


class Draining:
    """Carries out what `Drain` says. `changed` is called when ranks have begun or ceased to take sequences."""

    def __init__(self, dispatch: Dispatch, recovery: Recovery, changed: Callable[[], None]) -> None:
        self._dispatch = dispatch
        self._members, self._flights, self._waiters = dispatch.members, dispatch.flights, dispatch.waiters
        self._recovery = recovery
        self._changed = changed

    def take(self, order: Drain) -> int:
        """Returns how many sequences of clients `order.rank` has then, or UNKNOWN."""
        now = time.monotonic()
        self._members.drain(order.ranks)
        if order.carry:
            self._carry(order.rank)
        if not self._members.any_open():
            # Who waits does so because of us.
            self._waiters.hold(now)
        elif self._recovery.is_whole:
            self._waiters.resume(now)
        if order.size is not None:
            self._pause(now, range(order.size, len(self._members.workers)), order.size)
        elif order.leaves and order.rank < len(self._members.workers):
            self._pause(now, (order.rank,), None)
        if self._recovery.is_whole:
            self._dispatch.drain()
        self._changed()
        if not self._recovery.is_whole and not order.leaves and order.size is None:
            return UNKNOWN
        return len(self._there(order.rank))

    def _pause(self, now: float, leaving: Sequence[int], size: int | None) -> None:
        """Nothing runs until these ranks have others in their places, or the fleet has another `size`."""
        what = (
            f"worker {leaving[0]} is being restarted"
            if size is None
            else f"going on with {size} worker{'s'[: size > 1]}"
        )
        self._members.pause(leaving, what)
        self._waiters.hold(now)
        self._recovery.begin(what, planned=leaving, scales=size is not None)

    def _there(self, rank: int) -> list[Flight]:
        """What somebody waits for there, and not what a rank was told to stop and has not said yet that it did.

        Nor a canary, which is sent to every rank by its number: it tries a drained one, too.
        """
        return [f for f in self._flights.by_name.values() if f.rank == rank and f.carried and f.ticket is not None]

    def _carry(self, rank: int) -> None:
        if not self._members.any_open():
            return  # it stays until another can take it
        there = self._there(rank)
        recomputed = 0
        for flight in there:
            self._dispatch.carry(flight, whole=self._recovery.is_whole)
            recomputed += flight.pending
        if self._recovery.is_whole:  # those that wait are counted when it is
            self._recovery.carried(len(there), recomputed)
