"""A client's connection: uvicorn's protocol over httptools, with limits and a direct path for streamed chunks.

uvicorn limits idle connections only. Here a request's head has a size and a time limit, and its body a time limit, so
that incomplete requests do not hold connections or memory. Upgrades (`h2c` of `curl --http2` and Java's client, and
`websocket`) are declined by answering the request (RFC 9110, section 7.8). The parser llhttp assumes that upgrades are
accepted, and drops the body.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from moeyard_router.api.request_scope import EXTENSION, SCOPE_KEY
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.refusals import Refusals

# Chunks per flush. More would delay the first ones of a large step, fewer would make sending expensive.
_TOGETHER = 16
_HOP_BY_HOP = frozenset((b"upgrade", b"http2-settings"))
# Connections above the limit that get their refusal after they have sent something. Further ones are refused at once.
REFUSED_AT_ONCE = 16
_CROWDED = "{} connections are open, as many as this server's limit of open files allows"


class ChunkOutbox:
    """Batches the chunks that all connections write in one turn of the event loop.

    A chunk took 17 to 25 us of CPU when sent at once, and 11 to 14 in a batch, because readers and kernel stay awake.
    (64 streams of 15 ms, 2026-11-22, two shared cores, alternating in one process.)
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        """Queue a chunk until the end of this turn of the loop, or until the batch is full."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((transport, data))
        if len(self._chunks) == _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write all chunks. Closed connections are skipped, because uvloop refuses to write to them."""
        chunks, self._chunks = self._chunks, []
        for transport, data in chunks:
            if not transport.is_closing():
                transport.write(data)


