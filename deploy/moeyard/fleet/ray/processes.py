"""Processes of this host: the last sight of ranks, the kill of stopped processes, and Ray's daemons.

Ray's raylet is the parent of the ranks' processes, so the launcher does not learn their exit codes.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moeyard.last_resort import end_tree
from moeyard.signals import end_now
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.exchange.membership.shared_files import sweep

log = logging.getLogger(__name__)

# The head holds Ray's state in memory. The raylet starts the ranks' processes, which end with it.
HEAD, RAYLET = "gcs_server", "raylet"
# A process stopped by SIGSTOP for this long is killed. It can handle no other signal.
STOPPED_SECONDS = 5.0
# Time limit for the kernel to release a process's ports and tens of gigabytes of GPU memory.
GONE_SECONDS = 10.0
RAY_GONE_SECONDS = 3.0
LOOK_SECONDS = WATCH_SECONDS = 1.0
# A call still open this long after a daemon's end is stuck inside Ray's own code.
STUCK_SECONDS = 20.0
# Time limit for the last call to notice that the fleet stops. A start of Ray cannot be interrupted.
LAST_SECONDS = 45.0
VMSTAT = Path("/proc/vmstat")


def began_of(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, independent of the wall clock.

    The pid and this value together identify a process. Raises FileNotFoundError or ProcessLookupError if there is none.
    """
    # Field 22 (proc_pid_stat(5)). Field 2 is a name in parentheses with arbitrary characters.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill_process(pid: int, began: int) -> None:
    """Kill a process of this host unless its pid was reused. `began` is the result of `began_of`.

    Returns once its ports and memory are free, or after GONE_SECONDS.
    """
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # boundary: it has ended
        process = psutil.Process(pid)
        if began_of(pid) == began:
            os.kill(pid, signal.SIGKILL)
            limit = time.monotonic() + GONE_SECONDS
            # The parent may reap it late. A zombie holds ports and memory until its last thread ends.
            while not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1):
                if time.monotonic() >= limit:
                    break
                time.sleep(0.005)


def fence_process(node: str, pid: int, began: int) -> None:
    """Run `kill_process` on one of Ray's nodes. Does not wait if that is another host."""
    if node == ray.get_runtime_context().get_node_id():
        kill_process(pid, began)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process).remote(pid, began)


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory, of the host and of every control group.

    None where it does not say (before Linux 4.13).
    """
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class _Look:
    """The time, the process's bytes of memory, and the kernel's count."""

    at: float
    resident: int
    kills: int | None


class Vitals:
    """Looks at processes now and then, from one thread."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, kills: Callable[[], int | None] = oom_kills
    ) -> None:
        self._clock, self._kills = clock, kills
        self._looks: dict[int, _Look] = {}
        self._next = float("-inf")

    def look(self, pids: Iterable[int]) -> None:
        """Record the state of these processes and forget all others, at most once in LOOK_SECONDS."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        kills = self._kills()
        sizes = {pid: _resident(pid) for pid in pids}
        # Keep the last record of a process that has ended.
        self._looks = {
            pid: _Look(now, size, kills) if size else self._looks[pid]
            for pid, size in sizes.items()
            if size or pid in self._looks
        }

    def describe(self, pid: int) -> str:
        """Describe a process whose rank was lost."""
        if _resident(pid):
            return f"process {pid} still runs, and is killed"
        look = self._looks.get(pid)
        if look is None:
            return f"process {pid} has ended"
        kills = self._kills()
        said = f"process {pid} has ended; {self._clock() - look.at:.1f} s before it had {format_size(look.resident)}"
        if kills is None or look.kills is None or kills == look.kills:
            return said
        return f"{said}, and since then the kernel killed {kills - look.kills} for lack of memory: likely this one"


def _resident(pid: int) -> int:
    """Return a process's resident bytes; 0 if it has ended or has released its memory."""
    with contextlib.suppress(psutil.Error):  # boundary: it has ended
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class LocalRay:
    """Ray's daemons on this host. `ended` and `kill_stopped` may be called from different threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._daemons: dict[str, psutil.Process] = {}
        # The raylet's agents outlive it, as orphans, until they look for it. On a busy machine that took over 28 s.
        self._agents: list[psutil.Process] = []
        self._stopped: dict[int, float] = {}  # pid -> since when it has been seen stopped

    def find(self) -> None:
        """Find the daemons among the launcher's children, and the raylet's agents. Call it after `ray.init`."""
        self._daemons, self._agents, self._stopped = daemons(), [], {}
        if (raylet := self._daemons.get(RAYLET)) is not None:
            with contextlib.suppress(psutil.Error):  # boundary: it has just ended
                self._agents = raylet.children(recursive=True)

    def ended(self) -> str | None:
        """Return the name of a daemon that has ended, the raylet first, or None. Daemons do not restart."""
        gone = (name for name in (RAYLET, HEAD) if name in self._daemons and not _lives(self._daemons[name]))
        return next(gone, None)

    def kill_stopped(self, *, starting: bool, spare: Collection[int] = ()) -> list[str]:
        """Kill daemons and workers that are stopped for too long while ranks are `starting`. Call it every second.

        Ray then reports their end as usual. `spare` holds the pids of serving ranks: their peers miss them after the
        step deadline, and they need no daemon. Returns the names of the killed processes.
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
        if (raylet := self._daemons.get(RAYLET)) is not None:
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                # Skip agents: the raylet works without their answers, but ends when they end.
                yield from (each for each in raylet.children(recursive=True) if not each.name().endswith("Agent"))

    def kill(self) -> None:
        """Kill every process of Ray. Keep routers and Python's resource tracker."""
        roots = [child for child in psutil.Process().children() if not is_own(child)]
        roots += [agent for agent in self._agents if _lives(agent)]
        self._daemons, self._agents = {}, []
        family = list(roots)
        for root in roots:
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                family += root.children(recursive=True)
            end_tree(root.pid)
            with contextlib.suppress(psutil.Error):  # boundary: it has ended
                root.kill()
        # Processes hold ports and memory until they are gone.
        limit = self._clock() + RAY_GONE_SECONDS
        while any(_lives(process) for process in family) and self._clock() < limit:
            time.sleep(0.01)


