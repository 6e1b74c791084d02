"""The end of a process that hears nothing any more."""

import contextlib
import os
import signal
import time

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# What the kernel may take to give back what a process had: its ports, and tens of gigabytes of a GPU.
GONE_SECONDS = 10.0


def kill_process(pid: int, began: float) -> None:
    """SIGKILL for a process of this host, unless its number is another's by now: `began` is when it was created.

    Returns when it has nothing any more that its successor wants, or after GONE_SECONDS.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # boundary: it has ended
        process = psutil.Process(pid)
        if abs(process.create_time() - began) < 1.0:
            os.kill(pid, signal.SIGKILL)
            limit = time.monotonic() + GONE_SECONDS
            # Whoever started it may leave it as a zombie a while. That holds nothing when its last thread has ended:
            # until then, ports and memory are taken.
            while not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1):
                if time.monotonic() >= limit:
                    break
                time.sleep(0.005)


def fence_process(node: str, pid: int, began: float) -> None:
    """`kill_process` on one of Ray's nodes; does not wait for it where that is another host."""
    if node == ray.get_runtime_context().get_node_id():
        kill_process(pid, began)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process).remote(pid, began)