class DirectChunks:
    """The `Direct` of one chunked answer."""

    __slots__ = ("_cycle", "_outbox")

    def __init__(self, cycle: RequestResponseCycle, outbox: ChunkOutbox) -> None:
        self._cycle = cycle
        self._outbox = outbox

    def ready(self) -> bool:
        """Return whether the client keeps up. The transport requests a pause when 64 KiB are unsent."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Queue one chunk."""
        self._outbox.add(self._cycle.transport, b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        """Send all queued chunks."""
        self._outbox.flush()


class SlowReader:
    """Aborts a connection whose client does not read for `seconds`. `cut` is called before."""

    __slots__ = ("_answers", "_cut", "_loop", "_seconds", "_timer", "_transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, *, seconds: float, cut: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._cut = cut
        self._timer: asyncio.TimerHandle | None = None
        self._answers = 0

    def paused(self) -> None:
        """Start the timer: more is unsent than the transport's limit."""
        self.resumed()
        self._timer = self._loop.call_later(self._seconds, self._late)

    def resumed(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answered(self) -> None:
        """Start a timer for the rest of a complete answer, which causes no pause but may keep a closed socket open."""
        self._answers += 1
        if self._timer is None and self._transport.get_write_buffer_size():
            self._loop.call_later(self._seconds, self._late_at_end, self._answers)

    def _late_at_end(self, answers: int) -> None:
        # After a further answer the unsent bytes may be that one's, which has its own timer.
        if answers == self._answers and self._timer is None and self._transport.get_write_buffer_size():
            self._late()

    def _late(self) -> None:
        self._timer = None
        self._cut()
        self._transport.abort()


class _TooLong(Exception):
    """A request's head exceeds the limit. httptools wraps this error."""


class ConnectionProtocol(HttpToolsProtocol):
    """One connection.

    `header_timeout` runs from the connection or a request's first byte to the end of its headers, `body_timeout` from
    there to the end of its body. `max_connections` counts those of all clients. `send_timeout`: see `SlowReader`.
    """

    def __init__(
        self, *, limits: RouterConfig, metrics: RouterMetrics, refusals: Refusals, outbox: ChunkOutbox, **given: Any
    ) -> None:
        super().__init__(**given)
        self._metrics = metrics
        self._refusals = refusals
        self._crowded = False  # this connection is above the limit
        self._outbox = outbox
        self._limits = limits
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0  # of the received chunks that contain the head
        self._exact_bytes = 0  # of its URL, header names and values
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for: tuple[str, int] | None = None  # the deadline's part ("headers" or "body") and request number
        self._num_requests = 0
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = SlowReader(self.loop, transport, seconds=self._limits.send_timeout, cut=self._cut_off)
        self._watch()
        self._check_number()

    def _check_number(self) -> None:
        """Refuse a connection above the limit when it sends something, or at once, which its client may not read."""
        most = self._limits.max_connections
        if most is None or len(self.connections) <= most:
            return
        self._crowded = True
        self._refusals.add(
            "open_files", f"{_CROWDED.format(most)}; raise that limit (ulimit -n, LimitNOFILE= of a service)"
        )
        if len(self.connections) > most + REFUSED_AT_ONCE:
            self._refuse(503, _CROWDED.format(most))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all unanswered requests that the client has left. uvicorn would tell only the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unwatch()
        self._reader.resumed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.resumed()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._reader.answered()

    def _cut_off(self) -> None:
        # With pipelining, `self.cycle` is the request that was parsed last, not the one that is being answered.
        cycle = self._unanswered[0] if self._unanswered else self.cycle
        record: Any = None if cycle is None else cycle.scope.get(SCOPE_KEY)
        if record is not None:
            record.cut = "slow_reader"
        self._metrics.cut("slow_reader")

    def data_received(self, data: bytes) -> None:
        """Parse. Invalid requests are answered here, and the connection is closed."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._crowded:
            self._refuse(503, _CROWDED.format(self._limits.max_connections))
            return
        if not self._in_body and not self._in_head:
            self._begin_head()
        if self._in_head:
            self._head_bytes += len(data)
        limit, too_long = self._limits.max_header_bytes, False
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _TooLong):
                raise  # a bug in this class or uvicorn
            too_long = True
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not an HTTP request: {error}")
            return
        # `_head_bytes` may include body bytes of the last chunk, so only an incomplete head is refused by it.
        if too_long or (self._in_head and self._head_bytes > limit):
            self._refuse(431, f"the request's headers are longer than {limit} bytes")
            return
        self._watch()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self.parser.get_method() == b"CONNECT":
                self._refuse(400, "this is not a proxy: CONNECT is not served")
                return
            head, rest = self._head_without_upgrade(), data[stop.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)
            self._feed(rest)

    def _head_without_upgrade(self) -> bytes:
        """Return the parsed head as bytes, without its upgrade."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(o for o in options if o.lower() not in _HOP_BY_HOP)
            if name not in _HOP_BY_HOP and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if not self._in_head:  # the previous request ended in the same chunk
            self._begin_head()
        self._exact_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the app, unless `_feed` parses it again without its upgrade."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._in_body = False, True
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        extensions: Any = {EXTENSION: DirectChunks(self.cycle, self._outbox)}
        self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        super().on_message_complete()

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._num_requests += 1

    def _count(self, size: int) -> None:
        self._exact_bytes += size
        if self._exact_bytes > self._limits.max_header_bytes:
            raise _TooLong

    # Deadlines

    def _watch(self) -> None:
        """Set the deadline of the part of the request that is incomplete, if any."""
        part = "headers" if self._in_head else "body" if self._in_body else None
        if part is None or self.transport.is_closing():
            self._unwatch()
        elif self._waits_for != (part, self._num_requests):
            self._unwatch()
            self._waits_for = (part, self._num_requests)
            seconds = self._limits.header_timeout if part == "headers" else self._limits.body_timeout
            self._deadline = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._waits_for = None

    def _late(self) -> None:
        self._deadline = self._waits_for = None
        if not self._in_head:
            self._refuse(408, f"the request's body was not complete after {self._limits.body_timeout:g} s")
        elif self.cycle is not None and not self.cycle.response_complete:
            self._watch()  # an earlier request of this connection is still being answered, so wait longer
        else:
            self._refuse(408, f"the request's headers were not complete after {self._limits.header_timeout:g} s")

    # Answers

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless another answer has begun, and close the connection."""
        self._unwatch()
        cycle = self.cycle
        if self._in_body:
            unanswered = not cycle.response_started and not self.pipeline
        else:
            unanswered = cycle is None or cycle.response_complete
        if unanswered:
            self._metrics.answered("other", status)
            self.transport.write(self._answer(status, message))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _answer(self, status: int, message: str) -> bytes:
        body = orjson.dumps(ApiError(status, message).body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        return STATUS_LINE[status] + b"".join(b"%s: %s\r\n" % pair for pair in headers) + b"\r\n" + body
