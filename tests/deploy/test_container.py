"""Container programs other than Ray and moeyard: health checks, and a router container's two processes."""

import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.deploy.test_serve import free_port
from tests.limits import HANG_SECONDS
from tests.scripts import loaded

from moeyard.fleet.messages import FleetError, FleetLost, RanksLost
from moeyard.fleet.ray.places import too_small

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "deploy" / "container"
# A Ray node seen from router.py: it reports that it has joined, and keeps running.
NODE = "import time; print('...'); print('Ray runtime started.', flush=True); time.sleep(60)"
LOST = "import time; print('Ray runtime started.', flush=True); time.sleep(0.5)"
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def health() -> Iterator[ModuleType]:
    with loaded(CONTAINER / "health.py") as module:
        module.SECONDS = HANG_SECONDS
        yield module


@pytest.fixture
def serve_pages() -> Iterator[Callable[[dict[str, tuple[int, str]]], str]]:
    """Start a server of (status, body) by path; return its address."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(pages: dict[str, tuple[int, str]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = pages.get(self.path, (404, ""))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def stopped() -> Iterator[str]:
    """The address of a process that listens and never answers, like a stopped one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def targets(*addresses: str) -> tuple[int, str]:
    return 200, json.dumps([{"targets": [a], "labels": {"worker": str(i)}} for i, a in enumerate(addresses)])


def node_is_present(health: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str, status: str = "sleeping") -> None:
    class Process:
        def __init__(self, name: str) -> None:
            self.info = {"name": name, "status": status}

    monkeypatch.setattr(health.psutil, "process_iter", lambda _: [Process(name) for name in names])


def test_router_health_follows_readiness(
    health: ModuleType, serve_pages: Callable[[dict[str, tuple[int, str]]], str], stopped: str
) -> None:
    assert health.router(f"http://{serve_pages({'/readyz': (200, 'ready')})}") is None
    assert health.router(f"http://{serve_pages({'/readyz': (503, 'worker 1 is lost')})}") == "worker 1 is lost"
    health.SECONDS = 0.1
    assert "timed out" in health.router(f"http://{stopped}")


def test_worker_health_follows_its_ranks(
    health: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    serve_pages: Callable[[dict[str, tuple[int, str]]], str],
    stopped: str,
) -> None:
    rank = serve_pages({"/metrics": (200, "moeyard_engine_steps_total 1")})
    router = "http://" + serve_pages({"/metrics/targets": targets(rank, "10.9.9.9:1")})
    node_is_present(health, monkeypatch, "raylet", "ray::RankActor")
    # Ranks of other nodes do not count.
    assert health.worker("127.0.0.1", router) is None
    assert health.worker("127.0.0.2", router) is None
    wedged = "http://" + serve_pages({"/metrics/targets": targets(rank, stopped)})
    health.SECONDS = 3.0  # the others answer sooner even on a busy machine
    assert stopped in health.worker("127.0.0.1", wedged)
    health.SECONDS = HANG_SECONDS
    gone = f"127.0.0.1:{free_port()}"
    dead = "http://" + serve_pages({"/metrics/targets": targets(gone)})
    assert gone in health.worker("127.0.0.1", dead)
    # The router may be missing, or may require a key.
    assert health.worker("127.0.0.1", f"http://{gone}") is None
    closed = "http://" + serve_pages({"/metrics/targets": (401, "{}")})
    assert health.worker("127.0.0.1", closed) is None
    node_is_present(health, monkeypatch, "python")
    assert "node" in health.worker("127.0.0.1", router)
    node_is_present(health, monkeypatch, "raylet", status="stopped")
    assert "node" in health.worker("127.0.0.1", router)


def test_head_must_answer(health: ModuleType, stopped: str) -> None:
    health.SECONDS = 0.1
    assert "timed out" in health.ray_head(stopped)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer(said: bytes) -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(said)

        health.SECONDS = HANG_SECONDS
        for said, well in ((bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), True), (b"HTTP/1.1 400 Bad Request", False)):
            thread = threading.Thread(target=answer, args=(said,))
            thread.start()
            assert (health.ray_head(address) is None) == well
            thread.join()
    assert health.ray_head(address) is not None


def router_container(node: str, serve: str, *, seconds: float = 30.0) -> "subprocess.Popen[str]":
    python = sys.executable
    command = [python, str(CONTAINER / "router.py"), str(seconds), python, "-c", node, "--", python, "-c", serve]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("node", "serve", "code", "says"),
    [
        (NODE, "raise SystemExit(1)", 1, "moeyard serve ended with code 1"),
        (NODE, "import os; os.kill(os.getpid(), 9)", 137, "moeyard serve ended with code -9"),
        (LOST, SLEEP, 1, "the Ray node ended with code 0"),
        ("print('no head')", SLEEP, 1, "before it joined"),
    ],
    ids=["serve fails", "serve is killed", "node is lost", "no node"],
)
def test_router_container_ends_with_any_of_its_processes(node: str, serve: str, code: int, says: str) -> None:
    process = router_container(node, serve)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, (out, err)
    assert says in err


def test_cluster_that_is_too_small_is_reported() -> None:
    assert too_small({"CPU": 2.0}, 2, gpus=0) is None
    assert "has 1" in str(too_small({"CPU": 1.0, "GPU": 2.0}, 2, gpus=1))
    assert "GPU" in str(too_small({"CPU": 2.0, "GPU": 1.0}, 2, gpus=1))
    # Exit code 2 of `moeyard serve` is final for a router container; other codes lead to a retry.
    assert FleetLost("cannot join Ray").exit_code == RanksLost([1], "worker 1 died while starting").exit_code == 1
    assert not hasattr(FleetError("use fewer --workers"), "exit_code")


def test_router_container_does_not_loop_over_bad_settings() -> None:
    """A restart would change nothing, so the container stays until an operator stops it."""
    process = router_container(NODE, "raise SystemExit(2)")
    assert process.stderr is not None
    assert "not started again" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2


def test_router_container_stops_cleanly() -> None:
    serve = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('ended', flush=True), sys.exit(0)))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)"
    )
    process = router_container(NODE, serve)
    assert process.stdout is not None
    assert "begun\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "ended" in out, "the process must be stopped, not killed"


def test_router_container_kills_after_its_time() -> None:
    """A server that needs longer than SECONDS is killed; the test above shows one that stops in time."""
    serve = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print('begun', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end: time.sleep(1)\n"
        "print('ended', flush=True)"
    )
    process = router_container(NODE, serve, seconds=0.2)
    assert process.stdout is not None
    assert "begun\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode != 0
    assert "ended" not in out
