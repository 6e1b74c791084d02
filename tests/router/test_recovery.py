"""Workers lost under load and replaced: no request fails, and no token is lost, repeated or changed."""

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.limits import HANG_SECONDS
from tests.router.launcher import (
    COMPLETIONS,
    WORLD,
    Launcher,
    bodies,
    errors,
    folded,
    in_flight,
    incidents,
    prepared,
    sampled,
    validate,
)
from tests.router.scripted_worker import ScriptedWorker

from moeyard_router.config import WorkerAddress
from moeyard_router.fleet import admission
from moeyard_worker.protocol import Done, Rejected


def one(service, launcher, wait_for, moment):
    launcher.kill(moment % WORLD)
    wait_for(lambda: service.lost == [moment % WORLD], "the loss must be reported")
    reason = service.client.get("/readyz").json()["reason"]
    assert reason.startswith("recovering: ")
    assert service.client.get("/livez").status_code == 200
    launcher.heal(moment % WORLD)
    return 1


def two_at_once(service, launcher, wait_for, moment):
    ranks = [rank for rank in range(WORLD) if rank != moment % WORLD]
    launcher.kill(*ranks)
    wait_for(lambda: sorted(service.lost) == ranks, "both losses must be reported")
    launcher.heal(*ranks)
    return 1


def all_of_them(service, launcher, wait_for, moment):
    launcher.kill(*range(WORLD))
    wait_for(lambda: sorted(service.lost) == list(range(WORLD)), "all losses must be reported")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(service.complete, prompt="come in", max_tokens=3)
        wait_for(lambda: service.client.get("/v1/fleet").json()["waiting"] > 16, "the requests must queue")
        launcher.heal(*range(WORLD))
        assert late.result()["usage"]["completion_tokens"] == 3
    return 1


def during_recovery(service, launcher, wait_for, moment):
    first, second = moment % WORLD, (moment + 1) % WORLD
    launcher.kill(first)
    wait_for(lambda: service.lost == [first], "the first loss must be reported")
    launcher.replace(first)
    # The router reports the loss of a worker that it has seen.
    wait_for(lambda: launcher.workers[first]._peers, "the router must connect to the replacement")
    launcher.kill(second, first)
    wait_for(lambda: sorted(service.lost) == sorted([first, first, second]), "both further losses must be reported")
    launcher.heal(first, second)
    return 1


def connection_alone(service, launcher, wait_for, moment):
    launcher.workers[moment % WORLD].hang_up()
    wait_for(lambda: incidents(service) and incidents(service)[0]["state"] == "recovered", "recovery must end")
    assert service.lost == []
    assert service.server._fleet.admission.generation == 0
    return 1


@pytest.mark.parametrize("fault", [one, two_at_once, all_of_them, during_recovery, connection_alone])
def test_no_request_is_lost_or_changed(launched, wait_for, fault, pool):
    service, launcher = launched
    asked = [{**body, "return_routed_experts": i % 2 == 0} for i, body in enumerate(bodies())]
    expected = list(pool.map(lambda body: folded(service, body), asked))
    begun = sampled(service)
    moment = random.Random(fault.__name__).randrange(60, 300)
    answers = [pool.submit(folded, service, body) for body in asked]
    wait_for(lambda: sampled(service) - begun > moment, "the requests must run")
    count = fault(service, launcher, wait_for, moment)
    assert [answer.result() for answer in answers] == expected
    service.wait_idle()
    validate(service)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    records = incidents(service)
    assert len(records) == count
    assert records[0]["state"] == "recovered"
    assert records[0]["requests_carried"] > 0
    assert records[0]["tokens_recomputed"] > 0
    # The order may vary: the router may read a worker's tokens before another worker's message that the fleet is whole.
    assert min(records[0]["seconds_until_whole"], records[0]["seconds_until_output"]) > 0
    page = service.client.get("/metrics").text
    assert f'moeyard_requests_carried_total{{model_name="tiny"}} {float(records[0]["requests_carried"])}' in page
    assert f'moeyard_recoveries_total{{model_name="tiny"}} {float(count)}' in page
    assert f'moeyard_recovery_seconds_count{{model_name="tiny"}} {float(count)}' in page


