"""The worker's socket towards routers: messages of `protocol` over one ZMQ ROUTER, nothing of the engine.

Connections without a key of this fleet are refused. The socket refuses oversized frames before they are in memory.
Frames that are no message are dropped. All of these are counted, and the rank continues.
"""

import logging
import time
from collections.abc import Iterable, Iterator

import zmq

from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import MAX_PROMPT_LOGPROBS, Message, PromptExperts, PromptLogprobs, TokenBatch, Tokens
from moeyard_worker.refusals import Refusals
from moeyard_worker.scheduling.request import Reply
from moeyard_worker.sockets import REFUSED_EVENTS, Gate, count_refused, lock, next_event, set_heartbeats, watch
from moeyard_worker.wire import ProtocolError, decode, encode, request_limits

log = logging.getLogger(__name__)

# How long `close` waits until sent replies have left.
CLOSE_LINGER_MS = 500
# A request of 100,000 tokens takes 12 ms, and a router that has lost a rank sends hundreds at once.
_TURN_S = 0.5


def in_frames(replies: Iterable[Reply]) -> Iterator[tuple[bytes, Message]]:
    """Yield each router's messages of a step in few frames: those about prompts, then all tokens in one frame.

    Tokens of a forced output that fill a message have frames of their own, before the others of their request. Other
    messages, such as ends of requests, follow in order.
    """
    tokens: dict[bytes, list[Tokens]] = {}
    others: list[Reply] = []
    for reply in replies:
        if isinstance(reply.message, Tokens) and len(reply.message.token_ids) < MAX_PROMPT_LOGPROBS:
            tokens.setdefault(reply.client, []).append(reply.message)
        elif isinstance(reply.message, PromptLogprobs | PromptExperts | Tokens):
            yield reply.client, reply.message
        else:
            others.append(reply)
    for client, rows in tokens.items():
        yield client, TokenBatch(rows=tuple(rows))
    for reply in others:
        yield reply.client, reply.message


class Frontend:
    """Binds tcp://host:0 and serves any number of routers, each identified by its ZMQ identity.

    deadline: seconds of silence after which a router is gone.
    max_model_len: the most tokens of a prompt, which bounds the frames that are read.
    keys: admit routers by their key (None: any connection).
    refusals: counts refused connections and frames.
    socket, monitor: a caller that waits for one waits for both.
    """

    def __init__(self, host: str, *, deadline: float, max_model_len: int, keys: WorkerKeys | None = None) -> None:
        self.refusals = Refusals(log)
        self._limits = request_limits(max_model_len)
        self._context = zmq.Context()
        if keys is not None:
            Gate(self._context, key=keys.router)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # The socket must not drop the last reply of a request for a slow router, so its queue has no bound here. The
        # scheduler's limits bound the requests.
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
        """Yield the messages that have arrived, without blocking. Stop after _TURN_S seconds, because peers may wait.

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
        """Close the socket. Sent replies still leave, for at most CLOSE_LINGER_MS. Safe to call twice."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()
