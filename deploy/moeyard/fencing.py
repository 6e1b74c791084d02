"""The end of a process that hears nothing any more."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# What the kernel may take to give back what a process had: its ports, and tens of gigabytes of a GPU.
GONE_SECONDS = 10.0


def began_of(pid: int) -> int:
    """When a process of this host began, in ticks since the host did: no clock that is set meanwhile changes it.

    With its number it names a process for good. Raises FileNotFoundError or ProcessLookupError where there is none.
    """
    # The 22nd field (proc_pid_stat(5)); the second is a name in parentheses, which may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def kill_process(pid: int, began: int) -> None:
    """SIGKILL for a process of this host, unless its number is another's by now: `began` is what `began_of` told.

    Returns when it has nothing any more that its successor wants, or after GONE_SECONDS.
    """
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # boundary: it has ended
        process = psutil.Process(pid)
        if began_of(pid) == began:
            os.kill(pid, signal.SIGKILL)
            limit = time.monotonic() + GONE_SECONDS
            # Whoever started it may leave it as a zombie a while. That holds nothing when its last thread has ended:
            # until then, ports and memory are taken.
            while not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1):
                if time.monotonic() >= limit:
                    break
                time.sleep(0.005)


def fence_process(node: str, pid: int, began: int) -> None:
    """`kill_process` on one of Ray's nodes; does not wait for it where that is another host."""
    if node == ray.get_runtime_context().get_node_id():
        kill_process(pid, began)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process).remote(pid, began)
