"""Queued requests in a real router: the order in which they reach a worker, and how their wait ends."""

import socket
import threading
import time

from tests.router.launcher import incidents, validate
from tests.router.scripted_worker import ScriptedWorker

from moeyard_router.config import AccessConfig, WorkerAddress
from moeyard_router.fleet.waiters import ready_sequences

BODY = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
PROMPTS = {"many": [5, 6], "few": [7, 8]}


def inflight(service):
    return service.client.get("/v1/fleet").json()


def test_workers_get_only_requests_they_can_run(start, pool, wait_for):
    service = start(2, worker_places=2, max_inflight=64)
    for worker in service.workers:
        worker.paused = True
    answers = [pool.submit(service.post, "/v1/completions", **BODY) for _ in range(12)]
    wait_for(lambda: inflight(service)["inflight"] == 12, "the router must accept all requests")
    # Each rank runs two and holds a ready one.
    held = 2 * (2 + ready_sequences(2, 128))
    wait_for(lambda: len(service.submits) >= held, "the workers must get what they can run")
    assert (len(service.submits), inflight(service)["waiting"]) == (held, 12 - held)
    assert "moeyard_num_requests_queued{" in service.client.get("/metrics").text
    for worker in service.workers:
        worker.paused = False
    assert {a.result().status_code for a in answers} == {200}
    assert "moeyard_router_queue_seconds_count" in service.client.get("/metrics").text
    service.wait_idle()


def test_disconnect_in_the_queue_never_reaches_a_worker(start, pool, wait_for):
    service = start(1, worker_places=1, max_inflight=64)
    service.workers[0].paused = True
    first = [pool.submit(service.post, "/v1/completions", **BODY) for _ in range(ready_sequences(1, 128) + 1)]
    wait_for(lambda: len(service.submits) == len(first), "the slots must be in use")

    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        data = b'{"prompt": [7, 8], "max_tokens": 2, "n": 3}'
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        wait_for(lambda: inflight(service)["waiting"] == 3, "three sequences must queue")
    wait_for(lambda: inflight(service)["waiting"] == 0, "the queue must be empty")
    service.workers[0].paused = False
    assert {a.result().status_code for a in first} == {200}
    assert all(tuple(s.prompt_token_ids) == (5, 6) for s in service.submits)
    service.wait_idle()


def test_queue_timeout_is_a_429(start, pool, wait_for):
    service = start(1, worker_places=1, max_inflight=64, max_queue_seconds=0.2)
    service.workers[0].paused = True
    held = [pool.submit(service.post, "/v1/completions", **BODY) for _ in range(ready_sequences(1, 128) + 1)]
    wait_for(lambda: len(service.submits) == len(held), "the slots must be in use")
    refused = service.post("/v1/completions", **BODY, n=2)
    assert refused.status_code == 429
    assert refused.json()["error"]["message"].endswith("for its start")
    assert int(refused.headers["retry-after"]) >= 1
    assert 'reason="queue_timeout"} 1.0' in service.client.get("/metrics").text
    service.workers[0].paused = False
    assert {a.result().status_code for a in held} == {200}
    service.wait_idle()


def test_queued_requests_fail_when_the_fleet_is_lost(start, pool, wait_for):
    service = start(1, worker_places=1, max_inflight=64, recovery_timeout=0)
    service.workers[0].paused = True
    answers = [pool.submit(service.post, "/v1/completions", **BODY) for _ in range(5)]
    wait_for(lambda: inflight(service)["inflight"] == 5, "the router must accept all requests")
    service.workers[0].fail("spoilt")
    assert {a.result().status_code for a in answers} == {503}
    wait_for(lambda: inflight(service)["inflight"] == 0, "no request may wait for ever")


def test_keys_take_turns_and_the_one_with_most_requests_makes_room(start, pool, wait_for, tmp_path):
    (tmp_path / "keys").write_text("many:key-of-many\nfew:key-of-few\n")
    service = start(1, worker_places=1, max_inflight=8, access=AccessConfig(api_key_file=tmp_path / "keys"))
    service.client.headers["authorization"] = "Bearer key-of-many"
    service.workers[0].paused = True
    lock, ended = threading.Lock(), []

    def ask(key):
        body = {**BODY, "prompt": PROMPTS[key]}
        answer = service.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer key-of-{key}"})
        with lock:
            ended.append((key, answer.status_code))

    many = [pool.submit(ask, "many") for _ in range(8)]
    wait_for(lambda: inflight(service)["inflight"] == 8, "the fleet is full")
    few = [pool.submit(ask, "few") for _ in range(2)]
    held = 1 + ready_sequences(1, 128)
    # The newest requests of the key with the most make room, so two of them are refused.
    wait_for(lambda: len(ended) == 2, "two requests must make room")
    assert ended == [("many", 429)] * 2
    wait_for(lambda: inflight(service)["waiting"] == 8 - held, "the other requests must queue")
    service.workers[0].paused = False
    for each in (*many, *few):
        each.result()
    assert {status for key, status in ended if key == "few"} == {200}
    # The key without earlier requests did not wait for all of the other key's requests.
    keys = {tuple(prompt): key for key, prompt in PROMPTS.items()}
    order = [keys[tuple(s.prompt_token_ids)] for s in service.submits]
    assert order == ["many"] * held + ["many", "few"] * 2 + ["many"] * (4 - held)
    service.wait_idle()


def test_ready_sequences_replace_those_that_end_in_a_step():
    assert [ready_sequences(64, n) for n in (1, 16, 64, 99, 100, 1000)] == [64, 4, 1, 1, 0, 0]
    assert [ready_sequences(256, n) for n in (16, 128, 1000)] == [16, 2, 0]
    assert ready_sequences(1, 10) == 1


def test_queued_requests_survive_a_recovery(start, pool, wait_for, story):
    """The time limit pauses, new requests are accepted, and requests that had a slot go first."""
    service = start(2, worker_places=1, max_inflight=64, max_queue_seconds=1.5)
    one, other = service.workers
    for worker in service.workers:
        worker.paused = True
    held = 2 * (1 + ready_sequences(1, 128))
    answers = [pool.submit(service.post, "/v1/completions", **BODY) for _ in range(held)]
    wait_for(lambda: len(service.submits) == held, "the slots must be in use")
    other.hold("rank 0 lost at step 8")
    one.die()
    wait_for(lambda: service.lost == [0], "the loss must be reported")
    answers += [pool.submit(service.post, "/v1/completions", **{**BODY, "prompt": [7, 8]}) for _ in range(4)]
    wait_for(lambda: inflight(service)["inflight"] == held + 4, "the router must accept requests while nothing runs")
    wait_for(lambda: incidents(service)[0]["state"] == "recovering", "the incident must be open")
    time.sleep(1.8)  # Longer than the queue time limit of a healthy fleet; only real time shows that the limit is off.
    new = service.workers[0] = ScriptedWorker(0, 2, story, epoch=1)
    addresses = tuple(WorkerAddress(rank=w.rank, endpoint=w.endpoint) for w in service.workers)
    service.server.replace_workers(addresses, lambda: None, None)
    other.paused = False
    other.go_on(1)
    assert {a.result().status_code for a in answers} == {200}
    assert tuple(new.submits[0].prompt_token_ids) == (5, 6), "requests that had a slot must go first"
    assert sum(tuple(s.prompt_token_ids) == (7, 8) for s in service.submits) == 4, "no request may be sent twice"
    page = service.client.get("/metrics").text
    assert 'reason="queue_timeout"} 0.0' in page
    assert 'moeyard_router_queue_seconds_count{model_name="tiny"} 4.0' in page
    service.wait_idle()
    validate(service)
