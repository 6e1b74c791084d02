"""Clients that disconnect and workers that die, fail, hang or send garbage: one terminal reply each, at once.

These fleets do not replace lost workers (`recovery_timeout` 0); test_recovery.py covers replacement.
"""

import json
import select
import socket
import threading
import time

import pytest
from tests.limits import HANG_SECONDS
from tests.router.scripted_worker import ScriptedWorker
from tests.router.test_connection import connect, head

from moeyard_router.config import WorkerAddress
from moeyard_worker.protocol import Done, Hello, Tokens

COMPLETIONS = "/v1/completions"


def read_stream(service, results, **body):
    """Collect a stream's data lines in a thread's list."""
    with service.client.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True, **body}) as answer:
        results.extend(line[6:] for line in answer.iter_lines() if line)


def test_client_disconnects_from_a_stream(service, wait_for):
    for worker in service.workers:
        worker.pace = 0.01
    with service.client.stream(
        "POST", COMPLETIONS, json={"prompt": "x", "n": 3, "max_tokens": 250, "stream": True}
    ) as s:
        next(s.iter_lines())
    wait_for(lambda: len(service.aborts) == 3, "every sequence must be aborted")
    assert sorted(service.aborts) == sorted(s.request_id for s in service.submits)


def test_client_disconnects_before_an_answer(service, wait_for):
    for worker in service.workers:
        worker.paused = True
    body = b'{"prompt": "x", "n": 2}'
    with connect(service) as sock:
        sock.sendall(head(body) + body)
        wait_for(lambda: len(service.submits) == 2, "the workers must have the request")
    wait_for(lambda: len(service.aborts) == 2, "both sequences must be aborted")


def kill(worker):
    worker.die()


def report(worker):
    worker.fail("rank 1 silent at step 812")


def babble(worker):
    worker.do(lambda: worker.say_raw(b"\xc1 nonsense"))


def impersonate_router(worker):
    worker.do(lambda: worker.say(Hello()))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (kill, "worker 1 at tcp://"),
        (report, "rank 1 silent at step 812"),
        (babble, "worker 1 broke the protocol"),
        (impersonate_router, "worker 1 broke the protocol"),
    ],
)
def test_lost_worker(start, pool, wait_for, harm, named):
    service = start(2, recovery_timeout=0.0)
    for worker in service.workers:
        worker.pace = 0.01
    assert service.client.get("/readyz").status_code == 200
    streams = [[] for _ in range(4)]
    reading = [pool.submit(read_stream, service, events, max_tokens=250) for events in streams]
    whole = pool.submit(service.post, COMPLETIONS, prompt="x", max_tokens=250)
    wait_for(lambda: len(service.submits) == 5 and all(streams), "all five sequences must run")
    harm(service.workers[1])
    # No wait here depends on the step deadline, which is as long as the hang limit.
    wait_for(lambda: service.client.get("/readyz").status_code == 503, "readiness must end at once")
    for each, events in zip(reading, streams, strict=True):
        each.result()
        errors = [e for e in events if "error" in e]
        assert len(errors) == 1
        assert events[-1] == errors[0], "the error must be the last event, without [DONE]"
        assert named in json.loads(errors[0])["error"]["message"]
    assert whole.result().status_code == 503
    assert named in whole.result().json()["error"]["message"]
    refused = service.post(COMPLETIONS, prompt="x")
    assert refused.status_code == 503
    assert named in refused.json()["error"]["message"]
    assert named in service.client.get("/readyz").json()["reason"]
    assert service.client.get("/livez").status_code == 200
    fleet = service.client.get("/v1/fleet").json()
    assert fleet["inflight"] == 0
    assert named in fleet["failure"]
    assert len(service.failures) == 1
    assert named in service.failures[0]


