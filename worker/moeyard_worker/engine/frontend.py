"""The worker's socket towards routers: messages of `protocol` over one ZMQ ROUTER, nothing of the engine."""

import logging
from collections.abc import Iterable, Iterator

import zmq

from moeyard_worker.protocol import Message, PromptLogprobs, TokenBatch, Tokens
from moeyard_worker.scheduling.request import Reply
from moeyard_worker.wire import ProtocolError, decode, encode

log = logging.getLogger(__name__)

# How long closing waits for replies that were sent to leave; nothing waits when they have.
CLOSE_LINGER_MS = 500


def in_frames(replies: Iterable[Reply]) -> Iterator[tuple[bytes, Message]]:
    """What a step says to each router, in few frames: all its tokens in one, behind what is said of prompts.

    The rest, ends of requests among it, follows in its order.
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
    """Binds tcp://host:0 and speaks to any number of routers, each known by its ZMQ identity."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # A router that cannot take tokens must not make the socket drop a terminal reply: its queue is not bounded
        # here, requests are bounded by the scheduler's own limits.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
        # Unreachable routers raise instead of vanishing, so that their requests can be ended.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """All messages that have arrived, without blocking. Frames that are no message are logged and dropped."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                log.warning("a router sent %d frames, a message is one", len(frames) - 1)
                continue
            try:
                message = decode(frames[1])
            except ProtocolError as error:
                log.warning("a router sent a bad message: %s", error)
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
        self._context.destroy(linger=CLOSE_LINGER_MS)
