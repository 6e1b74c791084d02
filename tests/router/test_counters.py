"""Counters of the fleet never fall: what lost workers had counted remains, on every router of a port."""

import random
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.router.scripted_worker import ready_snapshot
from tests.router.test_admission import MachineDriver

from moeyard_router.config import WorkerAddress
from moeyard_router.fleet.collector import FleetCollector
from moeyard_router.fleet.vllm_names import VllmFleetAliases
from moeyard_router.http.siblings import largest
from moeyard_worker.protocol import STEP_ROWS

KEPT = ("generation_tokens", "prefill_tokens", "prefix_query_tokens", "prefix_hit_tokens", "preemptions")
KEPT += ("expert_hits", "expert_misses", "expert_evictions", "draft_tokens", "accepted_tokens", "num_drafts")


class PlayedFleet:
    """Workers that count, and the pages of routers that see them come and go."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.epoch = self.step = self.places = 0
        self.counted = {}  # by worker
        self.workers = [self.worker(), self.worker()]
        self.routers = [self.router()]

    def worker(self, counted=None):
        """Start a worker that counts this much before a router hears from it, perhaps more than the lost one."""
        self.counted[len(self.counted)] = self.random.choice((0, 500)) if counted is None else counted
        self.places += 1
        return len(self.counted) - 1, f"tcp://127.0.0.1:{self.places}"

    def addresses(self):
        return tuple(WorkerAddress(rank=rank, endpoint=at) for rank, (_, at) in enumerate(self.workers))

    def router(self):
        played = MachineDriver()
        played.do("replace", self.addresses(), None)
        self.hear(played)
        return played

    def snapshot(self, rank):
        count = self.counted[self.workers[rank][0]]
        return ready_snapshot(
            rank=rank,
            world_size=len(self.workers),
            epoch=self.epoch,
            **{**dict.fromkeys(KEPT, count), "step": self.step, "step_rows": count},
            accepted_by_place=(count, count),
            steps_by_rows=(count,) * (len(STEP_ROWS) + 1),
        )

    def hear(self, played):
        for rank in range(len(self.workers)):
            played.do("connected", rank, timed=False)
            played.do("heard", rank, [self.snapshot(rank)])

    def run(self):
        self.step += 1
        for worker, _ in self.workers:
            self.counted[worker] += self.random.randrange(1, 9)
        for played in self.routers:
            self.hear(played)

    def replace(self, workers, **facts):
        """Go on with these workers."""
        self.workers, self.epoch = workers, self.epoch + 1
        for played in self.routers:
            played.do("replace", self.addresses(), facts)
        yield
        for played in self.routers:
            self.hear(played)

    def lose(self, *ranks):
        for played in self.routers:
            for rank in ranks:
                played.do("lose", rank, "it died")
        yield
        if len(ranks) == len(self.workers):
            self.step = 0
        new = [self.worker() if rank in ranks else worker for rank, worker in enumerate(self.workers)]
        yield from self.replace(new)

    def cut(self, rank):
        """Break a connection. The worker is the same afterwards."""
        for played in self.routers:
            played.now += 60
            played.do("broke", rank, "cut")
        yield
        for played in self.routers:
            self.hear(played)

    def exchange(self, rank):
        """Break a connection. Another worker, which has counted nothing, has the address afterwards."""
        yield from self.cut(rank)
        for played in self.routers:
            played.now += 60
            played.do("broke", rank, "cut")
        self.workers[rank] = self.worker(counted=0)[0], self.workers[rank][1]
        self.epoch += 1
        for played in self.routers:
            self.hear(played)
        yield
        yield from self.replace([*self.workers[:rank], self.worker(), *self.workers[rank + 1 :]])

    def scale(self, size):
        yield from self.replace([*self.workers[:size], *(self.worker() for _ in range(size - len(self.workers)))])

    def events(self):
        chosen = self.random.choice(("run", "run", "lose", "all", "cut", "exchange", "scale"))
        rank = self.random.randrange(len(self.workers))
        match chosen:
            case "run":
                self.run()
            case "lose":
                yield from self.lose(rank)
            case "all":
                yield from self.lose(*range(len(self.workers)))
            case "cut":
                yield from self.cut(rank)
            case "exchange":
                yield from self.exchange(rank)
            case "scale":
                yield from self.scale(self.random.randrange(1, 4))
        yield


def page(played):
    config = SimpleNamespace(model_name="m")
    fleet = SimpleNamespace(config=config, admission=played.machine, num_queued=0)
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    registry.register(VllmFleetAliases(fleet))
    return generate_latest(registry)


def counts(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


def check_grown(before, now):
    fallen = {key: (value, now[key]) for key, value in before.items() if key in now and now[key] < value}
    assert not fallen
    gone = {key for key in before.keys() - now.keys() if "rank" not in dict(key[1])}
    assert not gone, "only ranks may leave"


@pytest.mark.parametrize("seed", range(20))
def test_counters_never_fall_and_lose_nothing(seed):
    played = PlayedFleet(seed)
    before = {}
    for _ in range(30):
        for _ in played.events():
            now = counts(page(played.routers[0]))
            check_grown(before, now)
            before = {**before, **now}
    played.run()
    now = counts(page(played.routers[0]))
    every = sum(played.counted.values())
    one = (("engine", "0"), ("model_name", "m"))
    assert now["vllm:prefix_cache_hits_total", one] == every
    assert now["vllm:iteration_tokens_total_sum", one] == every
    assert now["vllm:spec_decode_num_accepted_tokens_per_pos_total", (one[0], one[1], ("position", "1"))] == every
    ranks = [value for (name, _), value in now.items() if name == "moeyard_fleet_generation_tokens_total"]
    assert len(ranks) == len(played.workers)
    assert sum(ranks) <= every


def test_steps_are_counted_from_where_a_worker_joins():
    played = PlayedFleet(0)
    steps = "moeyard_fleet_engine_steps_total", (("model_name", "m"), ("rank", "1"))
    begin = counts(page(played.routers[0]))[steps]

    def grown():
        return counts(page(played.routers[0]))[steps] - begin

    played.run()
    played.run()
    assert grown() == 2
    list(played.lose(1))
    assert grown() == 2
    played.run()
    list(played.lose(0, 1))
    played.run()
    assert grown() == 4


def test_routers_of_one_port_show_the_same_counts():
    """A router that was started again did not see the lost worker's counts."""
    played = PlayedFleet(1)
    played.run()
    list(played.lose(1))
    played.routers.append(played.router())
    played.run()
    old, young = (page(each) for each in played.routers)
    assert counts(young) != counts(old)
    assert counts(largest([young, old])) == counts(largest([old, young])) == counts(old)
    ready = b'moeyard_fleet_rank_ready{model_name="m",rank="1"} 1.0'
    unready = young.replace(ready, ready.replace(b"1.0", b"0.0"))
    assert unready != young
    assert ready not in largest([unready, old]), "a gauge is the answering router's"


def test_totals_of_the_page_keep_lost_counts(launched, wait_for):
    service, launcher = launched
    for worker in service.workers:
        worker.report(preemptions=100)

    def total():
        return service.client.get("/v1/fleet/live").json()["totals"]["preemptions"]

    wait_for(lambda: total() == 300, "the router must have the counts")
    launcher.kill(1)
    wait_for(lambda: service.lost == [1], "the loss must be reported")
    launcher.heal(1)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be ready again")
    assert total() == 300
    launcher.workers[1].report(preemptions=7)
    wait_for(lambda: total() == 307, "the replacement's counts must be added")
