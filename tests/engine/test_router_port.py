"""The port of a rank for routers: keys, sizes, replays, and the log of refusals."""

import logging
import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq
from tests.limits import HANG_SECONDS
from tests.strangers import bad_messages, one_byte_and_gone, say, try_key

from moeyard_worker.engine.loop import frontend
from moeyard_worker.engine.loop.frontend import Frontend
from moeyard_worker.keys import RouterKeys
from moeyard_worker.protocol import MAX_GRAMMAR_BYTES, Abort, Grammar, Hello, Message, SamplingParams, Submit, TokenIds
from moeyard_worker.refusals import LINES, MAX_QUOTE, SECONDS, Refusals
from moeyard_worker.sockets import make_keys, unlock
from moeyard_worker.wire import MAX_NAME_BYTES, ProtocolError, decode, encode, reply_limits, request_limits

MAX_MODEL_LEN = 256
LIMITS = request_limits(MAX_MODEL_LEN)


class Service:
    """A rank's frontend without an engine, and the routers that connect to it."""

    def __init__(self) -> None:
        self.keys = make_keys()
        self.frontend = Frontend("127.0.0.1", deadline=30.0, max_model_len=MAX_MODEL_LEN, keys=self.keys.of_worker())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.routers: list[zmq.Socket[bytes]] = []

    @property
    def counts(self) -> dict[str, int]:
        return self.frontend.refusals.counts

    def router(self, keys: RouterKeys | None = None, address: str | None = None) -> "zmq.Socket[bytes]":
        keys = keys or self.keys.of_router()
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        unlock(client, keys.own, keys.worker)
        client.connect(address or self.frontend.endpoint)
        self.routers.append(client)
        return client

    def until(self, done: Callable[[list[Message]], bool]) -> list[Message]:
        """Receive messages until `done` returns true for them."""
        heard: list[Message] = []
        poller, limit = zmq.Poller(), perf_counter() + HANG_SECONDS
        for each in (self.frontend.socket, self.frontend.monitor):
            poller.register(each, zmq.POLLIN)
        while not done(heard):
            assert perf_counter() < limit, (heard, self.counts)
            poller.poll(100)
            heard += [message for _, message in self.frontend.receive()]
        return heard

    def counted(self, **expected: int) -> None:
        """Wait until these numbers of refusals are counted and no message arrived."""
        assert self.until(lambda _: self.counts == expected) == []

    def serves(self, client: "zmq.Socket[bytes]") -> None:
        """Check that an earlier router is still served."""
        client.send(encode(Hello()))
        assert self.until(bool) == [Hello()]

    def close(self) -> None:
        for router in self.routers:
            router.close()
        self.context.term()
        self.frontend.close()
        self.frontend.close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_stranger_is_refused_and_counted(service: Service) -> None:
    client = service.router()
    service.serves(client)
    tries = bad_messages(b"DEALER")
    for parts in tries:
        say(service.frontend.endpoint, *parts)
    for _ in range(5):
        one_byte_and_gone(service.frontend.endpoint, b"DEALER")
    # Some are no failed handshake: one speaks another protocol, one leaves before it sends anything.
    service.until(lambda _: service.counts.get("handshake", 0) >= len(tries) + 5 - 2)
    assert service.counts.keys() == {"handshake"}
    service.serves(client)


def test_unknown_key_is_refused_and_counted(service: Service) -> None:
    client = service.router()
    server = service.keys.workers.public
    assert try_key(service.context, zmq.DEALER, service.frontend.endpoint, server) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    service.counted(unknown_key=1)
    # A rank's own key is not a router's.
    ranks = RouterKeys(own=service.keys.workers, worker=server)
    service.router(ranks).send(encode(Hello()))
    service.until(lambda heard: service.counts["unknown_key"] >= 2 and not heard)
    service.serves(client)


