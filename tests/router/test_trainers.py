"""The API of trainers on the API's own port: its keys, and the way to the launcher's control socket and back."""

import socketserver
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from moeyard.fleet.weights_api import FleetState, WeightsApi
from moeyard_router.config import AccessConfig
from moeyard_router.http.trainers import PATHS
from moeyard_worker.config.worker_spec import AS_STARTED

KEY = {"authorization": "Bearer of-a-trainer"}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        head = self.rfile.readline().decode()
        length = 0
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.partition(b": ")
            length = int(value) if name.lower() == b"content-length" else length
        self.server.asked.append((head, self.rfile.read(length)))
        if self.server.says is not None:
            self.wfile.write(self.server.says)


@pytest.fixture
def launcher():
    """A control socket that records requests, and answers `says`."""
    with tempfile.TemporaryDirectory() as folder:
        server = socketserver.ThreadingUnixStreamServer(f"{folder}/control.sock", _Handler)
        server.asked, server.path = [], Path(folder) / "control.sock"
        server.says = b'HTTP/1.1 409 Conflict\r\nContent-Length: 16\r\n\r\n{"error": "busy"}'
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def service(start, launcher, tmp_path):
    keys, clients = tmp_path / "keys", tmp_path / "clients"
    keys.write_text("of-a-trainer\n")
    clients.write_text("of-a-client\n")
    return start(1, control=(launcher.path, keys), access=AccessConfig(api_key_file=clients))


def test_requests_pass_with_a_control_key(service, launcher):
    url = f"{service.url}/pause?mode=keep"
    answer = httpx.post(url, headers=KEY, json={"a": 1})
    assert (answer.status_code, answer.json()) == (409, {"error": "busy"})
    assert launcher.asked == [("POST /pause?mode=keep HTTP/1.1\r\n", b'{"a":1}')]
    for headers in ({}, {"authorization": "Bearer of-a-client"}):
        assert httpx.post(url, headers=headers).status_code == 401, "a client's key must not pause the server"
    # aiohttp marks a POST without a body so.
    octets = {"content-type": "application/octet-stream"}
    assert httpx.post(url, headers={**KEY, **octets}).status_code == 409
    client = {"authorization": "Bearer of-a-client"}
    assert httpx.post(f"{service.url}/v1/completions", headers={**client, **octets}).status_code == 415
    assert httpx.get(f"{service.url}/v1/models", headers=KEY).status_code == 401, "nor a trainer's key be a client's"
    assert httpx.get(url, headers=KEY).status_code == 405
    large = httpx.post(url, headers=KEY, content=b"x" * (1 << 20) + b"x")
    assert (large.status_code, large.headers["connection"]) == (413, "close"), "the rest of the body is not read"
    parts = (b"x" * (1 << 16) for _ in range(17))
    assert httpx.post(url, headers=KEY, content=parts).status_code == 413
    assert len(launcher.asked) == 2


def test_launcher_that_does_not_answer(service, launcher):
    launcher.says = None
    answer = httpx.get(f"{service.url}/is_paused", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the launcher has ended")
    launcher.path.unlink()
    answer = httpx.get(f"{service.url}/is_paused", headers=KEY)
    assert answer.status_code == 503
    assert "the launcher does not listen at" in answer.json()["error"]["message"]


def test_no_paths_by_default(start):
    service = start(1)
    for path, methods in PATHS.items():
        for method in methods:
            answer = httpx.request(method, f"{service.url}{path}")
            assert answer.status_code == 404
            assert "--control-listen api" in answer.json()["error"]["message"]


def test_paths_are_the_launchers():
    api = WeightsApi(lambda *_: "", lambda: FleetState(weights=AS_STARTED, paused=False, size=1))
    assert {(method, path) for path, methods in PATHS.items() for method in methods} == set(api._routes)


def test_refusal_names_the_file_of_the_missing_key(start, launcher, tmp_path):
    """A server without API keys needs one for these paths, too."""
    (keys := tmp_path / "control").write_text("a-long-secret\n")
    service = start(1, control=(launcher.path, keys))
    said = "a key of --control-key-file is needed"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(f"{service.url}/pause", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["message"].startswith(said)
    assert httpx.get(f"{service.url}/v1/models").status_code == 200
