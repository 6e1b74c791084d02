"""A client's connection: uvicorn's protocol over httptools, with limits, and a shorter way for streamed pieces.

uvicorn limits idle connections only. Here the head of a request has a size and a time limit, and its body a time limit,
so that unfinished requests hold no connections or memory. An offered upgrade (`Upgrade: h2c` of `curl --http2` and
Java's client, `websocket`) is declined as RFC 9110, 7.8, requires: the request is answered. llhttp, the parser, takes
every upgrade for accepted and passes on no body behind it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from moeyard_router.api.request_scope import EXTENSION, SCOPE_KEY
from moeyard_router.errors import ApiError
from moeyard_worker.refusals import Refusals

# Few enough that the first ones of a large step need not wait for its last, enough that sending stays cheap.
_TOGETHER = 16


class ChunkOutbox:
    """Writes the pieces of all connections that were made in one turn of the event loop, several behind one another.

    To send between making two pieces took 17 to 25 us of CPU for each, to send them behind one another 11 to 14: their
    readers and the kernel stay awake (64 streams of 15 ms, 2026-11-22, two shared cores, in turn in one process).
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pieces.append((transport, data))
        if len(self._pieces) == _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write all pieces now. uvloop refuses to write to a connection that has broken since."""
        pieces, self._pieces = self._pieces, []
        for transport, data in pieces:
            if not transport.is_closing():
                transport.write(data)


class Pieces:
    """An answer's `Direct`, in chunks: for answers without a Content-Length."""

    __slots__ = ("_cycle", "_outbox")

    def __init__(self, cycle: RequestResponseCycle, outbox: ChunkOutbox) -> None:
        self._cycle = cycle
        self._outbox = outbox

    def ready(self) -> bool:
        """As the transport says: it asks for a pause when 64 KiB wait for a client that does not read."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        self._outbox.add(self._cycle.transport, b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        self._outbox.flush()


class SlowReader:
    """Watches one connection's unsent bytes. `cut` is called once, before the connection is aborted."""

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
        """The client has fallen behind: more is unsent than the transport takes."""
        self._unset()
        self._timer = self._loop.call_later(self._seconds, self._late)

    def resumed(self) -> None:
        self._unset()

    def answered(self) -> None:
        """An answer is complete. What is unsent of it is too little to pause for, and may keep a closed socket open."""
        self._answers += 1
        if self._timer is None and self._transport.get_write_buffer_size():
            self._loop.call_later(self._seconds, self._late_at_end, self._answers)

    def _late_at_end(self, answers: int) -> None:
        # With another answer behind it the bytes may be that one's, which has its own time.
        if answers == self._answers and self._timer is None and self._transport.get_write_buffer_size():
            self._late()

    def _late(self) -> None:
        self._timer = None
        self._cut()
        self._transport.abort()

    def _unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_HOP_BY_HOP = frozenset((b"upgrade", b"http2-settings"))
# Connections beyond the limit that are refused once they have sent something. Further ones are refused at once.
REFUSED_AT_ONCE = 16
_CROWDED = "{} connections are open, as many as this server's limit of open files allows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`header_bytes`: request line and headers. `header_seconds`: from a connection, or a request's first byte, to the
    end of its headers. `body_seconds`: from there to the end of its body. `send_seconds`: see `SlowReader`.
    `connections`: open at once, over all clients; None for any number."""

    header_bytes: int
    header_seconds: float
    body_seconds: float
    send_seconds: float
    connections: int | None


class _TooLong(Exception):
    """The head of a request is longer than allowed; httptools wraps it."""


class ConnectionProtocol(HttpToolsProtocol):
    """One connection. `refused` gets the status of answers without an endpoint, `cut` the reason of an abort."""

    def __init__(
        self,
        *,
        limits: ConnectionLimits,
        refused: Callable[[int], None],
        cut: Callable[[str], None],
        refusals: Refusals,
        outbox: ChunkOutbox,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._refusals = refusals
        self._crowded = False  # there are too many
        self._outbox = outbox
        self._limits = limits
        self._refused = refused
        self._cut = cut
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0  # of the chunks in which the head arrived
        self._exact_bytes = 0  # of the names, values and URL in it
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for: tuple[str, int] | None = None  # what the deadline is for, and of which request
        self._num_requests = 0
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first of them is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = SlowReader(self.loop, transport, seconds=self._limits.send_seconds, cut=self._cut_off)
        self._watch()
        self._check_number()

    def _check_number(self) -> None:
        """Refuse what comes beyond the limit: once the client has sent something, or at once, which it may not read."""
        most = self._limits.connections
        if most is None or len(self.connections) <= most:
            return
        self._crowded = True
        self._refusals.add(
            "open_files", f"{_CROWDED.format(most)}; raise that limit (ulimit -n, LimitNOFILE= of a service)"
        )
        if len(self.connections) > most + REFUSED_AT_ONCE:
            self._refuse(503, _CROWDED.format(most))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more. uvicorn tells the last request only, and one before it may be answered yet."""
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
        record: Any = None if self.cycle is None else self.cycle.scope.get(SCOPE_KEY)
        if record is not None:
            record.cut = "slow_reader"
        self._cut("slow_reader")

    def data_received(self, data: bytes) -> None:
        """Parse; what cannot become a request is answered here, and the connection closed."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._crowded:
            self._refuse(503, _CROWDED.format(self._limits.connections))
            return
        if not self._in_body and not self._in_head:
            self._begin_head()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _TooLong):
                raise  # a bug of ours or uvicorn's
            self._refuse_head()
            return
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not an HTTP request: {error}")
            return
        # The end of the head is exact: what came behind it in the same chunk is body.
        if self._in_head and self._head_bytes > self._limits.header_bytes:
            self._refuse_head()
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
        """The head that was parsed, once more, as a client writes it that offers no upgrade."""
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
        if not self._in_head:  # behind another one, in the same chunk
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
        """The request goes to the app, unless it comes again without its upgrade."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._in_body = False, True
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        extensions: Any = {EXTENSION: Pieces(self.cycle, self._outbox)}
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
        if self._exact_bytes > self._limits.header_bytes:
            raise _TooLong

    # Deadlines

    def _watch(self) -> None:
        """Let a deadline run for what is awaited of the client, and for nothing else."""
        awaited = "headers" if self._in_head else "body" if self._in_body else None
        if awaited is None or self.transport.is_closing():
            self._unwatch()
        elif self._waits_for != (awaited, self._num_requests):
            self._unwatch()
            self._waits_for = (awaited, self._num_requests)
            limits = self._limits
            seconds = limits.header_seconds if awaited == "headers" else limits.body_seconds
            self._deadline = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._waits_for = None

    def _late(self) -> None:
        self._deadline = self._waits_for = None
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._watch()  # an earlier request of this connection is still being answered
        elif self._in_head:
            self._refuse(408, f"the request's headers were not complete after {self._limits.header_seconds:g} s")
        else:
            self._refuse(408, f"the request's body was not complete after {self._limits.body_seconds:g} s")

    # Answers

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's headers are longer than {self._limits.header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless another answer is on its way or has been given, and close."""
        self._unwatch()
        cycle = self.cycle
        if self._in_body:
            unanswered = not cycle.response_started and not self.pipeline
        else:
            unanswered = cycle is None or cycle.response_complete
        if unanswered:
            self._refused(status)
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
