"""The worker's socket towards routers: messages of `protocol` over one ZMQ ROUTER, nothing of the engine.

Connections without a key of this fleet are refused. The socket cuts off oversized frames before they are in memory.
Frames that are no message are dropped. All of these are counted, and the rank goes on.
"""

import logging
import time
from collections.abc import Iterable, Iterator

import zmq

from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import Message, PromptLogprobs, TokenBatch, Tokens
from moeyard_worker.refusals import Refusals
from moeyard_worker.scheduling.request import Reply
from moeyard_worker.sockets import REFUSED_EVENTS, Gate, count_refused, lock, next_event, set_heartbeats, watch
from moeyard_worker.wire import ProtocolError, decode, encode, request_limits

log = logging.getLogger(__name__)

# How long closing waits for replies that were sent to leave; nothing waits when they have.
CLOSE_LINGER_MS = 500
# A request of 100,000 tokens takes 12 ms, and a router that has lost a rank sends hundreds at once.
_TURN_S = 0.5


def in_frames(replies: Iterable[Reply]) -> Iterator[tuple[bytes, Message]]:
    """Yield the messages of a step for each router in few frames: scores of prompts, then all tokens in one frame.

    Other messages, such as ends of requests, follow in order.
    """
    tokens: dict[bytes, list[Tokens]] = {}
    others: list[Reply] = []
    for reply in replies:
        if isinstance(reply.message, Tokens):
            tokens.setdefault(reply.client, []).append(reply.message)
        elif isinstance(reply.message, PromptLogprobs):
            yield reply.client, reply.message
        else:
            others.append(reply)
    for client, rows in tokens.items():
        yield client, TokenBatch(rows=tuple(rows))
    for reply in others:
        yield reply.client, reply.message


class Frontend:
    """Binds tcp://host:0 and speaks to any number of routers, each known by its ZMQ identity.

    Routers are those with a key that `keys` admit (None: anybody); one that is silent for `deadline` seconds is gone.
    Prompts have at most `max_model_len` tokens, which bounds what is read. `refusals` counts the rest.
    A caller that waits for `socket` waits for `monitor` too.
    """

    def __init__(self, host: str, *, deadline: float, max_model_len: int, keys: WorkerKeys | None = None) -> None:
        self.refusals = Refusals(log)
        self._limits = request_limits(max_model_len)
        self._context = zmq.Context()
        if keys is not None:
            Gate(self._context, key=keys.router)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # A router that cannot take tokens must not make the socket drop a terminal reply: its queue is not bounded
        # here, requests are bounded by the scheduler's own limits.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, self._limits.frame_bytes)
        set_heartbeats(self.socket, deadline)
        # Unreachable routers raise instead of vanishing, so that their requests can be ended.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            lock(self.socket, keys.own)
        self.monitor = watch(self.socket, REFUSED_EVENTS)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yield the messages that have arrived, without blocking, for at most _TURN_S seconds, since peers may wait.

        Frames that are no message are counted and dropped.
        """
        limit = time.monotonic() + _TURN_S
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN and (event := next_event(self.monitor)) is not None:
            count_refused(event, self.refusals, "a connection to the port for routers")
        while time.monotonic() < limit:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self.refusals.add("frames", f"a router sent {len(frames) - 1} frames, a message is one")
                continue
            try:
                message = decode(frames[1], self._limits)
            except ProtocolError as error:
                self.refusals.add("message", f"a router sent a bad message: {error}")
                continue
            yield frames[0], message

    def send(self, client: bytes, message: Message) -> bool:
        """Send to one router; False when it is gone."""
        try:
            self.socket.send_multipart((client, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the socket; what was sent still leaves, for at most CLOSE_LINGER_MS. Safe to call twice."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()
