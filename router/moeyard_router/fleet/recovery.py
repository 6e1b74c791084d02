"""Whether the fleet is whole, for how long requests may wait for that, and what is written down of it."""

import asyncio
import time
from collections.abc import Callable, Iterable

from moeyard_router.fleet.flights import Flight
from moeyard_router.fleet.incidents import Incidents
from moeyard_router.metrics import RouterMetrics


class Recovery:
    """An incident is open while the fleet is not whole, once it was; `late` is told why when that lasts `seconds`.

    `was_whole`: it was for another router, before this one was started.
    """

    def __init__(
        self, seconds: float, metrics: RouterMetrics, late: Callable[[str], None], *, was_whole: bool = False
    ) -> None:
        self.incidents = Incidents()
        self.is_whole, self.was_whole = False, was_whole
        self._seconds = seconds
        self._metrics = metrics
        self._late = late
        self._bound: asyncio.TimerHandle | None = None

    @property
    def reason(self) -> str | None:
        """Of the incident that lasts."""
        return None if self.incidents.open is None else self.incidents.open.reason

    def begin(
        self, reason: str, lost: int | None = None, *, planned: Iterable[int] | None = None, scales: bool = False
    ) -> None:
        """Not all of the fleet is there, for this reason too; `lost` is a rank that another worker must take.

        `planned` are those that will be lost because somebody asked for it; `scales`: to have more or fewer workers.
        """
        now, incident = time.monotonic(), self.incidents.open
        if incident is None:
            self.is_whole = False
            incident = self.incidents.begin(now, time.time(), reason)
            late = f"the fleet was not whole again within {self._seconds:g} s: {reason}"
            incident.planned, incident.scales = None if planned is None else frozenset(planned), scales
            self._bound = asyncio.get_running_loop().call_later(self._seconds, self._late, late)
        incident.say(now, reason, lost)

    def end(self, waiting: list[Flight], *, expects_output: bool) -> None:
        """It is whole, and `waiting` have got their ranks; `expects_output` if clients' sequences are in flight."""
        self.is_whole = self.was_whole = True
        self._unbind()
        incident = self.incidents.whole(time.monotonic(), expects_output=expects_output)
        if incident is None or incident.whole_seconds is None:
            return
        if incident.planned is None:
            self._metrics.recoveries.inc()
            self._metrics.recovery_seconds.observe(incident.whole_seconds)
        else:
            (self._metrics.scalings if incident.scales else self._metrics.restarts).inc()
        for flight in waiting:
            if flight.began:
                incident.carried += 1
                incident.recomputed_tokens += flight.pending
        self.carried(incident.carried, incident.recomputed_tokens)

    def carried(self, sequences: int, recomputed_tokens: int) -> None:
        """So many went on at another rank or connection."""
        self._metrics.carried.inc(sequences)
        self._metrics.recomputed.inc(recomputed_tokens)

    def fail(self, reason: str) -> None:
        """Nothing is waited for any more."""
        self.is_whole = False
        self._unbind()
        self.incidents.fail(reason)

    def validate(self) -> None:
        """Assert that an incident has a bound, and nothing else has."""
        assert (self.incidents.open is None) == (self._bound is None)
        assert self.incidents.open is None or not self.is_whole

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None