@pytest.mark.parametrize("harm", [kill, report], ids=["killed", "reported"])
def test_new_workers_replace_lost_ones(start, story, pool, wait_for, harm):
    """New workers replace the failed ones, the fleet serves once each has decoded, and old workers are forgotten."""
    service = start(1, recovery_timeout=0.0)
    old = service.workers[0]
    old.pace = 0.01
    events = []
    reading = pool.submit(read_stream, service, events, max_tokens=250)
    wait_for(lambda: bool(events), "the request must run")
    harm(old)
    reading.result()
    assert "error" in events[-1]
    wait_for(lambda: service.client.get("/readyz").status_code == 503, "readiness must end")
    new = ScriptedWorker(0, 1, story)
    new.paused = True
    replaced = threading.Event()
    address = WorkerAddress(rank=0, endpoint=new.endpoint, metrics_url="http://127.0.0.1:9999/metrics")
    service.server.replace_workers((address,), replaced.set)
    try:
        assert replaced.wait(HANG_SECONDS)
        unready = lambda: service.client.get("/readyz").json().get("reason", "")  # noqa: E731
        wait_for(lambda: "warming up" in unready(), "readiness must wait for the first decode")
        new.paused = False
        wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
        old.die()
        assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
        fleet = service.client.get("/v1/fleet").json()
        assert (fleet["failure"], fleet["inflight"]) == (None, 0)
        assert fleet["workers"][0]["endpoint"] == new.endpoint
        (targets,) = service.client.get("/metrics/targets").json()
        assert targets["targets"] == ["127.0.0.1:9999"]
        assert len(service.failures) == 1
        # The new worker is watched like the old one.
        new.die()
        wait_for(lambda: len(service.failures) == 2, "the loss must be noticed")
    finally:
        new.die()


