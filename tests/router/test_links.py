"""Connections to workers: under keys, broken and made again, and what a worker that was never met is called."""

import dataclasses
import logging
import select
import socket
import threading

from tests.limits import HANG_SECONDS

from moeyard_worker.sockets import make_keys

COMPLETIONS = "/v1/completions"


class Relay:
    """Carries connections to a worker and back; `drop` ends those there are, and the worker listens on."""

    def __init__(self, endpoint):
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._tell, self._told = socket.socketpair()
        self.met = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def drop(self):
        self._tell.send(b"d")

    def close(self):
        self._tell.send(b"c")
        self._thread.join(HANG_SECONDS)
        self._tell.close()

    def _run(self):
        other = {}
        while True:
            for source in select.select([self._listener, self._told, *other], [], [])[0]:
                if source is self._listener:
                    near, far = self._listener.accept()[0], socket.create_connection(self._target)
                    other |= {near: far, far: near}
                    self.met += 1
                    continue
                order = self._told.recv(1) if source is self._told else b""
                if source in other and _carry(source, other[source]):
                    continue
                # One pair, or on order all of them.
                for each in [source, other[source]] if source in other else list(other):
                    each.close()
                    del other[each]
                if order == b"c":
                    self._listener.close()
                    self._told.close()
                    return
                break


def _carry(source, target):
    """What has come; false once either has ended: with a reset, where it closes before it has read all."""
    try:
        data = source.recv(65536)
        target.sendall(data)
    except ConnectionError:
        return False
    return bool(data)


def test_a_worker_that_lives_is_met_again(start, pool, wait_for):
    """What was in flight with it is begun again, what others do goes on, and the fleet serves."""
    relays = []

    def through(endpoint):
        relays.append(Relay(endpoint))
        return relays[-1].endpoint

    service = start(2, through=through)
    try:
        for worker in service.workers:
            worker.paused = True
        answers = [pool.submit(service.post, COMPLETIONS, prompt="x", max_tokens=3, seed=seed) for seed in range(2)]
        wait_for(lambda: all(w.submits for w in service.workers), "each worker must have one")
        relays[1].drop()
        wait_for(lambda: relays[1].met >= 2, "it must be met again")
        for worker in service.workers:
            worker.paused = False
        assert [answer.result().status_code for answer in answers] == [200, 200], "what ran there goes on"
        assert service.client.get("/readyz").status_code == 200
        for _ in range(4):
            assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
        assert service.failures == []
    finally:
        for relay in relays:
            relay.close()


def test_a_router_with_the_keys_of_a_fleet_serves(start):
    keys = make_keys()
    service = start(2, locked=keys.of_worker(), keys=keys.of_router())
    assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert service.failures == []


def test_a_router_with_other_keys_meets_nobody_and_says_why(start, wait_for, caplog):
    keys, others = make_keys(), make_keys()
    # It knows the ranks' public key, and has no key of theirs.
    stranger = dataclasses.replace(others.of_router(), worker=keys.workers.public)
    with caplog.at_level(logging.WARNING, logger="moeyard_router"):
        service = start(1, ready=False, locked=keys.of_worker(), keys=stranger)
        wait_for(lambda: "unknown_key" in caplog.text, "it must be said")
        assert "worker 0 at tcp://" in caplog.text
        assert "is not connected yet" in service.client.get("/readyz").text
    assert service.workers[0].submits == []
