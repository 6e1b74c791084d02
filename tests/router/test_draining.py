"""Ranks that take no new requests, and whose requests go on elsewhere: none fails, and no answer is another."""

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
    """Give an order and return the count that is told for it."""
    told, done = [], threading.Event()
    ranks = tuple(sorted({rank, *others})) if ranks is None else ranks
    order = Drain(ranks=ranks, rank=rank, carry=carry, leaves=leaves)
    service.server.drain(order, lambda count: (told.append(count), done.set()))
    assert done.wait(HANG_SECONDS), "no answer to an order"
    return told[0]


def worker(service, rank):
    return service.client.get("/v1/fleet").json()["workers"][rank]


def test_a_drained_rank_gets_nothing_and_finishes_what_it_has(launched, wait_for, pool):
    service, launcher = launched
    streams = in_flight(service, pool, wait_for, count=6)
    before = [len(w.submits) for w in launcher.workers]
    assert all(before)
    assert drain(service, 1) == before[1]
    assert worker(service, 1)["draining"]
    assert worker(service, 1)["state"] == "ready", "it runs steps with the others"
    assert not worker(service, 0)["draining"]
    for i in range(6):
        service.complete(prompt=f"{i} more", max_tokens=2)
    assert len(launcher.workers[1].submits) == before[1]
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    assert drain(service, 1) == 0
    assert service.client.get("/readyz").status_code == 200
    assert incidents(service) == [], "nothing has happened to the fleet"
    page = service.client.get("/metrics").text
    assert re.search(r'moeyard_workers\{[^}]*state="draining"[^}]*\} 1\.0', page)
    validate(service)
    assert drain(service, 1, ranks=()) == 0
    in_flight(service, pool, wait_for, count=6, max_tokens=30)
    assert len(launcher.workers[1].submits) > before[1]


def test_what_is_carried_over_is_what_it_would_have_been(launched, wait_for, pool):
    """Rank after rank is drained and emptied at once, and given back."""
    service, launcher = launched
    asked = bodies()
    expected = list(pool.map(lambda body: folded(service, body), asked))
    begun, rng = sampled(service), random.Random(5)
    answers = [pool.submit(folded, service, body) for body in asked]
    for rank in (0, 1, 2, 0, 1):
        moment = sampled(service) - begun + rng.randrange(10, 60)
        wait_for(lambda moment=moment: sampled(service) - begun > moment, "they must run")
        assert drain(service, rank, carry=True) == 0
        wait_for(lambda rank=rank: not launcher.workers[rank].runs, "it must be empty")
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


def test_one_that_comes_back_waits_for_the_word_of_the_time_before(launched, wait_for, pool):
    """Until a rank has said that it stopped a sequence, what it says of it may be of the time before."""
    service, launcher = launched
    (stream,) = in_flight(service, pool, wait_for, count=1)
    home = next(w for w in launcher.workers if w.runs)
    away = next(w for w in launcher.workers if w is not home)
    # It hears nothing for a while.
    deaf, hearing = threading.Event(), threading.Event()
    home.do(lambda: (deaf.set(), hearing.wait(HANG_SECONDS)))
    assert deaf.wait(HANG_SECONDS)
    for others, rank in ((home, home.rank), (away, away.rank)):
        assert drain(service, rank, carry=True, ranks=tuple({0, 1, 2} - {away.rank, home.rank} | {others.rank})) == 0
        wait_for(lambda: sampled(service) > 0, "it must run")
    fleet = service.client.get("/v1/fleet").json()
    assert fleet["waiting"] == 1, "it waits for the word of the rank where it was"
    validate(service)
    hearing.set()
    events = stream.result(HANG_SECONDS)
    assert not any("error" in event for event in events)
    assert service.lost == [], "and breaks no protocol"
    assert len(home.submits) == 2
    service.wait_idle()
    validate(service)


