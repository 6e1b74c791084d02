"""Run a Ray node and `moeyard serve` in the router's container. When one ends, the other ends, too.

    python router.py SECONDS ray start --block ... -- moeyard serve ...

SECONDS is the time that each may take to stop. It must exceed --shutdown-timeout of `moeyard serve`.

A Ray driver does not notice that its own node is gone, so this program watches both. Then the container ends, and its
restart policy starts it again. One end is final: exit code 2 of `moeyard serve` says that these flags or this
checkpoint cannot be served, and another start changes nothing. The container then stays, unhealthy, until
`docker compose up -d` brings other settings or its Ray node ends.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

JOINED = "Ray runtime started"
POLL_SECONDS = 0.2
BAD_CONFIGURATION = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Run the node and the server. Returns the container's exit code."""
    seconds, split = float(arguments[0]), list(arguments).index("--")
    # Only noted: an exception from a handler may leave the lock of a Popen locked, and the wait for it never ends.
    noted: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: noted.append(number))
    node = subprocess.Popen(arguments[1:split], stdout=subprocess.PIPE, text=True)
    serve: subprocess.Popen[bytes] | None = None
    joined: list[str] = []
    reader = threading.Thread(target=pass_on, args=(node, joined), daemon=True)
    reader.start()
    try:
        while not (noted or joined) and (node.poll() is None or reader.is_alive()):
            time.sleep(POLL_SECONDS)
        if noted:
            return 0
        if not joined:
            return say(f"the Ray node ended with code {node.returncode} before it joined the cluster", 1)
        serve = subprocess.Popen(arguments[split + 1 :])
        return watch(node, serve, noted, seconds)
    finally:
        for process in (serve, node):
            if process is not None:
                end(process, seconds)


def pass_on(node: "subprocess.Popen[str]", joined: list[str]) -> None:
    """Print the node's output, because a full pipe would block it. Append its line on joining to `joined`."""
    assert node.stdout is not None
    for line in node.stdout:
        print(line, end="", flush=True)
        if JOINED in line:
            joined.append(line)


def watch(node: "subprocess.Popen[str]", serve: "subprocess.Popen[bytes]", noted: Sequence[int], seconds: float) -> int:
    """Wait until one of them ends or a signal is noted; return the container's exit code."""
    wait_for_end(noted, node, serve)
    if not noted and serve.returncode == BAD_CONFIGURATION:
        say(
            "moeyard serve cannot run with these settings (see above) and is not started again; correct them, then "
            "run `docker compose up -d`",
            0,
        )
        wait_for_end(noted, node)
    if noted:
        return end(serve, seconds)
    if node.returncode is not None:
        return say(f"the Ray node ended with code {node.returncode}", 1)
    # 128 + the signal's number, as a shell has it.
    code = serve.returncode
    return say(f"moeyard serve ended with code {code}", code if code >= 0 else 128 - code)


def wait_for_end(noted: Sequence[int], *processes: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Wait until one of the processes has ended or a signal is noted."""
    while not noted and all(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]", seconds: float) -> int:
    """Send SIGTERM, and SIGKILL after `seconds`; return the exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def say(message: str, code: int) -> int:
    """Print one line on stderr; return `code`."""
    print(f"router: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
