"""One connection to one worker: a DEALER socket in the event loop, and a monitor that detects a break at once."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_worker.protocol import Hello, Message, Submit, TokenBatch
from moeyard_worker.refusals import Refusals
from moeyard_worker.sockets import REFUSED_EVENTS, count_refused, next_event, set_heartbeats, unlock, watch
from moeyard_worker.wire import ProtocolError, decode, encode, reply_limits

log = logging.getLogger(__name__)

_LONG_PROMPT = 8192  # tokens; encoding and sending 131,072 tokens takes 1.4 ms
# Frames, and bytes of frames, read before other work of the event loop gets its turn (prompt logprobs are large).
_FRAMES_PER_TURN = 256
_BYTES_PER_TURN = 16 * 1024
_RECONNECT_MS, _RECONNECT_MAX_MS = 10, 500  # first and longest wait after a refused connection
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 1.0  # first and longest wait between checks for a listener, in seconds
# The excluded event also occurs when a worker's process ends during a reconnection.
_REFUSED = REFUSED_EVENTS & ~zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvents:
    """Callbacks of a link in the event loop. Each gets the rank.

    `messages` gets messages in order. `broke` and `lost` get the reason: the connection broke, or the peer breaks the
    protocol.
    """

    up: Callable[[int], None]
    messages: Callable[[int, list[Message]], None]
    broke: Callable[[int, str], None]
    lost: Callable[[int, str], None]


class WorkerLink:
    """Connects and sends `Hello`. After a break it reports, and never connects again by itself.

    A broken connection is detected at once. A silent peer (stopped process, cut cable) is detected by an unanswered
    ZMTP heartbeat, after `step_deadline` seconds and at most a fifth of that later.

    With `config.keys` both sides authenticate by CURVE. The size of a worker's messages is limited.
    """

    def __init__(
        self,
        address: WorkerAddress,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        config: RouterConfig,
        events: LinkEvents,
    ) -> None:
        self.rank = address.rank
        self.endpoint = address.endpoint
        self._context = context
        self._deadline, self._keys = config.step_deadline, config.keys
        self._limits = reply_limits(config.max_inflight)
        self._events = events
        self._refusals = Refusals(log)
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._scheduled = False
        self._is_up = False
        self._outbox: deque[Message] = deque()

    def open(self) -> None:
        """Start connecting. The worker may start later. Raises `ValueError` for an endpoint that ZMQ refuses."""
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        # No limit on frames: sequences in flight are limited, and a full queue would drop messages or block.
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, self._limits.frame_bytes)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        set_heartbeats(sock, self._deadline)
        if self._keys is not None:
            unlock(sock, self._keys.own, self._keys.worker)
        self._socket = sock
        self._monitor = watch(sock, _EVENTS)
        try:
            sock.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"worker {self.rank}: cannot use endpoint '{self.endpoint}': {error}") from error
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._loop.add_reader(sock.FD, self._read)
        self._loop.call_soon(self._read_monitor)

    def send(self, message: Message) -> None:
        """Queue a message without blocking. Does nothing on a closed link.

        Long prompts, and messages behind them, leave in later turns of the event loop, one long prompt per turn.
        """
        if self._socket is None:
            return
        if not self._outbox and not _is_long(message):
            self._send(self._socket, message)
            return
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        while self._socket is not None and self._outbox:
            message = self._outbox.popleft()
            self._send(self._socket, message)
            if _is_long(message):
                break
        if self._outbox:
            self._loop.call_soon(self._flush)

    def _send(self, sock: "zmq.Socket[bytes]", message: Message) -> None:
        sock.send(encode(message), zmq.NOBLOCK)
        # Sending may consume the readiness of ZMQ's edge-triggered descriptor, so check for input again.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Close both sockets and drop unsent messages."""
        sock, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        self._outbox.clear()
        if sock is None:
            return
        self._loop.remove_reader(sock.FD)
        if monitor is not None:
            self._loop.remove_reader(monitor.FD)
            sock.disable_monitor()
            monitor.close(0)
        sock.close(0)

    def _read(self) -> None:
        self._scheduled = False
        sock = self._socket
        if sock is None:
            return
        messages: list[Message] = []
        fault: str | None = None
        size = 0
        for _ in range(_FRAMES_PER_TURN):
            if size > _BYTES_PER_TURN:
                self._read_on()
                break
            # Catching the exception of an empty socket instead took 2 % of the router's time.
            if not int(sock.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            frame = sock.recv(zmq.NOBLOCK, copy=False)
            try:
                if frame.more:
                    raise ProtocolError("a message of several frames")
                data = frame.bytes
                size += len(data)
                message = decode(data, self._limits)
                messages += message.rows if isinstance(message, TokenBatch) else (message,)
            except ProtocolError as error:
                fault = f"worker {self.rank} broke the protocol: {error}"
                break
        else:
            self._read_on()
        if messages:
            self._events.messages(self.rank, messages)
        if fault is not None and self._socket is sock:
            self._events.lost(self.rank, fault)

    def _read_on(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._read)

    def _read_monitor(self) -> None:
        while self._monitor is not None and (event := next_event(self._monitor)) is not None:
            if event["event"] & _REFUSED:
                count_refused(event, self._refusals, f"worker {self.rank} at {self.endpoint}")
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
                self.send(Hello())
                self._events.up(self.rank)
            elif self._is_up:  # ZMQ itself tries again after a connection that ends before its handshake
                self._read()  # messages from before the break still count
                if self._socket is not None:
                    reason = f"worker {self.rank} at {self.endpoint} is gone: its connection broke"
                    self._events.broke(self.rank, reason)


def _is_long(message: Message) -> bool:
    return isinstance(message, Submit) and len(message.prompt_token_ids) > _LONG_PROMPT


async def refused(endpoint: str) -> bool:
    """Return whether the machine refuses a connection, because the worker's process has ended.

    False if the connection succeeds, and if there is no answer, because an unreachable machine may come back.
    """
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return False
    try:
        _, writer = await asyncio.open_connection(url.hostname, url.port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


async def gave_up(endpoint: str, seconds: float, answered: Callable[[], bool]) -> bool:
    """Wait until `answered`. Return True if it never is within `seconds`, or if no process listens at `endpoint`."""
    wait = _FIRST_LOOK
    with contextlib.suppress(TimeoutError):  # boundary: the time limit is an expected result
        async with asyncio.timeout(seconds):
            while not answered():
                if await refused(endpoint):
                    return not answered()
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_LOOK)
    return not answered()
