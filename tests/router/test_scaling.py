"""Growing and shrinking a fleet under load: no request fails, no answer changes, and limits follow its size."""

import dataclasses
import re
import threading

import pytest
from tests.limits import HANG_SECONDS
from tests.router.launcher import COMPLETIONS, Launcher, bodies, folded, in_flight, incidents, prepared, validate
from tests.router.scripted_worker import ScriptedWorker
from tests.router.test_draining import drain

from moeyard_router.config import WorkerAddress
from moeyard_router.fleet.orders import Drain


class ScalableService:
    """A service that starts with two workers, and the launcher's actions that change their number."""

    def __init__(self, start, script, **options):
        self.service = start(2, prepare=lambda worker: prepared(worker, script), **options)
        self.script, self.epoch = script, 0
        self.left = []

    def announce(self, size):
        confirmed = threading.Event()
        self.service.server.obey(Drain(ranks=(), rank=0, size=size), lambda count: confirmed.set())
        assert confirmed.wait(HANG_SECONDS)

    def go_on(self, size):
        """Start another epoch with all workers and give the router their addresses."""
        self.epoch += 1
        workers = self.service.workers
        for worker in workers:
            worker.hold("an epoch ends as it was asked to")
        while len(workers) < size:
            new = ScriptedWorker(len(workers), size, self.script, epoch=self.epoch, state="recovering")
            prepared(new, self.script)
            workers.append(new)
        self.left += workers[size:]
        del workers[size:]
        for worker in workers:
            worker.do(lambda w=worker: setattr(w, "snapshot", dataclasses.replace(w.snapshot, world_size=size)))
        confirmed = threading.Event()
        addresses = tuple(WorkerAddress(rank=w.rank, endpoint=w.endpoint) for w in workers)
        self.service.server.replace_workers(addresses, confirmed.set, {"reason": "scaled", "planned": True})
        assert confirmed.wait(HANG_SECONDS)
        for worker in workers:
            worker.go_on(self.epoch)

    def scale(self, size):
        self.announce(size)
        self.go_on(size)

    def end(self):
        for worker in (*self.left, *self.service.workers[2:]):
            worker.die()
        del self.service.workers[2:]


@pytest.fixture
def scaled(start, script):
    made = []

    def make(**options):
        made.append(ScalableService(start, script, **options))
        return made[0]

    yield make
    for each in made:
        each.end()


def test_two_four_two_under_load(scaled, wait_for, pool):
    fleet = scaled()
    service = fleet.service
    asked = bodies()
    expected = [folded(service, body) for body in asked]
    for size in (4, 2):
        answers = [pool.submit(folded, service, body) for body in asked]
        wait_for(lambda: sum(len(w._running) for w in service.workers) >= 6, "the requests must run")
        fleet.scale(size)
        assert [answer.result(HANG_SECONDS) for answer in answers] == expected
        wait_for(lambda: service.client.get("/readyz").status_code == 200, "all must be ready")
        workers = service.client.get("/v1/fleet").json()["workers"]
        assert [(worker["rank"], worker["state"]) for worker in workers] == [(r, "ready") for r in range(size)]
    page = incidents(service)
    assert [(each["planned"], each["reason"], each["ranks"]) for each in page] == [
        (True, "going on with 2 workers", [2, 3]),
        (True, "going on with 4 workers", []),
    ]
    text = service.client.get("/metrics").text
    assert re.search(r"moeyard_fleet_scalings_total\{[^}]*\} 2\.0", text)
    assert re.search(r"moeyard_recoveries_total\{[^}]*\} 0\.0", text), "no worker was lost"
    assert re.search(r"moeyard_worker_restarts_total\{[^}]*\} 0\.0", text)
    assert service.lost == [], "the launcher must get no loss"
    validate(service)


def test_removed_worker_is_drained_first(scaled, wait_for, pool):
    fleet = scaled()
    service = fleet.service
    fleet.scale(3)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "all must be ready")
    streams = in_flight(service, pool, wait_for, count=6)
    assert drain(service, 2) > 0
    drain(service, 2, carry=True)
    assert drain(service, 2) == 0
    fleet.scale(2)
    assert all("error" not in event for stream in streams for event in stream.result(HANG_SECONDS))
    validate(service)


def test_early_exit_of_a_removed_worker_is_not_a_loss(scaled, wait_for):
    fleet = scaled()
    service = fleet.service
    fleet.scale(3)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "all must be ready")
    fleet.announce(2)
    fleet.service.workers[2].die()
    wait_for(
        lambda: service.client.get("/v1/fleet").json()["workers"][2]["state"] == "failed", "the exit must be noticed"
    )
    fleet.go_on(2)
    service.complete(prompt="after", max_tokens=3)
    assert service.lost == []
    assert [each["planned"] for each in incidents(service)] == [True, True]
    validate(service)


def test_loss_during_scaling_is_a_loss(scaled, wait_for):
    fleet = scaled()
    service = fleet.service
    fleet.announce(3)
    service.workers[1].die()
    wait_for(lambda: service.lost == [1], "the loss must be reported")
    launcher = Launcher(service, fleet.script)
    launcher.heal(1)
    service.complete(prompt="after", max_tokens=3)
    assert [each["planned"] for each in incidents(service)] == [False]
    validate(service)


def test_limits_follow_the_number_of_workers(scaled, wait_for, pool):
    """Each worker adds two slots and one queue place."""
    fleet = scaled(worker_places=2, max_inflight=6, inflight_per_worker=3)
    service = fleet.service
    held = service.server._fleet
    for size in (3, 2):
        fleet.scale(size)
        wait_for(lambda: service.client.get("/readyz").status_code == 200, "all must be ready")
        assert held.admission.waiters.room._places == 2 * size
        for worker in service.workers:
            worker.paused = True
        answers = [pool.submit(service.complete, prompt=f"{i}", max_tokens=2) for i in range(3 * size)]
        wait_for(lambda size=size: held.num_inflight == 3 * size, "the router must accept all requests")
        refused = service.client.post(COMPLETIONS, json={"prompt": "one more", "max_tokens": 2})
        assert refused.status_code == 429, refused.text
        assert f"{3 * size} of {3 * size} sequences are in flight" in refused.json()["error"]["message"]
        for worker in service.workers:
            worker.paused = False
        assert all(answer.result(HANG_SECONDS)["choices"] for answer in answers)
    validate(service)