def test_giving_up_ends_all_requests_and_the_server(launched, wait_for, pool):
    service, launcher = launched
    streams = in_flight(service, pool, wait_for)
    launcher.kill(0)
    ended = []
    request_exit = service.server._server.request_exit
    service.server._server.request_exit = lambda at_once: ended.append(at_once)
    service.server.give_up("rank 0 was lost three times in 60 s")
    wait_for(lambda: ended == [False], "the server must stop on its own")
    answer = service.client.get("/livez")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "rank 0 was lost three times in 60 s"
    for stream in streams:
        assert errors(stream) == ["rank 0 was lost three times in 60 s"]
    assert service.post(COMPLETIONS, prompt="x").status_code == 503
    launcher.heal(0)
    assert service.client.get("/livez").status_code == 503, "giving up must be final"
    assert incidents(service)[0]["state"] == "failed"
    service.server._loop.call_soon_threadsafe(lambda: request_exit(at_once=False))

    def refused():
        try:
            service.client.get("/livez")
        except httpx.TransportError:
            return True
        return False

    wait_for(refused, "serve must return")


def test_recovery_timeout(start, script, wait_for, pool):
    """The fleet has then failed, until a launcher restores it after all."""
    service = start(2, prepare=lambda worker: prepared(worker, script), recovery_timeout=0.3)
    launcher = Launcher(service, script)
    streams = in_flight(service, pool, wait_for)
    launcher.kill(1)
    for stream in streams:
        (error,) = errors(stream)
        assert "was not whole again within 0.3 s" in error
    assert service.post(COMPLETIONS, prompt="x").status_code == 503
    assert service.client.get("/livez").status_code == 200
    validate(service)
    launcher.heal(1)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must serve again")
    service.complete(prompt="x", max_tokens=3)


def kill_busy_worker(service, launcher, wait_for):
    """Kill the worker that runs the only request."""
    victim, lost = next(w for w in service.workers if w.runs), len(service.lost)
    victim.paused = True
    launcher.kill(victim.rank)
    wait_for(lambda: len(service.lost) == lost + 1, "the loss must be reported")
    return victim


def test_repeated_losses_end_no_request(launched, wait_for, pool, monkeypatch):
    """After two losses the request waits until the fleet has been whole for a while, so later losses do not count."""
    service, launcher = launched
    monkeypatch.setattr(admission, "CALM_SECONDS", 1e6)
    (stream,) = in_flight(service, pool, wait_for, count=1, max_tokens=250)
    for number in range(2):
        launcher.heal(kill_busy_worker(service, launcher, wait_for).rank)
        if number == 0:
            wait_for(lambda: any(w.runs for w in service.workers), "the request must run again")

    def ready():
        return service.client.get("/readyz").status_code == 200

    for calm in (1e6, 0.01):
        wait_for(ready, "the fleet must be ready again")
        launcher.kill(*range(WORLD))
        wait_for(lambda: not ready(), "all are lost")
        monkeypatch.setattr(admission, "CALM_SECONDS", calm)
        launcher.heal(*range(WORLD))
    assert errors(stream) == []
    service.wait_idle()
    validate(service)


def test_request_that_kills_three_workers_ends(launched, wait_for, pool, monkeypatch):
    service, launcher = launched
    monkeypatch.setattr(admission, "CALM_SECONDS", 0.01)
    (stream,) = in_flight(service, pool, wait_for, count=1, max_tokens=250)
    for number in range(3):
        victim = kill_busy_worker(service, launcher, wait_for)
        if number < 2:
            launcher.heal(victim.rank)
            wait_for(lambda: any(w.runs for w in service.workers), "the request must run again")
    (error,) = errors(stream)
    assert error.startswith("3 workers were lost while they ran this request")
    launcher.heal(victim.rank)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must serve without the request")
    service.wait_idle()
    validate(service)


