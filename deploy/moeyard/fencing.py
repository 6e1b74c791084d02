"""The end of a process that hears nothing any more."""

import contextlib
import os
import signal

import psutil


def kill_process(pid: int, began: float) -> None:
    """SIGKILL for a process of this host, unless its number is another's by now: `began` is when it was created."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # boundary: it has ended
        if abs(psutil.Process(pid).create_time() - began) < 1.0:
            os.kill(pid, signal.SIGKILL)
