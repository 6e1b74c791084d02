"""The end of a process that hears nothing any more."""

import contextlib
import os
import signal

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def kill_process(pid: int, began: float) -> None:
    """SIGKILL for a process of this host, unless its number is another's by now: `began` is when it was created."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # boundary: it has ended
        if abs(psutil.Process(pid).create_time() - began) < 1.0:
            os.kill(pid, signal.SIGKILL)


def fence_process(node: str, pid: int, began: float) -> None:
    """`kill_process` on one of Ray's nodes; does not wait for it where that is another host."""
    if node == ray.get_runtime_context().get_node_id():
        kill_process(pid, began)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process).remote(pid, began)
