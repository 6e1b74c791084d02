"""Drained ranks accept no new requests; their requests move to other ranks and give the same answers."""

import json
import multiprocessing
import random
import re
import threading

import httpx
import pytest
from tests.limits import HANG_SECONDS
from tests.router.launcher import (
    COMPLETIONS,
    Launcher,
    bodies,
    folded,
    in_flight,
    incidents,
    prepared,
    sampled,
    validate,
)

from moeyard_router.fleet.orders import Drain


def drain(service, rank, *, others=(), carry=False, leaves=False, ranks=None):
    """Send a drain order and return the count of its reply."""
    record, done = [], threading.Event()
    ranks = tuple(sorted({rank, *others})) if ranks is None else ranks
    order = Drain(ranks=ranks, rank=rank, carry=carry, leaves=leaves)
    service.server.obey(order, lambda count: (record.append(count), done.set()))
    assert done.wait(HANG_SECONDS), "the order got no reply"
    return record[0]


def worker(service, rank):
    return service.client.get("/v1/fleet").json()["workers"][rank]


def test_drained_rank_only_finishes_its_sequences(launched, wait_for, pool):
    service, launcher = launched
    streams = in_flight(service, pool, wait_for, count=6)
    before = [len(w.submits) for w in launcher.workers]
    assert all(before)
    assert drain(service, 1) == before[1]
    assert worker(service, 1)["draining"]
    assert worker(service, 1)["state"] == "ready", "a drained rank must run steps with the others"
    assert not worker(service, 0)["draining"]
    for i in range(6):
        service.complete(prompt=f"{i} more", max_tokens=2)
    assert len(launcher.workers[1].submits) == before[1]
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    assert drain(service, 1) == 0
    assert service.client.get("/readyz").status_code == 200
    assert incidents(service) == [], "draining is not an incident"
    page = service.client.get("/metrics").text
    assert re.search(r'moeyard_workers\{[^}]*state="draining"[^}]*\} 1\.0', page)
    validate(service)
    assert drain(service, 1, ranks=()) == 0
    in_flight(service, pool, wait_for, count=6, max_tokens=30)
    assert len(launcher.workers[1].submits) > before[1]


def test_moved_requests_keep_their_answers(launched, wait_for, pool):
    """Ranks are drained and emptied at once, one after another, and resumed."""
    service, launcher = launched
    asked = bodies()
    expected = list(pool.map(lambda body: folded(service, body), asked))
    begun, rng = sampled(service), random.Random(5)
    answers = [pool.submit(folded, service, body) for body in asked]
    for rank in (0, 1, 2, 0, 1):
        moment = sampled(service) - begun + rng.randrange(10, 60)
        wait_for(lambda moment=moment: sampled(service) - begun > moment, "the requests must run")
        assert drain(service, rank, carry=True) == 0
        wait_for(lambda rank=rank: not launcher.workers[rank].runs, "the rank must be empty")
        validate(service)
    assert [answer.result() for answer in answers] == expected
    service.wait_idle()
    validate(service)
    assert incidents(service) == []
    assert service.lost == []
    page = service.client.get("/metrics").text
    carried = re.search(r"moeyard_requests_carried_total\{[^}]*\} (\S+)", page)
    assert carried is not None
    assert float(carried[1]) >= 5


def test_returning_sequence_waits_for_the_first_confirmation(launched, wait_for, pool):
    """Until a rank confirms that it stopped a sequence, its messages about it may be old."""
    service, launcher = launched
    (stream,) = in_flight(service, pool, wait_for, count=1)
    home = next(w for w in launcher.workers if w.runs)
    away = next(w for w in launcher.workers if w is not home)
    # The rank reads no messages for a while.
    deaf, hearing = threading.Event(), threading.Event()
    home.do(lambda: (deaf.set(), hearing.wait(HANG_SECONDS)))
    assert deaf.wait(HANG_SECONDS)
    for others, rank in ((home, home.rank), (away, away.rank)):
        assert drain(service, rank, carry=True, ranks=tuple({0, 1, 2} - {away.rank, home.rank} | {others.rank})) == 0
        wait_for(lambda: sampled(service) > 0, "the request must run")
    fleet = service.client.get("/v1/fleet").json()
    assert fleet["waiting"] == 1, "the sequence must wait for the first rank's confirmation"
    validate(service)
    hearing.set()
    events = stream.result(HANG_SECONDS)
    assert not any("error" in event for event in events)
    assert service.lost == [], "old messages must not break the protocol"
    assert len(home.submits) == 2
    service.wait_idle()
    validate(service)