def test_client_disconnects_while_its_worker_is_lost(launched, wait_for):
    service, launcher = launched
    with service.client.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 250, "stream": True}) as answer:
        lines = answer.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        rank = next(w for w in service.workers if w.runs).rank
        launcher.kill(rank)
        wait_for(lambda: service.lost == [rank], "the loss must be reported")
        assert service.client.get("/v1/fleet").json()["waiting"] == 1
    service.wait_idle()
    validate(service)
    launcher.heal(rank)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    assert service.workers[rank].submits == []
    assert incidents(service)[0]["requests_carried"] == 0


def test_worker_with_another_epoch_is_a_new_worker(launched, wait_for):
    service, launcher = launched
    worker = service.workers[1]
    worker.do(lambda: setattr(worker, "snapshot", dataclasses.replace(worker.snapshot, epoch=7)))
    wait_for(lambda: worker.snapshot.epoch == 7, "the worker must have the new epoch")
    worker.hang_up()
    wait_for(lambda: service.lost == [1], "the rank must count as lost")
    assert "its epoch is 7, and was 0" in service.failures[0]
    worker.die()
    launcher.epoch = 7
    launcher.heal(1, incident={"finding": "rank 1 was started by somebody else"})
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    assert incidents(service)[0]["launcher"] == {"finding": "rank 1 was started by somebody else"}
    assert incidents(service)[0]["ranks"] == [1]


def test_stopping_worker_hands_over_its_requests(launched, wait_for, pool):
    service, _ = launched
    (stream,) = in_flight(service, pool, wait_for, count=1, max_tokens=100)
    worker = next(w for w in service.workers if w.runs)

    def stop():
        worker.snapshot = dataclasses.replace(worker.snapshot, state="stopping")
        worker.say(worker.snapshot)
        worker._end(worker.forget(worker.runs[0]), "abort")

    worker.do(stop)
    assert errors(stream) == []
    assert len(service.submits) == 2
    assert service.submits[0].prompt_token_ids == service.submits[1].prompt_token_ids


def test_moved_request_is_not_refused(launched, wait_for, pool):
    """The router accepted it earlier, so it asks a rank with a full queue again."""
    service, launcher = launched
    for worker in service.workers:
        worker.paused = True
    full = Rejected(request_id="", reason="queue_full", message="full")
    answer = pool.submit(service.complete, prompt="x", max_tokens=5)
    wait_for(lambda: len(service.submits) == 1, "the worker must have the request")
    rank = next(w for w in service.workers if w.submits).rank
    for worker in service.workers:
        worker.reject, worker.paused = full, False
    launcher.kill(rank)
    wait_for(lambda: service.lost == [rank], "the loss must be reported")
    launcher.replace(rank)
    service.workers[rank].reject = full
    launcher.together()
    wait_for(lambda: len(service.submits) >= 2, "the request must be sent again")
    for worker in service.workers:
        worker.reject = None
    assert answer.result()["usage"]["completion_tokens"] == 5


def test_request_error_is_final(launched, wait_for, pool):
    service, _ = launched
    (stream,) = in_flight(service, pool, wait_for, count=1)
    worker = next(w for w in service.workers if w.runs)
    (name,) = worker.runs
    done = Done(
        request_id=name, finish_reason="error", prompt_tokens=2, cached_tokens=0, completion_tokens=0, error="NaN"
    )
    worker.do(lambda: (worker._running.clear(), worker.say(done)))
    assert "NaN" in errors(stream)[0]
    assert service.lost == []


def test_requests_queue_at_a_restarted_router(start, script, wait_for, pool):
    hearing = threading.Event()

    def deaf(worker):
        prepared(worker, script)
        worker.do(lambda: hearing.wait(HANG_SECONDS))

    service = start(2, ready=False, restarted=True, prepare=deaf)
    early = pool.submit(service.complete, prompt="early", max_tokens=3)
    wait_for(lambda: service.client.get("/v1/fleet").json()["waiting"] == 1, "the request must queue")
    assert service.client.get("/readyz").status_code == 503
    hearing.set()
    assert early.result()["usage"]["completion_tokens"] == 3
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready")
    assert incidents(service) == []
    validate(service)


