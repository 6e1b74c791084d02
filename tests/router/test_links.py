"""Connections to workers: with keys, broken and restored; and the log line of a worker that never connected."""

import dataclasses
import logging
import select
import socket
import threading

from tests.limits import HANG_SECONDS

from moeyard_worker.sockets import make_keys

COMPLETIONS = "/v1/completions"


class Relay:
    """A proxy between the router and a worker; `drop` closes its connections while the worker continues to listen."""

    def __init__(self, endpoint):
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._order_sender, self._order_receiver = socket.socketpair()
        self.num_accepted = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def drop(self):
        self._order_sender.send(b"d")

    def close(self):
        self._order_sender.send(b"c")
        self._thread.join(HANG_SECONDS)
        self._order_sender.close()

    def _run(self):
        other = {}
        while True:
            for source in select.select([self._listener, self._order_receiver, *other], [], [])[0]:
                if source is self._listener:
                    near, far = self._listener.accept()[0], socket.create_connection(self._target)
                    other |= {near: far, far: near}
                    self.num_accepted += 1
                    continue
                order = self._order_receiver.recv(1) if source is self._order_receiver else b""
                if source in other and _carry(source, other[source]):
                    continue
                # Close one pair, or all pairs after an order.
                for each in [source, other[source]] if source in other else list(other):
                    each.close()
                    del other[each]
                if order == b"c":
                    self._listener.close()
                    self._order_receiver.close()
                    return
                break


def _carry(source, target):
    """Forward received data; return False once a side has closed, possibly with a reset."""
    try:
        data = source.recv(65536)
        target.sendall(data)
    except ConnectionError:
        return False
    return bool(data)


def test_router_reconnects_to_a_living_worker(start, pool, wait_for):
    """Its requests start again, requests of the other worker continue, and the fleet serves."""
    relays = []

    def through(endpoint):
        relays.append(Relay(endpoint))
        return relays[-1].endpoint

    service = start(2, through=through)
    try:
        for worker in service.workers:
            worker.paused = True
        answers = [pool.submit(service.post, COMPLETIONS, prompt="x", max_tokens=3, seed=seed) for seed in range(2)]
        wait_for(lambda: all(w.submits for w in service.workers), "each worker must have a request")
        relays[1].drop()
        wait_for(lambda: relays[1].num_accepted >= 2, "the router must connect again")
        for worker in service.workers:
            worker.paused = False
        assert [answer.result().status_code for answer in answers] == [200, 200], "requests of both workers must finish"
        assert service.client.get("/readyz").status_code == 200
        for _ in range(4):
            assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
        assert service.failures == []
    finally:
        for relay in relays:
            relay.close()


def test_router_with_the_fleets_keys_serves(start):
    keys = make_keys()
    service = start(2, locked=keys.of_worker(), keys=keys.of_router())
    assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert service.failures == []


def test_router_with_wrong_keys_logs_the_reason(start, wait_for, caplog):
    keys, others = make_keys(), make_keys()
    # The router knows the ranks' public key, but its own key is unknown to them.
    stranger = dataclasses.replace(others.of_router(), worker=keys.workers.public)
    with caplog.at_level(logging.WARNING, logger="moeyard_router"):
        service = start(1, ready=False, locked=keys.of_worker(), keys=stranger)
        wait_for(lambda: "unknown_key" in caplog.text, "the log must name the unknown key")
        assert "worker 0 at tcp://" in caplog.text
        assert "is not connected yet" in service.client.get("/readyz").text
    assert service.workers[0].submits == []
