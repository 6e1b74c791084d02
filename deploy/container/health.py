"""Health check of a container's role: exit code 0, or 1 with a line on the problem.

    python health.py ray-head HOST:PORT           the control service of Ray answers
    python health.py node                         the Ray node of this container runs
    python health.py worker ADDRESS ROUTER_URL    this node is there, and so is every rank that belongs here
    python health.py router URL                   a request that is sent now would be answered

Each check needs an answer, because a stopped process still accepts connections.
"""

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import psutil

SECONDS = 2.0
# HTTP/2's preface and an empty SETTINGS frame, which both sides begin with (RFC 9113, 3.4 and 6.5): Ray speaks gRPC.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4
DEAD = frozenset((psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED))


def main(arguments: Sequence[str]) -> int:
    checks: dict[str, Callable[..., str | None]] = {
        "ray-head": ray_head,
        "node": node,
        "worker": worker,
        "router": router,
    }
    wrong = checks[arguments[0]](*arguments[1:])
    if wrong is not None:
        print(wrong)
    return 0 if wrong is None else 1


def ray_head(address: str) -> str | None:
    """Return a line on the problem of the cluster's head, or None."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(PREFACE)
            answer = connection.recv(9)
    except OSError as error:
        return f"the control service at {address}: {error}"
    return None if answer[3:4] == bytes((SETTINGS,)) else f"what answers at {address} is not Ray"


def node() -> str | None:
    """Return a line if this container's Ray node does not run, or None."""
    names = [p.info["name"] for p in psutil.process_iter(["name", "status"]) if p.info["status"] not in DEAD]
    return None if "raylet" in names else "Ray's node is not running"


def worker(address: str, router_url: str) -> str | None:
    """Return a line on the problem of a worker's node or its ranks, or None.

    The router knows which ranks are here. A node without any is well: it waits, and the router waits for it to be well.
    Where the router cannot be asked, the ranks that run here are all that is known.
    """
    if (problem := node()) is not None:
        return problem
    expected = {url for url in rank_pages(router_url) if url.split("://")[1].rpartition(":")[0] == address}
    silent = sorted(url for url in expected if not answers(url))
    if silent:
        return f"the rank with its metrics at {silent[0]} does not answer"
    return None


def rank_pages(router_url: str) -> list[str]:
    """Return the ranks' metrics URLs in the router's list for Prometheus; [] if the router does not answer."""
    try:
        with urllib.request.urlopen(f"{router_url}/metrics/targets", timeout=SECONDS) as answer:
            groups = json.load(answer)
    except (OSError, ValueError):
        return []
    return [f"http://{target}/metrics" for group in groups for target in group["targets"]]


def answers(url: str) -> bool:
    """Return whether a thread of the rank serves its metrics page."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def router(url: str) -> str | None:
    """Return a line on the problem of the router or its fleet, or None."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2 * SECONDS):
            return None
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")
    except OSError as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
