"""How the ranks' processes of this host were when they were last seen, and whether the kernel ran out of memory since.

Nobody here is their parent (Ray's raylet is), so nobody here is told how they end. But the kernel counts the processes
that it kills for lack of memory, of the host and of every control group alike (`oom_kill` in /proc/vmstat, Linux 4.13).
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from moeyard_worker.config.engine_config import format_size

LOOK_SECONDS = 1.0
VMSTAT = Path("/proc/vmstat")


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory since it was started; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class _Look:
    """When, the bytes of memory that the process had, and the kernel's count."""

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
        """See how these are, and forget all others; at most once in LOOK_SECONDS."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        kills = self._kills()
        sizes = {pid: _resident(pid) for pid in pids}
        # One that has ended is remembered as it was.
        self._looks = {
            pid: _Look(now, size, kills) if size else self._looks[pid]
            for pid, size in sizes.items()
            if size or pid in self._looks
        }

    def describe(self, pid: int) -> str:
        """What is known of a process whose rank was lost."""
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
    """Bytes of memory of a process; 0 when it has ended, or is about to and has given them back."""
    with contextlib.suppress(psutil.Error):  # boundary: it has ended
        return int(psutil.Process(pid).memory_info().rss)
    return 0