def test_planned_restart_is_not_a_loss(launched, wait_for, pool):
    service, launcher = launched
    asked = bodies()
    expected = list(pool.map(lambda body: folded(service, body), asked))
    begun = sampled(service)
    answers = [pool.submit(folded, service, body) for body in asked]
    wait_for(lambda: sampled(service) - begun > 100, "the requests must run")
    assert drain(service, 2, carry=True, leaves=True) == 0
    assert service.client.get("/readyz").json()["reason"] == "recovering: worker 2 is being restarted"
    late = pool.submit(service.complete, prompt="come in", max_tokens=3)
    launcher.kill(2)
    lines = {f'moeyard_workers{{model_name="tiny",state="{s}"}} {n:.1f}' for s, n in (("failed", 0), ("stopping", 1))}
    wait_for(
        lambda: lines <= set(service.client.get("/metrics").text.splitlines()), "a restart must not look like a loss"
    )
    launcher.heal(2, incident={"reason": "rank 2 is restarted"})
    assert [answer.result() for answer in answers] == expected
    assert late.result()["usage"]["completion_tokens"] == 3
    service.wait_idle()
    validate(service)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    (record,) = incidents(service)
    assert (record["planned"], record["state"], record["reason"]) == (True, "recovered", "worker 2 is being restarted")
    assert service.lost == [], "a planned restart must not be reported"
    assert not worker(service, 2)["draining"], "the new worker must accept requests"
    page = service.client.get("/metrics").text
    assert 'moeyard_worker_restarts_total{model_name="tiny"} 1.0' in page
    assert 'moeyard_recoveries_total{model_name="tiny"} 0.0' in page


def test_loss_during_a_planned_restart_is_a_loss(launched, wait_for):
    service, launcher = launched
    drain(service, 2, leaves=True)
    launcher.kill(2, 0)
    wait_for(lambda: service.lost == [0], "only the unplanned loss must be reported")
    launcher.heal(0, 2)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    (record,) = incidents(service)
    assert (record["planned"], record["ranks"]) == (False, [0, 2])


def test_single_rank_keeps_its_sequences_and_others_queue(start, script, wait_for, pool):
    service = start(1, prepare=lambda w: prepared(w, script), worker_places=8, max_queue_seconds=0.05)
    launcher = Launcher(service, script)
    streams = in_flight(service, pool, wait_for, count=4)
    assert drain(service, 0, carry=True) == 4, "no other rank can take the sequences"
    late = [pool.submit(service.complete, prompt=f"late {i}", max_tokens=3) for i in range(2)]
    wait_for(lambda: service.client.get("/v1/fleet").json()["waiting"] == 2, "the requests must queue")
    # Steps of 3 ms, longer in total than the queue's time limit.
    begun = sampled(service)
    wait_for(lambda: sampled(service) - begun >= 160, "the requests must run")
    assert incidents(service) == []
    drain(service, 0, leaves=True)
    launcher.kill(0)
    launcher.heal(0)
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    assert [answer.result()["usage"]["completion_tokens"] for answer in late] == [3, 3]
    service.wait_idle()
    validate(service)


@pytest.mark.slow
def test_all_routers_drain_including_a_restarted_one(start, script, wait_for, pool):
    service = start(num_workers=2, num_routers=2, prepare=lambda w: prepared(w, script))
    first, second = service.workers

    def ask(i):
        # The kernel may give each new connection to either router.
        with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
            body = {"prompt": f"{i} x", "max_tokens": 150, "stream": True}
            with client.stream("POST", COMPLETIONS, json=body) as answer:
                return [json.loads(line[6:]) for line in answer.iter_lines() if line and line != "data: [DONE]"]

    first.paused = second.paused = True
    streams = [pool.submit(ask, i) for i in range(12)]
    wait_for(lambda: len(first.runs) + len(second.runs) == 12, "the requests must run")
    assert drain(service, 1) == len(second.runs) > 0
    assert drain(service, 1, carry=True) == 0
    wait_for(lambda: not second.runs, "the rank must be empty")
    wait_for(lambda: len(first.runs) == 12, "the rank must have all sequences")
    first.paused = second.paused = False
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    second.submits.clear()
    (killed,) = (p for p in multiprocessing.active_children() if p.name == "router-0")
    killed.kill()
    wait_for(lambda: not killed.is_alive(), "the router must exit")

    def other():
        return any(p.name == "router-0" and p is not killed for p in multiprocessing.active_children())

    wait_for(other, "no other router replaced it")
    for i in range(16):
        assert all("error" not in event for event in ask(i)), "every router must answer, started or not"
    assert second.submits == []
