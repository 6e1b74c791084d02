"""The router's container: a Ray node and `moeyard serve` beside it, of which neither lives without the other.

    python router.py ray start --block ... -- moeyard serve ...

A Ray driver does not notice that its own node is gone, so this does: whichever of the two ends, the other is ended and
the container with it, and its restart policy begins anew. One end is final: code 2 of `moeyard serve` says that these
flags or this checkpoint cannot be served, which another start does not change. Then the container stays, unhealthy and
without a loop, until `docker compose up -d` brings other settings, or its Ray node ends.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

JOINED = "Ray runtime started"
POLL_SECONDS = 0.2
# `moeyard serve` gives open answers 3 s unless told otherwise, and then leaves the cluster.
STOP_SECONDS = 30.0
BAD_CONFIGURATION = 2


class Ended(Exception):
    """SIGTERM, SIGINT or SIGHUP came: the container is being stopped."""


def main(arguments: Sequence[str]) -> int:
    """Run both; returns the container's exit code."""
    split = list(arguments).index("--")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    node = subprocess.Popen(arguments[:split], stdout=subprocess.PIPE, text=True)
    serve: subprocess.Popen[bytes] | None = None
    try:
        if not joined(node):
            return say(f"the Ray node ended with code {node.wait()} before it joined the cluster", 1)
        serve = subprocess.Popen(arguments[split + 1 :])
        return watch(node, serve)
    except Ended:
        return 0 if serve is None else end(serve)
    finally:
        for process in (serve, node):
            if process is not None:
                end(process)


def joined(node: "subprocess.Popen[str]") -> bool:
    """Wait until the node has joined its cluster, passing on what it says; False: it ended before."""
    assert node.stdout is not None
    for line in node.stdout:
        print(line, end="", flush=True)
        if JOINED in line:
            threading.Thread(target=pass_on, args=(node.stdout,), daemon=True).start()
            return True
    return False


def pass_on(lines: IO[str]) -> None:
    """What the node says from then on; unread it would stop at a full pipe."""
    for line in lines:
        print(line, end="", flush=True)


def watch(node: "subprocess.Popen[str]", serve: "subprocess.Popen[bytes]") -> int:
    """Wait until one of them ends; returns the container's exit code."""
    while node.poll() is None:
        code = serve.poll()
        if code == BAD_CONFIGURATION:
            say(
                "moeyard serve cannot run with these settings (see above) and is not started again; mend them, then "
                "run `docker compose up -d`",
                0,
            )
            while node.poll() is None:
                time.sleep(POLL_SECONDS)
            break
        if code is not None:
            # 128 + the signal's number, as a shell has it.
            return say(f"moeyard serve ended with code {code}", code if code >= 0 else 128 - code)
        time.sleep(POLL_SECONDS)
    return say(f"the Ray node ended with code {node.returncode}", 1)


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> int:
    """SIGTERM, and SIGKILL if that does not help; its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def say(message: str, code: int) -> int:
    """One line on stderr."""
    print(f"router: {message}", file=sys.stderr, flush=True)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
