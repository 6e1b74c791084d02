"""What happens when a worker ends by itself: a fleet of one is started again, a larger one stays failed.

Every rank of a larger fleet is needed by every token, and what its ranks would have to agree on is not built yet.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from moeyard.rank import Rank

log = logging.getLogger(__name__)

LIMIT, WINDOW_SECONDS = 3, 600.0


class Restartable(Protocol):
    """What is used of a fleet."""

    def kill(self) -> None:
        """End the workers' processes, whatever they do."""
        ...

    def restart(self) -> list[Rank]:
        """Start them again; raises ValueError with one line when they cannot be."""
        ...


class RestartBudget:
    """At most `limit` restarts in any `seconds`, so that a fault that comes back at once does not go on for ever."""

    def __init__(self, limit: int = LIMIT, seconds: float = WINDOW_SECONDS) -> None:
        self.limit, self.seconds = limit, seconds
        self._taken: deque[float] = deque()

    def used(self, now: float) -> int:
        """Restarts within the last `seconds`."""
        while self._taken and self._taken[0] <= now - self.seconds:
            self._taken.popleft()
        return len(self._taken)

    def take(self, now: float) -> bool:
        """Count one more if there is one left."""
        if self.used(now) >= self.limit:
            return False
        self._taken.append(now)
        return True


class Supervisor:
    """Told by the router that the fleet failed, and by the fleet that a worker ended; in either order, from any thread.

    `replace(ranks, then)` hands new workers to the router, which calls `then` when it has them. `failure` is set once
    nothing is started any more.
    """

    def __init__(
        self,
        fleet: Restartable,
        *,
        num_workers: int,
        replace: Callable[[list[Rank], Callable[[], None]], None],
        budget: RestartBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        self._fleet, self._replace, self._budget, self._clock = fleet, replace, budget, clock
        self._alone = num_workers == 1
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._starting = False

    def failed(self, reason: str) -> None:
        """The router has lost the fleet; what is left of its worker is ended, so that `ended` follows."""
        with self._lock:
            if self._starting:
                return
            self._reason = reason
            goes_on = self._alone and self._budget.used(self._clock()) < self._budget.limit
        if goes_on:
            self._fleet.kill()
        else:
            self._give_up(reason)

    def ended(self, rank: int, reason: str) -> None:
        """A worker's process or engine has ended; returns when it serves again, or stays failed."""
        with self._lock:
            # What the router was told names the cause; what is seen of the process is the consequence.
            reason, self._reason = self._reason or reason, None
            self._starting = self._alone
        log.warning("worker %d ended: %s", rank, reason)
        while self._alone:
            begun = self._clock()
            if not self._budget.take(begun):
                self._give_up(reason)
                return
            used, limit, minutes = self._budget.used(begun), self._budget.limit, self._budget.seconds / 60
            log.warning("starting worker %d again (%d of %d in %g min)", rank, used, limit, minutes)
            try:
                ranks = self._fleet.restart()
            except ValueError as error:
                reason = f"worker {rank} could not be started again: {error}"
                log.warning("%s", reason)
                continue
            self._replace(ranks, self._started)
            log.warning("worker %d is there again after %.1f s", rank, self._clock() - begun)
            return

    def _started(self) -> None:
        with self._lock:
            self._starting = False

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        # A rank that computes, or reads cold experts, beyond the deadline in one layer looks dead to its peers.
        slow = "; if it was only slow, raise --step-deadline or lower --prefill-chunk" if "silent" in reason else ""
        log.error("the fleet failed: %s%s; restart moeyard serve", reason, slow)
