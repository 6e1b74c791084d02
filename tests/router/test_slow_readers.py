"""Clients that ask and never read: held for a while, then cut, with their places given back."""

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
# For a reader that must not be cut. Router, worker and reader share one interpreter.
PATIENT = 2.0
NUM = 8
RATE = 0.3e6  # bytes a second
# Some 1.6 MB, far more than the transport and the kernel's buffers take up.
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
    """A connection that has asked and takes up as little as it can."""
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


def test_a_reader_that_never_reads_is_cut(start, wait_for, lines):
    service = start(1, send_timeout=TIMEOUT, access=AccessConfig(access_log=True))
    [worker] = service.workers
    worker.pace = 0.03  # it would go on for 6 s
    # What a connection's kernel buffers take up it has from the socket that listens.
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sockets = [ask(service) for _ in range(2)]
    try:
        wait_for(lambda: len(service.aborts) == 2 * NUM, "the sequences are ended at their worker")
        service.wait_idle()
        wait_for(lambda: len(lines()) == 2, "lines are written")
        for line in lines():
            assert (line["status"], line["cut"], line["left"]) == (200, "slow_reader", 1)
            assert line["output_tokens"] < NUM * 200
        page = service.client.get("/metrics").text
        assert 'moeyard_connections_cut_total{model_name="tiny",reason="slow_reader"} 2.0' in page
        for sock in sockets:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 20):  # what had left before it was cut; then comes the end
                    pass
    finally:
        for sock in sockets:
            sock.close()


def test_the_line_of_the_answer_that_was_cut_says_so(start, wait_for, lines):
    """Not that of a request behind it on the same connection, which has no answer yet."""
    service = start(1, send_timeout=TIMEOUT, access=AccessConfig(access_log=True))
    [worker] = service.workers
    worker.pace = 0.03
    service.server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ask(service) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        service.wait_idle()
        wait_for(lines, "a line is written")
        assert [line.get("cut") for line in lines()] == ["slow_reader"]


def unchunked(body):
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return data


@pytest.mark.sampled(0)
@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_is_slow_and_steady_has_all(start, stream):
    """An answer of some 1.6 MB, whole or left behind in a stream, takes it several times what it may stand still."""
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
    """So many bytes are unsent."""

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
def test_what_counts_as_slow(events, cut):
    async def play():
        transport, told = Transport(), []
        loop = asyncio.get_running_loop()
        reader = SlowReader(loop, transport, seconds=0.01, cut=lambda: told.append(transport.aborted))
        for event in events:
            if event.isdigit():
                transport.unsent = int(event)
            else:
                getattr(reader, event)()
        over = asyncio.Event()
        loop.call_later(0.03, over.set)
        await over.wait()
        assert transport.aborted == cut
        assert told == ([False] if cut else []), "told once, before the end"

    asyncio.run(play())
