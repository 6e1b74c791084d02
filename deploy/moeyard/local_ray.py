"""The processes of the launcher's own Ray: whether its daemons live, which processes stand still, and their end."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator

import psutil

from moeyard.last_resort import end_tree

# The head has all that Ray knows in its memory. The raylet starts the ranks' processes, which end with it.
HEAD, RAYLET = "gcs_server", "raylet"
# A process that SIGSTOP has stopped for so long is killed. Nothing else can end it: it hears nothing.
STOPPED_SECONDS = 5.0
GONE_SECONDS = 3.0


class LocalRay:
    """The daemons that `find` has found. `ended` and `kill_stopped` may be called from different threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._daemons: dict[str, psutil.Process] = {}
        self._stopped: dict[int, float] = {}  # pid -> since when it has been seen stopped

    def find(self) -> None:
        """Look for the daemons among the launcher's children, once `ray.init` has started them."""
        self._daemons = daemons()
        self._stopped = {}

    def ended(self) -> str | None:
        """The name of a daemon that has ended; the raylet's, if both have. Nothing brings either of them back."""
        for name in (RAYLET, HEAD):
            daemon = self._daemons.get(name)
            if daemon is not None and not _lives(daemon):
                return name
        return None

    def kill_stopped(self, *, starting: bool, spare: Collection[int] = ()) -> list[str]:
        """Kill the daemons and worker processes that are stopped for too long, while ranks are `starting`.

        Ray then tells of their end as of any other. `spare` are the pids of ranks that serve: their peers miss them
        after the step deadline, and they need no daemon. Returns the names of the killed processes. Call it every
        second.
        """
        now, killed = self._clock(), []
        stopped: dict[int, float] = {}
        for process in self._watched() if starting else ():
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                if process.pid in spare or process.status() != psutil.STATUS_STOPPED:
                    continue
                since = stopped[process.pid] = self._stopped.get(process.pid, now)
                if now - since >= STOPPED_SECONDS:
                    name = process.name()
                    process.kill()
                    killed.append(f"{name} (process {process.pid})")
        self._stopped = stopped
        return killed

    def _watched(self) -> Iterator[psutil.Process]:
        yield from self._daemons.values()
        raylet = self._daemons.get(RAYLET)
        if raylet is None:
            return
        with contextlib.suppress(psutil.Error):  # boundary: it has ended
            for process in raylet.children(recursive=True):
                # The raylet ends with its agents, and serves without their answers.
                if not process.name().endswith("Agent"):
                    yield process

    def kill(self) -> None:
        """Kill every process of Ray. Routers, and Python's tracker of what they share, are the launcher's own."""
        self._daemons = {}
        roots = [child for child in psutil.Process().children() if not is_own(child)]
        family = list(roots)
        for root in roots:
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                family += root.children(recursive=True)
            end_tree(root.pid)
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                root.kill()
        # They hold ports and memory until they are gone.
        limit = self._clock() + GONE_SECONDS
        while any(_lives(process) for process in family) and self._clock() < limit:
            time.sleep(0.01)


def daemons() -> dict[str, psutil.Process]:
    """The living daemons among the launcher's children, by name."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # boundary: it has just ended
            if (name := child.name()) in (HEAD, RAYLET) and _lives(child):
                found[name] = child
    return found


def is_own(process: psutil.Process) -> bool:
    """Whether Python's multiprocessing started this child of the launcher; everything else there is Ray's."""
    return _names(process, "multiprocessing")


def is_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's tracker of shared resources: it ends with the launcher, so no call waits for it."""
    return _names(process, "multiprocessing.resource_tracker")


def _names(process: psutil.Process, module: str) -> bool:
    """Whether a process's command line names a module."""
    try:
        return any(module in word for word in process.cmdline())
    except psutil.Error:  # boundary: it has just ended
        return False


def _lives(process: psutil.Process) -> bool:
    """Whether it runs, and its number is not another's by now."""
    with contextlib.suppress(psutil.NoSuchProcess):  # boundary: it has ended, which is the question
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
