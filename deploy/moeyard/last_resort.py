"""Ends a launcher that cannot end itself. A process of its own while Ray starts (`signals.last_resort`).

While ray.init waits for a daemon that never answers it may hold the interpreter's lock, so no handler and no thread of
the launcher runs (seen where the machine had no ports left). What still runs is the C part of Python's signal handling,
which writes each signal's number to a descriptor (signal.set_wakeup_fd): here, the pipe on this process's stdin.

With an exit code as its argument it stands in the launcher's own place (`signals.end_now`), and ends its children.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

# Signals that end a launcher: of a keyboard, of a service manager, and of a terminal that is closed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a launcher that can end itself gets for it.
GRACE_SECONDS = 1.0


def end_tree(pid: int, *, spare: int = 0) -> None:
    """Kill all that descend from process `pid`, but not `spare`."""
    # Stopped first, so that none starts another between the look and the end.
    for act in (psutil.Process.suspend, psutil.Process.suspend, psutil.Process.kill):
        with contextlib.suppress(psutil.Error):  # boundary: the launcher ended by itself
            for process in psutil.Process(pid).children(recursive=True):
                if process.pid != spare:
                    with contextlib.suppress(psutil.Error):  # boundary: it ended by itself
                        act(process)


def main() -> None:
    """Wait for a signal of the launcher, or for the end of the pipe: then there is nothing to do."""
    launcher = os.getppid()
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    while not set(ENDING) & set(heard := os.read(0, 4096)):
        if not heard:
            return
    while select.select([0], [], [], GRACE_SECONDS)[0]:
        if not os.read(0, 4096):
            return
    with contextlib.suppress(psutil.Error):  # boundary: it ended at the last moment
        psutil.Process(launcher).suspend()
        os.write(2, b"stopping: Ray holds the launcher up, so it is killed\n")
        end_tree(launcher, spare=os.getpid())
        psutil.Process(launcher).kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        end_tree(os.getpid())
        sys.exit(int(sys.argv[1]))
    main()