class Tap(threading.Thread):
    """A TCP proxy that copies the bytes from client to server."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.copied = b""
        self.start()

    def run(self) -> None:
        near, far = self._listener.accept()[0], socket.create_connection(self._target)
        with self._listener, near, far:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is near:
                        self.copied += data
                    (far if source is near else near).sendall(data)


def test_replay_is_refused_and_counted(service: Service) -> None:
    tap = Tap(service.frontend.endpoint)
    client = service.router(address=tap.endpoint)
    secret = "a name that others must not read"
    client.send(encode(Abort(request_id=secret)))
    assert service.until(bool) == [Abort(request_id=secret)]
    assert secret.encode() not in tap.copied, "sent in plain text"
    # Replay all of it, greeting and handshake included, as an eavesdropper would.
    say(service.frontend.endpoint, tap.copied[:64], tap.copied[64:])
    service.counted(handshake=1)
    client.send(encode(Abort(request_id="again")))
    assert service.until(bool) == [Abort(request_id="again")]
    client.close()
    tap.join(HANG_SECONDS)


def submit(tokens: int = 3, **changes: Any) -> Submit:
    sampling = SamplingParams(**{"max_tokens": 1, **changes})
    return Submit(request_id="a" * MAX_NAME_BYTES, prompt_token_ids=TokenIds.of([7] * tokens), sampling=sampling)


def test_too_large_frame_disconnects_only_its_sender(service: Service) -> None:
    """A frame with a hundred million ids would be such. The socket refuses it before it is in memory."""
    client, greedy = service.router(), service.router()
    service.serves(client)
    service.serves(greedy)
    monitor = greedy.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    greedy.send(encode(submit(LIMITS.frame_bytes // 4 + 1)))
    assert monitor.poll(10_000), "the connection must end"
    greedy.disable_monitor()
    monitor.close(0)
    service.serves(client)


BAD = {
    "pickle": pickle.dumps({"v": 2, "type": "hello"}),
    "garbage": bytes(range(256)),
    "empty": b"",
    "list": msgpack.packb([1, 2, 3]),
    "version": msgpack.packb({"v": "x" * 50_000, "type": "hello"}),
    "type": msgpack.packb({"v": 2, "type": "y" * 50_000}),
    "field": msgpack.packb({"v": 2, "type": "hello", "z" * 50_000: 1}),
    "value": msgpack.packb({"v": 2, "type": "abort", "request_id": list(range(4000))}),
    "name": msgpack.packb({"v": 2, "type": "abort", "request_id": "x" * (MAX_NAME_BYTES + 1)}),
    "deep": b"\x91" * 5000,
    "wide": msgpack.packb([0] * 5000),
    "claims": b"\xdd\xff\xff\xff\xff",
    "extension": msgpack.packb(msgpack.ExtType(5, b"x")),
}


def test_log_lines_of_bad_messages_are_short_and_few(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    client = service.router()
    with caplog.at_level(logging.WARNING):
        for frame in BAD.values():
            client.send(frame)
        client.send_multipart([b"a", b"b"])
        service.counted(message=len(BAD), frames=1)
    assert len(caplog.records) == LINES
    assert max(len(record.getMessage()) for record in caplog.records) < MAX_QUOTE + 100
    service.serves(client)


def test_bad_frames_do_not_delay_a_step(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client, now = service.router(), [0.0]
    service.serves(client)
    monkeypatch.setattr(frontend, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(*_: Any) -> Message:
        now[0] += 0.3
        raise ProtocolError("not msgpack")

    monkeypatch.setattr(frontend, "decode", slow)
    for _ in range(5):
        client.send(b"x")
    service.until(lambda _: service.counts == {"message": 2})
    service.counted(message=5)


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_protocol_errors_are_short(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(frame, LIMITS)
    assert len(str(raised.value)) < 2 * MAX_QUOTE


def test_largest_request_of_a_router_is_accepted() -> None:
    largest = submit(
        MAX_MODEL_LEN,
        logit_bias={2**31 + i: 1.5 for i in range(1024)},
        stop_token_ids=tuple(range(2**31, 2**31 + 1024)),
        grammar=Grammar(kind="regex", text="x" * MAX_GRAMMAR_BYTES),
    )
    frame = encode(largest)
    assert decode(frame, LIMITS) == largest
    # Longer ones decode too, so that a rank can refuse them by name.
    assert decode(encode(submit(2 * MAX_MODEL_LEN)), LIMITS)
    assert decode(encode(submit(8, grammar=Grammar(kind="regex", text="x" * 2 * MAX_GRAMMAR_BYTES))), LIMITS)
    with pytest.raises(ProtocolError, match=r"a frame of \d+ bytes, at most \d+ are read"):
        decode(frame + bytes(LIMITS.frame_bytes), LIMITS)


def test_limits_grow_with_the_configured_lengths() -> None:
    assert request_limits(131_072).frame_bytes < 2 << 20
    assert reply_limits(1).frame_bytes < reply_limits(1000).frame_bytes < 64 << 20


def test_refusal_lines_are_truncated_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(logging.getLogger("moeyard_worker.test"), clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(LINES + 7):
            refusals.add("message", "x" * 60_000_000 if not refusals.counts else "short")
        assert len(caplog.records) == LINES
        now[0] = SECONDS
        refusals.add("handshake", "y")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"refused (message): {'x' * MAX_QUOTE}... (60000000 characters)"
    assert lines[1] == "refused (message): short"
    assert lines[-1] == "refused (handshake): y (7 more like it were not written)"
    assert refusals.counts == {"message": LINES + 7, "handshake": 1}
