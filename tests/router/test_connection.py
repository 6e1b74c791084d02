"""Limits of a connection: slow or endless headers and bodies, and upgrades that the server declines."""

import contextlib
import json
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS

from moeyard_router.http.connection import REFUSED_AT_ONCE

LIMITS = {"header_timeout": 1.5, "body_timeout": 1.8, "keep_alive_timeout": 1.5, "max_header_bytes": 2000}
BODY = json.dumps({"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def quick(checkpoint, story) -> Iterator:
    """A service with short time limits."""
    from tests.router.conftest import Starter

    starter = Starter(checkpoint, story)
    yield starter(1, **LIMITS)
    starter.close()


def connect(service):
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)


def answer(sock, *, whole=True):
    """Return (status, headers, body) of the next answer; with `whole`, the server must close the connection then."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = sock.recv(1)  # byte by byte: the rest belongs to the next answer
        if not part:
            return None
        head += part
    first, *lines = head.decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = b""
    while len(body) < int(headers["content-length"]):
        body += sock.recv(int(headers["content-length"]) - len(body))
    if whole:
        assert sock.recv(100) == b"", "the server must close"
    return int(first.split()[1]), headers, body


def head(body=BODY, extra=b""):
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + length + extra + b"\r\n"


def error_of(got):
    status, headers, body = got
    error = json.loads(body)["error"]
    assert error["code"] == status
    assert headers["connection"] == "close"
    return error["message"]


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nA:"]
)
def test_headers_that_never_end(quick, sent):
    with connect(quick) as sock:
        began = time.monotonic()
        sock.sendall(sent)
        got = answer(sock)
        assert got[0] == 408
        assert error_of(got) == "the request's headers were not complete after 1.5 s"
        assert time.monotonic() - began >= 1.4


def test_headers_that_trickle(quick):
    """Every byte is progress, but the limit covers the whole head."""
    with connect(quick) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nA: ")
        while not select.select([sock], [], [], 0.02)[0]:
            sock.sendall(b"x")
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_never_ends(quick):
    with connect(quick) as sock:
        sock.sendall(head() + BODY[:-1])
        got = answer(sock)
        assert got[0] == 408
        assert error_of(got) == "the request's body was not complete after 1.8 s"
    quick.wait_idle()


def test_unread_body_does_not_keep_the_connection(quick):
    """The server answers 404 at once, and the remaining body does not keep the connection open."""
    with connect(quick) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc")
        assert answer(sock, whole=False)[0] == 404
        assert sock.recv(100) == b""


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(quick):
    [worker] = quick.workers
    with connect(quick) as sock:
        for _ in range(2):
            sock.sendall(head() + BODY)
            assert answer(sock, whole=False)[0] == 200
        worker.pace = 1.0  # two tokens take longer than any limit
        sock.sendall(head() + BODY)
        assert answer(sock, whole=False)[0] == 200
        worker.reset()
        assert sock.recv(100) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nA: " + b"x" * 2000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nA: " + b"x" * 2000,
        b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /" + b"x" * 3000,
        b"GET /livez HTTP/1.1\r\n" + b"a:b\r\n" * 400 + b"\r\n",
    ],
    ids=["one field", "a field without end", "the target", "a target without end", "many fields"],
)
def test_headers_that_are_too_long(quick, sent):
    with connect(quick) as sock:
        sock.sendall(sent)
        got = answer(sock, whole=False)
        assert got[0] == 431
        assert error_of(got) == "the request's headers are longer than 2000 bytes"


def test_long_body_is_not_a_long_head(quick):
    """The body may arrive in the same chunk as the head, whose size is then exact."""
    body = json.dumps({"prompt": [5] * 1000, "max_tokens": 1}).encode()
    with connect(quick) as sock:
        for _ in range(2):
            sock.sendall(head(body) + body)
            assert answer(sock, whole=False)[0] == 400  # the prompt is too long for the model, so the server read it


def test_invalid_http(quick):
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"CONNECT a:1 HTTP/1.1\r\n\r\n"):
        with connect(quick) as sock:
            sock.sendall(sent)
            got = answer(sock, whole=False)
            assert got[0] == 400
            error_of(got)


def test_refusals_are_counted(quick):
    with connect(quick) as sock:
        sock.sendall(b"\x00\r\n\r\n")
        assert answer(sock, whole=False)[0] == 400
    assert 'path="other",status="400"}' in quick.client.get("/metrics").text


@pytest.mark.parametrize("pieces", [1, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("upgrade", [H2C, b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"])
def test_offered_upgrade_is_declined_and_the_request_answered(service, upgrade, pieces):
    with connect(service) as sock:
        for sent in (head(extra=upgrade) + BODY, head() + BODY):
            size = -(-len(sent) // pieces)
            for i in range(pieces):
                sock.sendall(sent[i * size : (i + 1) * size])
                time.sleep(0.002 if pieces > 1 else 0)  # most pieces arrive alone
            status, headers, body = answer(sock, whole=False)
            assert status == 200
            assert json.loads(body)["choices"][0]["prompt_token_ids"] == [5, 6]
            assert headers.get("connection") != "close"


def test_upgrade_with_a_chunked_body_and_a_pipelined_request(service):
    """Java's client sends its body in chunks if it does not know the length."""
    chunks = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
    with connect(service) as sock:
        sock.sendall(
            head(None, b"Transfer-Encoding: chunked\r\n" + H2C)
            + chunks
            + b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        )
        status, _, body = answer(sock, whole=False)
        assert status == 200
        assert json.loads(body)["usage"]["prompt_tokens"] == 2
        assert answer(sock, whole=False)[2] == b'{"status":"alive"}'


def test_disconnect_ends_pipelined_requests(service, wait_for):
    """Both requests end: the first sequence does not run on for a client that left."""
    for worker in service.workers:
        worker.pace = 0.01
    endless = json.dumps({"prompt": [5, 6], "max_tokens": 200, "stream": True}).encode()
    with connect(service) as sock:
        sock.sendall(head(endless) + endless)
        assert b" 200 OK" in sock.recv(1000)
        sock.sendall(head() + BODY)
        connections = service.server._server.server_state.connections
        (ours,) = [each for each in list(connections) if each.client == sock.getsockname()]
        wait_for(lambda: ours.pipeline, "the second request must wait")
    wait_for(lambda: sum(len(w.aborts) for w in service.workers), "the worker must receive the abort")
    assert sum(len(worker.submits) for worker in service.workers) == 1, "the second request must not start"


def test_connection_close_with_an_upgrade_holds(service):
    with connect(service) as sock:
        sock.sendall(head(extra=H2C.replace(b"HTTP2-Settings\r\n", b"HTTP2-Settings, close\r\n", 1)) + BODY)
        assert answer(sock)[0] == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_with_http2(service, tmp_path):
    big = tmp_path / "body.json"
    big.write_bytes(BODY[:-1] + b', "user": "' + b"x" * 2_000_000 + b'"}')  # above 1 MiB curl sends Expect first
    for body in (BODY.decode(), f"@{big}"):
        command = [
            "curl",
            "-sS",
            "--http2",
            "-H",
            "Content-Type: application/json",
            "-w",
            "%{http_version} %{http_code}",
        ]
        got = subprocess.run(
            [*command, "--data-binary", body, f"{service.url}/v1/completions"],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert got.stderr == ""
        assert got.stdout.endswith("1.1 200"), got.stdout[-200:]


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is installed")
def test_java_client(start):
    """Its first request of a connection asks for h2c with a body, which must arrive (tests/clients/StreamChat.java)."""
    program = Path(__file__).resolve().parents[1] / "clients/StreamChat.java"
    done = subprocess.run(
        ["java", program, start(1).url, "tiny"], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") == 11


def test_connections_above_the_file_limit_get_an_error(checkpoint, story, caplog, wait_for):
    """Open connections continue. Far above the limit, the server closes new ones without an answer."""
    from tests.router.conftest import Starter

    starter = Starter(checkpoint, story)
    service = starter(1, max_connections=3)
    service.client.close()
    refusal = "3 connections are open, as many as this server's limit of open files allows"

    def opened():
        return len(service.server._server.server_state.connections)

    try:
        wait_for(lambda: not opened(), "connections from the start are open")
        with contextlib.ExitStack() as held:
            socks = [held.enter_context(connect(service)) for _ in range(3)]
            wait_for(lambda: opened() == 3, "the server does not accept connections")
            with connect(service) as sock:
                sock.sendall(head() + BODY)
                got = answer(sock)
            assert got[0] == 503
            assert error_of(got) == refusal
            for sock in socks:
                sock.sendall(head() + BODY)
                assert answer(sock, whole=False)[0] == 200
            for _ in range(REFUSED_AT_ONCE):
                held.enter_context(connect(service))
            wait_for(lambda: opened() == 3 + REFUSED_AT_ONCE, "the server does not accept connections")
            with connect(service) as sock:
                assert answer(sock)[0] == 503
        wait_for(lambda: not opened(), "connections are open")
        with connect(service) as sock:
            sock.sendall(head() + BODY)
            assert answer(sock, whole=False)[0] == 200
    finally:
        starter.close()
    lines = [record.getMessage() for record in caplog.records if "open_files" in record.getMessage()]
    assert lines[0] == f"refused (open_files): {refusal}; raise that limit (ulimit -n, LimitNOFILE= of a service)"
