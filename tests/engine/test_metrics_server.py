"""The metrics port under clients that send nothing, little, or too much: threads are bounded, and scrapes succeed."""

import gzip
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from tests.limits import HANG_SECONDS

from moeyard_worker.engine.loop import metrics_server
from moeyard_worker.engine.loop.metrics_server import MAX_CONNECTIONS, MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("drops", "Things that fell", registry=registry).inc(3)
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    yield server
    server.end()


def scrape(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG_SECONDS)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body, kind = response.read(), response.headers["content-type"]
    connection.close()
    return response.status, body, kind


def threads() -> int:
    return sum(thread.name == "scrape" for thread in threading.enumerate())


def idle(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=HANG_SECONDS)


def test_prometheus_scrape(server: MetricsServer) -> None:
    status, body, kind = scrape(server)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families["drops"].samples[0].value == 3.0
    _, packed, _ = scrape(server, **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed) == body
    assert scrape(server, Accept="application/openmetrics-text; version=1.0.0")[2].startswith("application/openm")


def test_idle_connections_are_bounded_and_scrapes_go_on(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_LEAVE_SECONDS", HANG_SECONDS)
    held = [idle(server) for _ in range(300)]
    assert scrape(server)[0] == 200
    while threads() > MAX_CONNECTIONS:
        time.sleep(0.01)
    # The newest connections replaced the oldest.
    assert held[0].recv(1) == b""
    for sock in held:
        sock.close()


def test_slow_client_is_disconnected(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps a connection from being idle, but not from its maximum age."""
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.3)
    with idle(server) as sock:
        assert is_cut(sock)


def is_cut(sock: socket.socket) -> bool:
    """Return whether the server ends a connection that sends one byte of a header every 20 ms."""
    until = time.monotonic() + HANG_SECONDS
    sock.settimeout(0.02)
    sock.sendall(b"GET / HTTP/1.0\r\nx: ")
    while time.monotonic() < until:
        try:
            sock.sendall(b"x")
            return sock.recv(1) == b""
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("sent", [b"\x00" * 70_000, b"GET /" + b"x" * 70_000, b"\x16\x03\x01", b"GET / HTTP/9\r\n\r\n"])
def test_garbage(server: MetricsServer, sent: bytes) -> None:
    with idle(server) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(65536):
                pass
        except ConnectionError:
            pass
    assert scrape(server)[0] == 200


def test_the_port_is_free_afterwards() -> None:
    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0)
    server.end()
    MetricsServer(CollectorRegistry(), host="127.0.0.1", port=server.server_port).end()
