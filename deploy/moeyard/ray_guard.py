"""One call of Ray at a time, and an eye on processes that stand still and on calls that never return."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator

from moeyard.local_ray import STOPPED_SECONDS, LocalRay
from moeyard.signals import end_now
from moeyard_worker.exchange.leftovers import sweep

WATCH_SECONDS = 1.0
# A call that waits for ranks looks every 0.2 s whether Ray lives. One that is still there so long after the end of a
# daemon waits inside Ray's own code, for ever.
STUCK_SECONDS = 20.0
# Time for the last call to notice that the fleet is stopped. Ray may be starting, which cannot be interrupted.
LAST_SECONDS = 45.0

log = logging.getLogger(__name__)


def end_at_once(reason: str) -> None:
    """End this process where nothing else can: its main thread is inside Ray's code."""
    print(f"moeyard: {reason}; start it again", file=sys.stderr, flush=True)
    end_now(1)


class Guard:
    """Around all calls of a fleet's actors. Life: construct; `watch` a private Ray; `call`, from any thread; `end`.

    `starting` says whether ranks are on their way in, `serving` the pids of those that serve. `on_stuck` is told once
    if a call never returns; until somebody sets it, the process ends then.
    """

    def __init__(
        self, local: LocalRay, *, starting: Callable[[], bool], serving: Callable[[], Collection[int]]
    ) -> None:
        self.on_stuck: Callable[[str], None] = end_at_once
        self.stopping = threading.Event()
        self._local, self._starting, self._serving = local, starting, serving
        self._lock = threading.Lock()
        self._entered: float | None = None  # when the call began that holds the lock
        self._missed: tuple[float, float] | None = None  # such a call, and when a daemon was first missed in it
        self._stuck = False

    def watch(self) -> None:
        """Look every second from a thread of its own."""

        def run() -> None:
            while not self._stuck and not self.stopping.wait(WATCH_SECONDS):
                self.look(time.monotonic())

        threading.Thread(target=run, name="ray-watch", daemon=True).start()

    def look(self, now: float) -> None:
        """Kill processes that stand still; notice a call that a dead daemon holds up."""
        for name in self._local.kill_stopped(starting=self._starting(), spare=self._serving()):
            log.error("%s of Ray was stopped for %g s, and is killed", name, STOPPED_SECONDS)
        ended, entered = self._local.ended(), self._entered
        if ended is None or entered is None:
            self._missed = None
        elif self._missed is None or self._missed[0] != entered:
            self._missed = entered, now
        elif now - self._missed[1] > STUCK_SECONDS:
            self._stuck = True
            reason = f"Ray's {ended} has ended, and Ray's own code waits for it"
            log.error("%s; moeyard serve ends", reason)
            self.on_stuck(reason)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A block that has Ray to itself."""
        with self._lock:
            self._entered = time.monotonic()
            try:
                yield
            finally:
                self._entered = None

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        """The last block. If a call before it never returns, the process ends here, with code 1."""
        self.stopping.set()
        if self._stuck or not self._lock.acquire(timeout=LAST_SECONDS):
            self._local.kill()
            sweep()
            end_now(1)
        try:
            yield
        finally:
            self._lock.release()