def test_number_of_workers_changes(start, script, wait_for, pool):
    """Two ranks become three, then two again, under load."""
    service = start(2, prepare=lambda worker: prepared(worker, script))
    launcher = Launcher(service, script)
    body = {"prompt": "grow", "max_tokens": 200}
    expected = service.complete(**body)["choices"]

    def resize(*workers):
        launcher.epoch += 1
        service.workers[:] = workers
        for worker in workers:
            snapshot = dataclasses.replace(worker.snapshot, world_size=len(workers))
            worker.do(lambda worker=worker, snapshot=snapshot: setattr(worker, "snapshot", snapshot))
        launcher.together()
        addresses = tuple(WorkerAddress(rank=w.rank, endpoint=w.endpoint) for w in workers)
        replaced = threading.Event()
        service.server.replace_workers(addresses, replaced.set)
        assert replaced.wait(HANG_SECONDS)
        wait_for(lambda: service.client.get("/readyz").status_code == 200, "all must be ready")
        assert len(service.client.get("/v1/fleet").json()["workers"]) == len(workers)

    third = ScriptedWorker(2, 3, script)
    try:
        answers = [pool.submit(service.complete, **body) for _ in range(6)]
        wait_for(lambda: len(service.submits) == 7, "the requests must run")
        two = service.workers[:2]
        resize(*two, third)
        resize(*two)
        assert [answer.result()["choices"] for answer in answers] == [expected] * 6
        assert service.failures == []
        validate(service)
    finally:
        third.die()


def test_several_routers_move_requests_and_give_up(start, script, wait_for, pool):
    service = start(WORLD, num_routers=2, prepare=lambda worker: prepared(worker, script))
    launcher = Launcher(service, script)

    def ask(i):
        with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
            answer = client.post(COMPLETIONS, json={"prompt": f"{i} of many", "max_tokens": 150})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

    expected = list(pool.map(ask, range(6)))
    answers = [pool.submit(ask, i) for i in range(6)]
    wait_for(lambda: len(service.submits) == 12, "the requests must run")
    launcher.kill(1)
    wait_for(lambda: service.lost == [1], "the loss must be reported")
    launcher.heal(1)
    assert [answer.result() for answer in answers] == expected
    assert service.lost == [1], "the loss must be reported once for all routers"
    service.server.give_up("enough")
    wait_for(lambda: not service.server._routers, "all routers must end")
    assert service.server.failure == "enough"


def test_rank_leaves_and_returns(launched, wait_for, pool):
    """The others serve its requests without a pause, and it is ready again after its return."""
    service, launcher = launched
    asked = bodies()
    expected = list(pool.map(lambda body: folded(service, body), asked))
    answers = [pool.submit(folded, service, body) for body in asked]
    wait_for(lambda: service.workers[1].submits, "the rank must have a request")
    launcher.kill(1)
    wait_for(lambda: service.lost == [1], "the loss must be reported")
    launcher.leave(1)
    assert [answer.result() for answer in answers] == expected
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "two ranks must be ready")
    states = [worker["state"] for worker in service.client.get("/v1/fleet").json()["workers"]]
    assert states == ["ready", "away", "ready"]
    targets = service.client.get("/metrics").text
    assert 'state="away"} 1.0' in targets
    assert service.lost == [1], "the missing rank must not be reported again"
    # The rank returns between steps: the others pause briefly and keep their requests.
    answers = [pool.submit(folded, service, body) for body in asked]
    wait_for(lambda: service.workers[0].submits and service.workers[2].submits, "the requests must run")

    for rank in (0, 2):
        service.workers[rank].hold("rank 1 is back")
    launcher.heal(1)
    assert [answer.result() for answer in answers] == expected
    carried = [incident["requests_carried"] for incident in incidents(service)]
    assert carried[0] == 0, "the other ranks must keep their requests"

    wait_for(lambda: service.client.get("/readyz").status_code == 200, "all ranks must be ready")
    assert [worker["state"] for worker in service.client.get("/v1/fleet").json()["workers"]] == ["ready"] * 3
    validate(service)
