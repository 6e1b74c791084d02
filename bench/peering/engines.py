"""The engines behind the routers that `bench/peers.py` compares, each in its own process.

`TimedEngine` sends ids over ZMQ to our router or to `ApiServer`. `ApiServer` makes their events, as vLLM's API server
process does for its EngineCore process. `serve_ready_events` is engine and API server in one, with prepared events: the
minimum behind a router.
"""

import asyncio
import gc
import itertools
import json
import os
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import msgpack
import numpy as np
import orjson
import uvloop
import zmq
from router import MODEL, Engine
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from moeyard_worker.protocol import Abort, Message, SamplingParams, Submit, TokenBatch, Tokens
from moeyard_worker.wire import encode

WIDTH = 4  # characters of a token
# Both ends identify a stream by its `max_tokens`, which every router forwards.
FIRST_LIMIT = 50_000
_MODELS = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"x","created":0}]}'
_CREATED = 1_795_000_000
# Chunks that are made before they are written, as in our router: 6.4 us of CPU for each, and 7.0 one by one
# (2026-11-25).
_TOGETHER = 16
_PROMPT = (300, 301, 302)  # for every chat, because no router's work depends on it


class Clock:
    """The time of each step of an engine, and the first step of each stream, in a file that two processes map."""

    def __init__(self, path: Path) -> None:
        shape = 2_000_000 + FIRST_LIMIT
        path.touch()
        os.truncate(path, shape * 8)
        both = np.memmap(path, np.float64, "r+", shape=(shape,))
        self.times, self.begun = both[:2_000_000], both[2_000_000:]
        self.step = 0

    def tick(self) -> int:
        """Record the time of the next step and return its number."""
        self.step += 1
        self.times[self.step] = time.monotonic()
        return self.step


class TimedEngine(Engine):
    """The scripted engine with a clock, and with tokens of four plain characters."""

    def __init__(self, step_seconds: float, clock: Path) -> None:
        super().__init__(0, 1, step_seconds)
        self._clock = Clock(clock)
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        texts = ((i, tokenizer.decode([i])) for i in range(300, tokenizer.get_vocab_size()))
        self._ids = [i for i, text in texts if len(text) == WIDTH and text.isalpha() and text.isascii()][:500]

    def _step(self) -> None:
        step = self._clock.step + 1
        rows: dict[bytes, list[Tokens]] = {}
        for name, sequence in self._running.items():
            if not sequence.sent and sequence.submit.sampling.max_tokens >= FIRST_LIMIT:
                self._clock.begun[sequence.submit.sampling.max_tokens - FIRST_LIMIT] = step
            token = self._ids[sequence.sent % len(self._ids)]
            rows.setdefault(sequence.peer, []).append(Tokens(request_id=name, start=sequence.sent, token_ids=(token,)))
            sequence.sent += 1
        frames = [(peer, encode(TokenBatch(rows=tuple(some)))) for peer, some in rows.items()]
        self._clock.tick()  # after all writes, as for the HTTP engine's events
        for frame in frames:
            self._socket.send_multipart(frame)
        for name, sequence in list(self._running.items()):
            if sequence.sent == sequence.submit.sampling.max_tokens:  # the router's own probe
                self._end(name, sequence, "length")


class HttpConnection(asyncio.Protocol):
    """One connection of an HTTP engine. It answers every GET, and `begin` streams the answer to a POST."""

    def __init__(
        self, begin: Callable[[asyncio.Transport, int], None], end: Callable[[asyncio.Transport], None]
    ) -> None:
        self._begin, self._end = begin, end
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the new connection."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take part of a request, or all of it."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or (length and len(body) < int(length[1])):
            return
        self._data = b""
        if head.startswith(b"GET"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(_MODELS), _MODELS)
            )
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._begin(self._transport, json.loads(body)["max_tokens"])

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client has gone."""
        self._end(self._transport)


def _chunk(name: str, text: str) -> bytes:
    """Return one token's event as a chunk of HTTP's chunked encoding."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    body = {"id": name, "object": "chat.completion.chunk", "created": _CREATED, "model": "stub", "choices": [choice]}
    event = b"data: %b\n\n" % orjson.dumps(body)
    return b"%x\r\n%b\r\n" % (len(event), event)


