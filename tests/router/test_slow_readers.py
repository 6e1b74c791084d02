"""Clients that never read their answer: after a while the router closes the connection and frees their slots."""

import asyncio
import contextlib
import json
import logging
import math
import re
import socket
import time
from collections import Counter

import pytest
from tests.limits import HANG_SECONDS

from moeyard_router.config import AccessConfig
from moeyard_router.http.connection import SlowReader

TIMEOUT = 0.4
# For a reader that must stay connected. Router, worker and reader share one interpreter.
PATIENT = 2.0
NUM = 8
RATE = 0.3e6  # bytes per second
# About 1.6 MB, far more than the buffers of transport and kernel hold.
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 200,
    "n": NUM,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
}


def ask(service, **more):
    """Send a request on a connection with the smallest buffer."""
    host, port = service.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.settimeout(HANG_SECONDS)
    sock.connect((host, int(port)))
    data = json.dumps({**BODY, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "moeyard.access")
    return lambda: [r.fields for r in caplog.records if r.name == "moeyard.access" and r.fields["method"] == "POST"]


def test_reader_that_never_reads_is_cut(start, wait_for, lines):
    service = start(1, send_timeout=TIMEOUT, access=AccessConfig(access_log=True))
    [worker] = service.workers
    worker.pace = 0.03  # the whole answer would take 6 s
    # Connections inherit the size of their kernel buffers from the listening socket.
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sockets = [ask(service) for _ in range(2)]
    try:
        wait_for(lambda: len(service.aborts) == 2 * NUM, "the worker must receive the aborts")
        service.wait_idle()
        wait_for(lambda: len(lines()) == 2, "the access log must have both lines")
        for line in lines():
            assert (line["status"], line["cut"], line["left"]) == (200, "slow_reader", 1)
            assert line["output_tokens"] < NUM * 200
        page = service.client.get("/metrics").text
        assert 'moeyard_connections_cut_total{model_name="tiny",reason="slow_reader"} 2.0' in page
        for sock in sockets:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 20):  # data sent before the cut, then the end
                    pass
    finally:
        for sock in sockets:
            sock.close()


def test_access_log_line_of_the_cut_answer(start, wait_for, lines):
    """The line of a pipelined request, which has no answer yet, does not say it."""
    service = start(1, send_timeout=TIMEOUT, access=AccessConfig(access_log=True))
    [worker] = service.workers
    worker.pace = 0.03
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ask(service) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        service.wait_idle()
        wait_for(lines, "the access log must have a line")
        assert [line.get("cut") for line in lines()] == ["slow_reader"]


def unchunked(body):
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return data


@pytest.mark.sampled(0)
@pytest.mark.parametrize("stream", [True, False])
def test_slow_steady_reader_gets_the_whole_answer(start, stream):
    """An answer of about 1.6 MB, whole or left over in a stream, takes several times the allowed standstill."""
    service = start(1, send_timeout=PATIENT)
    [worker] = service.workers
    worker.chunk = 50
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ask(service, stream=stream) as sock:
        begun, data, whole = time.monotonic(), b"", math.inf
        while len(data) < whole and not data.endswith(b"\r\n0\r\n\r\n"):
            part = sock.recv(65536)
            assert part, f"cut after {len(data)} bytes"
            data += part
            head, _, body = data.partition(b"\r\n\r\n")
            if length := re.search(rb"content-length: (\d+)", head):
                whole = len(head) + 4 + int(length[1])
            time.sleep(max(0.0, len(data) / RATE - (time.monotonic() - begun)))
        assert time.monotonic() - begun > 2 * PATIENT
    assert b" 200 " in head.splitlines()[0]
    if stream:
        *events, end = [event for event in unchunked(body).decode().split("\n\n") if event]
        assert end == "data: [DONE]"
        choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    else:
        choices = json.loads(body)["choices"]
    scored = Counter[int]()
    for choice in choices:
        scored[choice["index"]] += len((choice["logprobs"] or {"content": ()})["content"])
    assert scored == dict.fromkeys(range(NUM), 200)


class Transport:
    """A transport with a settable number of unsent bytes."""

    def __init__(self):
        self.unsent = 0
        self.aborted = False

    def get_write_buffer_size(self):
        return self.unsent

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize(
    ("events", "cut"),
    [
        (["paused"], True),
        (["paused", "resumed"], False),
        (["paused", "resumed", "paused"], True),
        (["100", "answered"], True),
        (["100", "answered", "0"], False),
        (["100", "answered", "answered", "0"], False),
        (["0", "answered", "100"], False),
        (["paused", "100", "answered", "resumed", "0"], False),
    ],
)
def test_definition_of_a_slow_reader(events, cut):
    async def play():
        transport, cuts = Transport(), []
        loop = asyncio.get_running_loop()
        reader = SlowReader(loop, transport, seconds=0.01, cut=lambda: cuts.append(transport.aborted))
        for event in events:
            if event.isdigit():
                transport.unsent = int(event)
            else:
                getattr(reader, event)()
        over = asyncio.Event()
        loop.call_later(0.03, over.set)
        await over.wait()
        assert transport.aborted == cut
        assert cuts == ([False] if cut else []), "the cut must be reported once, before the abort"

    asyncio.run(play())
