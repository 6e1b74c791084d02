"""Records of a rank's ended process: its memory, and whether the kernel was short of it."""

import os
import subprocess
import sys

from moeyard.fleet.ray.processes import LOOK_SECONDS, Vitals, oom_kills


class Clock:
    """Seconds, and the kernel's count of its out-of-memory kills."""

    def __init__(self) -> None:
        self.now, self.kills = 10.0, 7

    def vitals(self) -> Vitals:
        return Vitals(clock=lambda: self.now, kills=lambda: self.kills)


def ended_process(vitals: Vitals) -> int:
    """Return the number of an ended process that was measured while it ran."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        vitals.look([process.pid])
        process.kill()
    return process.pid


def test_process_that_the_kernel_may_have_killed() -> None:
    clock = Clock()
    vitals = clock.vitals()
    pid = ended_process(vitals)
    clock.now += 0.4
    before = vitals.describe(pid)
    assert before.startswith(f"process {pid} has ended; 0.4 s before it had ")
    assert before.endswith("iB")
    clock.kills += 1
    assert vitals.describe(pid) == f"{before}, and since then the kernel killed 1 for lack of memory: likely this one"
    # Later measurements are of other processes.
    clock.now += LOOK_SECONDS
    vitals.look([pid, os.getpid()])
    assert vitals.describe(pid).endswith("likely this one")


def test_living_and_unknown_processes() -> None:
    clock = Clock()
    vitals = clock.vitals()
    assert vitals.describe(os.getpid()) == f"process {os.getpid()} still runs, and is killed"
    pid = ended_process(clock.vitals())
    assert vitals.describe(pid) == f"process {pid} has ended"


def test_kernels_count_of_kills() -> None:
    kills = oom_kills()
    assert kills is None or kills >= 0