def daemons() -> dict[str, psutil.Process]:
    """Return the living daemons among the launcher's children, by name."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # boundary: it has just ended
            if (name := child.name()) in (HEAD, RAYLET) and _lives(child):
                found[name] = child
    return found


def is_own(process: psutil.Process, module: str = "multiprocessing") -> bool:
    """Return whether Python's multiprocessing started this child of the launcher; all others are Ray's."""
    try:
        return any(module in word for word in process.cmdline())
    except psutil.Error:  # boundary: it has just ended
        return False


def is_tracker(process: psutil.Process) -> bool:
    """Return whether this is Python's tracker of shared resources. It ends with the launcher: no call waits for it."""
    return is_own(process, "multiprocessing.resource_tracker")


def _lives(process: psutil.Process) -> bool:
    """Return whether the process still runs; false if its pid was reused."""
    with contextlib.suppress(psutil.NoSuchProcess):  # boundary: it has ended, which is the question
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_at_once(reason: str) -> None:
    """End this process when its main thread is stuck inside Ray's code."""
    print(f"moeyard: {reason}; start it again", file=sys.stderr, flush=True)
    end_now(1)


class Guard:
    """Serializes calls of Ray, and watches for stopped processes and for calls that never return.

    Life: construct; `watch` a private Ray; `call` from any thread; `end`. `starting`: whether ranks are starting.
    `serving`: the pids of serving ranks. `on_stuck` is called once if a call never returns; by default it ends this
    process.
    """

    def __init__(
        self, local: LocalRay, *, starting: Callable[[], bool], serving: Callable[[], Collection[int]]
    ) -> None:
        self.on_stuck: Callable[[str], None] = end_at_once
        self.stopping = threading.Event()
        self._local, self._starting, self._serving = local, starting, serving
        self._lock = threading.Lock()
        self._entered: float | None = None  # start of the call that holds the lock
        self._missed: tuple[float, float] | None = None  # such a call, and when its daemon was first missed
        self._stuck = False

    def watch(self) -> None:
        """Call `look` every second from a separate thread."""

        def run() -> None:
            while not self._stuck and not self.stopping.wait(WATCH_SECONDS):
                self.look(time.monotonic())

        threading.Thread(target=run, name="ray-watch", daemon=True).start()

    def look(self, now: float) -> None:
        """Kill stopped processes, and notice a call that waits for a dead daemon."""
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
        """Enter a block with exclusive use of Ray."""
        with self._lock:
            self._entered = time.monotonic()
            try:
                yield
            finally:
                self._entered = None

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        """Enter the last block. If an earlier call never returns, end the process here with code 1."""
        self.stopping.set()
        if self._stuck or not self._lock.acquire(timeout=LAST_SECONDS):
            self._local.kill()
            sweep()
            end_now(1)
        try:
            yield
        finally:
            self._lock.release()