def test_a_planned_restart_is_no_loss(launched, wait_for, pool):
    service, launcher = launched
    asked = bodies()
    expected = list(pool.map(lambda body: folded(service, body), asked))
    begun = sampled(service)
    answers = [pool.submit(folded, service, body) for body in asked]
    wait_for(lambda: sampled(service) - begun > 100, "they must run")
    assert drain(service, 2, carry=True, leaves=True) == 0
    assert service.client.get("/readyz").json()["reason"] == "recovering: worker 2 is being restarted"
    late = pool.submit(service.complete, prompt="come in", max_tokens=3)
    launcher.kill(2)
    launcher.heal(2, incident={"reason": "rank 2 is restarted"})
    assert [answer.result() for answer in answers] == expected
    assert late.result()["usage"]["completion_tokens"] == 3
    service.wait_idle()
    validate(service)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "it must be ready again")
    (told,) = incidents(service)
    assert (told["planned"], told["state"], told["reason"]) == (True, "recovered", "worker 2 is being restarted")
    assert service.lost == [], "the launcher knows"
    assert not worker(service, 2)["draining"], "the new one takes requests"
    page = service.client.get("/metrics").text
    assert 'moeyard_worker_restarts_total{model_name="tiny"} 1.0' in page
    assert 'moeyard_recoveries_total{model_name="tiny"} 0.0' in page


def test_a_loss_beside_a_planned_restart_is_a_loss(launched, wait_for):
    service, launcher = launched
    drain(service, 2, leaves=True)
    launcher.kill(2, 0)
    wait_for(lambda: service.lost == [0], "only the one that nobody asked for is told")
    launcher.heal(0, 2)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "it must be ready again")
    (told,) = incidents(service)
    assert (told["planned"], told["ranks"]) == (False, [0, 2])


def test_the_only_rank_keeps_what_it_has_and_others_wait_without_a_limit(start, script, wait_for, pool):
    service = start(1, prepare=lambda w: prepared(w, script), worker_places=8, max_queue_seconds=0.05)
    launcher = Launcher(service, script)
    streams = in_flight(service, pool, wait_for, count=4)
    assert drain(service, 0, carry=True) == 4, "nobody else can take it"
    late = [pool.submit(service.complete, prompt=f"late {i}", max_tokens=3) for i in range(2)]
    wait_for(lambda: service.client.get("/v1/fleet").json()["waiting"] == 2, "they must wait")
    # In rounds of 3 ms: more than the time for which requests may wait.
    begun = sampled(service)
    wait_for(lambda: sampled(service) - begun >= 160, "they must run")
    assert incidents(service) == []
    drain(service, 0, leaves=True)
    launcher.kill(0)
    launcher.heal(0)
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    assert [answer.result()["usage"]["completion_tokens"] for answer in late] == [3, 3]
    service.wait_idle()
    validate(service)


@pytest.mark.slow
def test_of_several_routers_all_know_and_a_new_one_too(start, script, wait_for, pool):
    service = start(num_workers=2, num_routers=2, prepare=lambda w: prepared(w, script))
    first, second = service.workers

    def ask(i):
        # On a connection of its own, which the kernel gives to either router.
        with httpx.Client(base_url=service.url, timeout=HANG_SECONDS) as client:
            body = {"prompt": f"{i} x", "max_tokens": 150, "stream": True}
            with client.stream("POST", COMPLETIONS, json=body) as answer:
                return [json.loads(line[6:]) for line in answer.iter_lines() if line and line != "data: [DONE]"]

    first.paused = second.paused = True
    streams = [pool.submit(ask, i) for i in range(12)]
    wait_for(lambda: len(first.runs) + len(second.runs) == 12, "they must run")
    assert drain(service, 1) == len(second.runs) > 0
    assert drain(service, 1, carry=True) == 0
    wait_for(lambda: not second.runs, "it must be empty")
    wait_for(lambda: len(first.runs) == 12, "it must have all")
    first.paused = second.paused = False
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    second.submits.clear()
    (killed,) = (p for p in multiprocessing.active_children() if p.name == "router-0")
    killed.kill()
    wait_for(lambda: not killed.is_alive(), "it must be gone")

    def other():
        return any(p.name == "router-0" and p is not killed for p in multiprocessing.active_children())

    wait_for(other, "no other takes its place")
    for i in range(16):
        assert all("error" not in event for event in ask(i)), "wherever it goes, and however far the new one is"
    assert second.submits == []
