"""A helper process that ends a launcher which cannot end itself while Ray starts (`signals.last_resort`).

ray.init may hold the GIL while it waits for a daemon that never answers (seen on a machine without free ports). Then
no handler and no thread of the launcher runs. The C part of Python's signal handling still writes each signal's number
to a descriptor (signal.set_wakeup_fd). That descriptor is the pipe on this process's stdin.

With an exit code as argument, this program has replaced the launcher (`signals.end_now`) and ends its children.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

# Signals that end a launcher: from the keyboard, a service manager and a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time for a launcher to end by itself.
GRACE_SECONDS = 1.0


def end_tree(pid: int, *, spare: int = 0) -> None:
    """Kill all descendants of process `pid` except `spare`."""
    # Stop them first, so that none starts another process meanwhile.
    for act in (psutil.Process.suspend, psutil.Process.suspend, psutil.Process.kill):
        with contextlib.suppress(psutil.Error):  # boundary: the launcher ended by itself
            for process in psutil.Process(pid).children(recursive=True):
                if process.pid != spare:
                    with contextlib.suppress(psutil.Error):  # boundary: it ended by itself
                        act(process)


def main() -> None:
    """Wait for a signal to the launcher. Return if the pipe closes first."""
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