class Cable:
    """A TCP proxy that can stop forwarding: both ends stay connected and receive nothing."""

    def __init__(self, endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = (host, int(port))
        self.cut = False
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self._open = False
        self._thread.join()

    def _run(self):
        near, _ = self._listener.accept()
        with self._listener, near, socket.create_connection(self._target) as far:
            while self._open:
                if self.cut:
                    time.sleep(0.01)
                    continue
                for source in select.select([near, far], [], [], 0.01)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    (far if source is near else near).sendall(data)


def test_silent_worker_is_found_by_heartbeats(start, pool, wait_for):
    cables = []

    def through(endpoint):
        cables.append(Cable(endpoint))
        return cables[-1].endpoint

    try:
        service = start(2, through=through, step_deadline=2.0, recovery_timeout=0.0)
        service.workers[0].paused = service.workers[1].paused = True
        answer = pool.submit(service.post, COMPLETIONS, prompt="x", n=2)
        wait_for(lambda: len(service.submits) == 2, "the workers must have the request")
        began = time.monotonic()
        cables[1].cut = True
        wait_for(lambda: service.failures != [], "a cut cable must be noticed")
        assert time.monotonic() - began >= 2.0, "heartbeats must not extend the deadline"
        assert answer.result().status_code == 503
        assert "worker 1" in answer.result().json()["error"]["message"]
    finally:
        for cable in cables:
            cable.close()


def test_gap_in_tokens_is_a_broken_protocol(start, pool, wait_for):
    service = start(1, recovery_timeout=0.0)
    worker = service.workers[0]
    worker.paused = True
    answer = pool.submit(service.post, COMPLETIONS, prompt="x")
    wait_for(lambda: len(service.submits) == 1, "the worker must have the request")
    name = service.submits[0].request_id
    worker.do(lambda: worker.say(Tokens(request_id=name, start=3, token_ids=(5,))))
    assert answer.result().status_code == 503
    assert "start at 3" in answer.result().json()["error"]["message"]


@pytest.mark.parametrize(("retryable", "status"), [(True, 503), (False, 400)])
def test_error_of_one_request_leaves_others_alone(service, pool, wait_for, retryable, status):
    """Clients retry a 503, so an error that would happen again is a 400."""
    for worker in service.workers:
        worker.paused = True
    answer = pool.submit(service.post, COMPLETIONS, prompt="x", n=2)
    wait_for(lambda: len(service.submits) == 2, "the workers must have the request")
    victim = next(w for w in service.workers if w.submits)
    name = victim.submits[0].request_id
    done = Done(
        request_id=name,
        finish_reason="error",
        prompt_tokens=2,
        cached_tokens=0,
        completion_tokens=0,
        error="bad page",
        retryable=retryable,
    )
    victim.do(lambda: victim.say(done))
    assert answer.result().status_code == status
    assert "bad page" in answer.result().json()["error"]["message"]
    wait_for(lambda: len(service.aborts) == 1, "the other choice must be aborted")
    for worker in service.workers:
        worker.paused = False
        worker.forget(name)
    service.complete(prompt="y", max_tokens=3)


def test_late_and_repeated_frames_are_ignored(service):
    service.complete(prompt="x", max_tokens=3)
    worker = next(w for w in service.workers if w.submits)
    name = worker.submits[0].request_id
    done = Done(request_id=name, finish_reason="length", prompt_tokens=2, cached_tokens=0, completion_tokens=3)
    worker.do(lambda: worker.say(Tokens(request_id=name, start=3, token_ids=(5,))))
    worker.do(lambda: worker.say(done))
    worker.do(lambda: worker.say(done))
    assert service.complete(prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert service.client.get("/readyz").status_code == service.client.get("/health").status_code == 200


def test_not_ready_until_every_worker_has_decoded(start, wait_for):
    def pause(worker):
        worker.paused = worker.rank == 1

    service = start(2, ready=False, prepare=pause, canary_timeout=0.2)
    wait_for(lambda: "canary on worker 1" in service.client.get("/readyz").text, "readiness must name it")
    assert service.client.get("/readyz").status_code == 503
    service.workers[1].paused = False
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready once both decode")


def test_missing_worker(start):
    service = start(2, ready=False, through=lambda endpoint: "tcp://127.0.0.1:9")
    answer = service.client.get("/readyz")
    assert answer.status_code == service.client.get("/health").status_code == 503
    assert answer.json()["reason"] == "worker 0 at tcp://127.0.0.1:9 is not connected yet"
    refused = service.post(COMPLETIONS, prompt="x")
    assert refused.status_code == 503
    assert "not connected yet" in refused.json()["error"]["message"]


def test_canary_finds_a_dead_idle_fleet(start, wait_for):
    service = start(2, canary_interval=0.2, canary_timeout=0.2)
    step = service.workers[0].snapshot.step + service.workers[1].snapshot.step
    wait_for(
        lambda: service.workers[0].snapshot.step + service.workers[1].snapshot.step > step, "a canary must have run"
    )
    for worker in service.workers:
        worker.paused = True

    def canary_failed() -> bool:
        answer = service.client.get("/readyz")
        return answer.status_code == 503 and "canary" in answer.text

    wait_for(canary_failed, "the canary must fail")
    for worker in service.workers:
        worker.paused = False
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")


def test_worker_of_another_model(start, wait_for):
    service = start(1, ready=False, vocab_size=399)
    wait_for(lambda: service.failures != [], "a mismatch must be named")
    assert "400 token ids" in service.failures[0]


@pytest.mark.parametrize("recovery_timeout", [0.0, 300.0])
def test_stopping_worker_accepts_no_requests(start, wait_for, recovery_timeout):
    service = start(2, recovery_timeout=recovery_timeout)
    worker = service.workers[0]
    worker.report(state="stopping")
    wait_for(lambda: service.client.get("/readyz").status_code == 503, "a stopping worker must end readiness")
    if recovery_timeout:
        service.complete(prompt="x", n=4, max_tokens=3)
        assert len(service.workers[1].submits) == 4, "the other worker must serve the requests"
    else:
        assert service.post(COMPLETIONS, prompt="x").status_code == 503
    assert service.failures == []
