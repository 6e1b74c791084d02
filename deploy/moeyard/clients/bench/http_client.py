"""HTTP/1.1 for a client with little overhead of its own: a protocol class on uvloop, parsed by httptools.

Per streamed token it costs a few microseconds (docs/bench.md has them beside aiohttp's and httpx's); it speaks what the
benchmark needs and no more: requests with a body, keep-alive, TLS.
"""

import asyncio
import ssl
import time
from typing import Any, cast

import httptools
import orjson

from moeyard.clients.api_client import EventStream, StreamedAnswer, refusal
from moeyard.clients.target_config import Target


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._answer: StreamedAnswer | None = None
        self._events: EventStream | None = None
        self._body: list[bytes] = []
        self._at = 0.0
        self.reusable = True
        self.heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a connection that the peer closed or the network lost."""
        self.reusable = False
        self._fail(f"connection lost: {exc}" if exc else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        """Parse the bytes of one read. They share one arrival time."""
        if self._answer is None:
            self.close()
            return
        self.heard = True
        self._at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, orjson.JSONDecodeError) as error:
            cause = error.__context__ or error
            self._fail(f"not understood: {type(cause).__name__}: {cause}")
            self.close()

    async def exchange(self, request: bytes, answer: StreamedAnswer) -> None:
        """Send a request and fill in its answer until its body or the connection ends."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._events, self._body, self.heard = answer, None, [], False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            if not self._ended.done() or self._ended.cancelled():
                self.close()
            self._answer = None

    def close(self) -> None:
        """Close the connection. A server then stops the generation."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def on_headers_complete(self) -> None:
        """Record the status (httptools callback)."""
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()
        if self._answer.status == 200:
            self._events = EventStream(self._answer)

    def on_body(self, data: bytes) -> None:
        if self._events is not None:
            self._events.feed(data, self._at)
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """Finish the answer (httptools callback)."""
        answer, ended = self._answer, self._ended
        if answer is None or ended is None or answer.status in (100, 103):
            return
        answer.ended = self._at
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if answer.status != 200:
            answer.error = refusal(b"".join(self._body))
        elif answer.error is None and not answer.done:
            answer.error = "the stream ended without [DONE]"
        if not ended.done():
            ended.set_result(None)

    def _fail(self, message: str) -> None:
        if self._answer is not None and self._ended is not None and not self._ended.done():
            self._answer.error = message
            self._answer.ended = time.perf_counter()
            self._ended.set_result(None)


class Client:
    """Requests to one server with a pool of connections. `timeout`: seconds for a complete answer."""

    def __init__(self, target: Target, *, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None
        lines = [f"Host: {target.authority}", "Accept: text/event-stream", "User-Agent: moeyard-bench"]
        lines += [f"{name}: {value}" for name, value in target.headers().items()]
        self._head = "\r\n".join(lines)

    async def stream(self, endpoint: str, body: dict[str, Any], *, due: float) -> StreamedAnswer:
        """POST a body that asks for a stream. Failures go to the answer's `error`; nothing is raised.

        `due`: when the request was to be sent, which the answer keeps. A new connection is part of what is timed, as
        its user waits for it.
        """
        data = orjson.dumps(body)
        head = f"POST {self._target.path(endpoint)} HTTP/1.1\r\n{self._head}\r\nContent-Length: {len(data)}\r\n\r\n"
        answer = StreamedAnswer(due, sent=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._send(head.encode() + data, answer)
        except TimeoutError:
            answer.error, answer.ended = f"no whole answer within {self._timeout:g} s", time.perf_counter()
        except OSError as error:
            answer.error, answer.ended = f"{error.strerror or error}", time.perf_counter()
        return answer

    async def _send(self, request: bytes, answer: StreamedAnswer) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            await connection.exchange(request, answer)
            if connection.heard:
                self._keep(connection)
                return
            # The server closed the idle connection, as it may at any time, and did not read the request.
            answer.error = None
        connection = await self._connect()
        await connection.exchange(request, answer)
        self._keep(connection)

    def _keep(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._target.host, self._target.port, ssl=self._tls)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