def _write(chunks: list[tuple[asyncio.Transport, bytes]]) -> None:
    for transport, chunk in chunks:
        transport.write(chunk)
    chunks.clear()


async def _listen(
    begin: Callable[[asyncio.Transport, int], None], end: Callable[[asyncio.Transport], None], pipe: Connection
) -> asyncio.AbstractServer:
    """Accept connections on a port and send the address."""
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpConnection(begin, end), "127.0.0.1", 0, backlog=1024
    )
    gc.collect()
    gc.freeze()  # as vLLM's API server and our router do
    pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    return server


class ApiServer:
    """Receives ids over ZMQ, as our router does, makes each token's text and event, and writes it to its stream.

    It has no queue or task per stream, no framework, no checks of its input and no metrics. The one of vLLM has all of
    these, so this is the lower bound of an API server process in Python.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._streams: dict[str, tuple[asyncio.Transport, DecodeStream]] = {}
        self._names: dict[asyncio.Transport, str] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._read)

    def begin(self, transport: asyncio.Transport, limit: int) -> None:
        """Start a sequence for this connection."""
        name = f"chatcmpl-{next(self._numbers):032x}"
        self._streams[name] = transport, DecodeStream(ids=list(_PROMPT), skip_special_tokens=True)
        self._names[transport] = name
        sampling = SamplingParams(max_tokens=limit, ignore_eos=True)
        self._send(Submit(request_id=name, prompt_token_ids=_PROMPT, sampling=sampling))

    def end(self, transport: asyncio.Transport) -> None:
        """Stop the sequence of this connection."""
        name = self._names.pop(transport, None)
        if name is not None:
            del self._streams[name]
            self._send(Abort(request_id=name))

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # sending may consume the readiness of ZMQ's edge-triggered descriptor

    def _read(self) -> None:
        streams, tokenizer = self._streams, self._tokenizer
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            message = msgpack.unpackb(self._socket.recv(zmq.NOBLOCK))
            if message["type"] != "token_batch":
                continue
            made: list[tuple[asyncio.Transport, bytes]] = []
            for name, ids in zip(message["rows"]["request_ids"], message["rows"]["token_ids"], strict=True):
                if name in streams:
                    transport, decoder = streams[name]
                    if text := decoder.step(tokenizer, ids[0]):
                        made.append((transport, _chunk(name, text)))
                        if len(made) == _TOGETHER:
                            _write(made)
            _write(made)


async def serve_made_events(endpoint: str, pipe: Connection) -> None:
    """Serve until the process ends."""
    server = ApiServer(endpoint)
    async with await _listen(server.begin, server.end, pipe) as listening:
        await listening.serve_forever()


async def serve_ready_events(step_seconds: float, path: Path, pipe: Connection) -> None:
    """Serve until the process ends."""
    clock = Clock(path)
    running: dict[asyncio.Transport, int] = {}

    def begin(transport: asyncio.Transport, limit: int) -> None:
        running[transport] = -limit

    def end(transport: asyncio.Transport) -> None:
        running.pop(transport, None)

    # litellm ends a stream that repeats itself a hundred times.
    chunks = [_chunk(f"chatcmpl-{0:032x}", f" {i:03}") for i in range(500)]
    async with await _listen(begin, end, pipe):
        due = time.monotonic()
        while True:
            due = max(due + step_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            step = clock.tick()
            chunk = chunks[step % len(chunks)]
            for transport, limit in running.items():
                if limit < 0:
                    clock.begun[-limit - FIRST_LIMIT] = step
                    running[transport] = -limit
                transport.write(chunk)


def run_ready_events(step_seconds: float, clock: Path, pipe: Connection) -> None:
    """Run the process of the HTTP engine with prepared events, and send its address."""
    uvloop.run(serve_ready_events(step_seconds, clock, pipe))


def run_made_events(endpoint: str, pipe: Connection) -> None:
    """Run the process of the API server in front of the engine at `endpoint`, and send its address."""
    uvloop.run(serve_made_events(endpoint, pipe))


def run_timed_engine(step_seconds: float, clock: Path, pipe: Connection) -> None:
    """Run the process of the engine with our workers' protocol, and send its endpoint."""
    engine = TimedEngine(step_seconds, clock)
    pipe.send(engine.endpoint)
    engine.run()
