"""The waiting room in virtual time: overload, fairness between keys, and retry times of refused requests."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from moeyard_router.errors import ApiError
from moeyard_router.fleet.fair import Entry, FairQueue
from moeyard_router.fleet.waiting import CALM, INTERVAL, Overload, WaitingRoom

PLACES, SERVICE, FIRST_TOKEN = 64, 4.0, 0.1
CAPACITY = PLACES / SERVICE
TICK = 0.02


@dataclass
class Outcome:
    """The outcome of one request: `wait` is None if it was refused, `retry` is its Retry-After."""

    key: str | None
    at: float
    wait: float | None = None
    retry: float | None = None


@dataclass
class Simulation:
    """`PLACES` slots behind a waiting room, in virtual time; requests take about SERVICE seconds."""

    seed: int
    max_seconds: float | None = None
    service: float = SERVICE
    outcomes: list[Outcome] = field(default_factory=list)
    ends: int = 0
    most: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.room = WaitingRoom(0.0, PLACES, self.max_seconds)
        self.running = 0
        self.numbers = itertools.count()
        self.events = []
        self.on_end = lambda now: None

    def at(self, time, what, *given):
        heapq.heappush(self.events, (time, next(self.numbers), what, given))

    def arrivals(self, rate, begin, end, key=None):
        at = begin
        while (at := at + self.rng.expovariate(rate)) < end:
            self.at(at, self.arrive, key)

    def arrive(self, now, key):
        outcome = Outcome(key, now)
        self.outcomes.append(outcome)
        try:
            self.room.check(now, key)
        except ApiError as error:
            outcome.retry = error.retry_after
            return outcome
        if self.running < PLACES and not self.room.queue.num_sequences:
            self.start(now, outcome)
        else:
            self.room.push(now, Entry(key=key, since=now, count=1, load=outcome))
        self.most = max(self.most, self.room.queue.num_sequences)
        return outcome

    def start(self, now, outcome):
        self.running += 1
        outcome.wait = now - outcome.at
        if outcome.wait == 0:
            self.room.overload.answered(now, FIRST_TOKEN)
        charged = self.room.started(now, outcome.key, 100, 1000)
        self.at(now + self.service * self.rng.uniform(0.5, 1.5), self.end, outcome, charged)

    def end(self, now, outcome, charged):
        self.running -= 1
        self.ends += 1
        self.room.queue.ended(outcome.key, charged, 100)
        if (entry := self.room.queue.first()) is not None:
            self.room.start(now, entry)
            self.start(now, entry.load)
        self.on_end(now)

    def tick(self, now, until):
        for entry in self.room.late(now):
            self.room.withdraw(now, entry)
            entry.load.retry = self.room.promise(now, entry.key)
        if now < until:
            self.at(now + TICK, self.tick, until)

    def run(self, until):
        self.at(0.0, self.tick, until)
        while self.events:
            now, _, what, given = heapq.heappop(self.events)
            what(now, *given)
        return self


def waits(outcomes):
    return sorted(t.wait for t in outcomes if t.wait is not None)


def p99(values):
    return values[int(0.99 * len(values))]


@pytest.mark.parametrize(("factor", "share"), [(1.5, 0.97), (3, 0.99), (10, 0.99)])
def test_admitted_requests_hardly_wait_in_overload(factor, share):
    """Requests before the overload is detected may wait longer; detection takes longer the smaller the overload is."""
    s = Simulation(seed=factor)
    s.arrivals(0.5 * CAPACITY, 0, 20)  # quiet at first, so that first tokens are known
    s.arrivals(factor * CAPACITY, 20, 80)
    s.run(100)
    flood = [t for t in s.outcomes if 20 <= t.at < 80]
    admitted = waits(flood)
    # With the wait, a first token takes at most twice as long.
    assert admitted[int(share * len(admitted))] <= FIRST_TOKEN
    assert len(admitted) >= 0.99 * CAPACITY * 60
    assert len(admitted) + sum(t.retry is not None for t in flood) == len(flood)
    assert s.most <= CAPACITY * factor * (INTERVAL + 0.2) + 20
    assert s.room.queue.num_sequences == s.running == 0


def test_retry_times_hold():
    """Most clients that retry at the given time are admitted, even if all of them do."""
    s = Simulation(seed=1)
    s.arrivals(5 * CAPACITY, 0, 20)
    back = []

    def come_back(now):
        for outcome in s.outcomes:
            if outcome.retry is not None and outcome.retry > 0:
                s.at(outcome.at + outcome.retry, lambda at, outcome=outcome: back.append(s.arrive(at, outcome.key)))
                outcome.retry = -outcome.retry

    s.at(20.0, come_back)
    s.run(600)
    assert len(back) > 3 * CAPACITY * 20
    late = [outcome for outcome in back if outcome.at > 21]
    assert sum(outcome.wait is not None for outcome in late) > 0.8 * len(late)
    # No retry time exceeds the time to serve all requests that came.
    assert max(-t.retry for t in s.outcomes if t.retry is not None and t.retry < 0) < 1.3 * 5 * 20


def test_a_burst_waits_and_is_served():
    s = Simulation(seed=2)
    for _ in range(20 * PLACES):
        s.at(0.0, s.arrive, None)
    s.run(10)
    assert len(waits(s.outcomes)) == 20 * PLACES


def test_closed_loop_of_any_size_is_served():
    """A closed loop has a standing queue that never grows."""
    s = Simulation(seed=3)
    s.on_end = lambda now: s.at(now + 0.001, s.arrive, None) if now < 60 else None
    for i in range(5 * PLACES):
        s.at(i * 0.001, s.arrive, None)
    s.run(70)
    assert len(waits(s.outcomes)) == len(s.outcomes) > 14 * PLACES


def test_queue_time_limit():
    s = Simulation(seed=4, max_seconds=2.0)
    s.arrivals(4 * CAPACITY, 0, 40)
    s.run(60)
    admitted = waits(s.outcomes)
    assert 1.5 < p99(admitted) <= 2.0 + TICK
    assert len(admitted) >= 0.99 * CAPACITY * 40


def test_flood_of_one_key_leaves_others_alone():
    s = Simulation(seed=5)
    s.arrivals(0.5 * CAPACITY, 0, 20, "light")
    s.arrivals(10 * CAPACITY, 20, 80, "flood")
    s.arrivals(0.3 * CAPACITY, 20, 80, "light")
    s.run(100)
    light = [t for t in s.outcomes if t.key == "light" and t.at > 25]  # before, it has more slots than its share
    assert sum(t.wait is not None for t in light) >= 0.98 * len(light)
    assert p99(waits(light)) < 0.6
    flood = waits([t for t in s.outcomes if t.key == "flood"])
    assert len(flood) + len(waits(light)) >= 0.98 * CAPACITY * 60


def test_two_floods_share():
    s = Simulation(seed=6)
    s.arrivals(9 * CAPACITY, 0, 60, "a")
    s.arrivals(3 * CAPACITY, 0, 60, "b")
    s.run(80)
    counts = {key: len(waits([t for t in s.outcomes if t.key == key and t.at > 5])) for key in "ab"}
    assert 0.8 < counts["a"] / counts["b"] < 1.25, counts


def entry(key, count=1):
    return Entry(key=key, since=0.0, count=count)


def test_turns_follow_the_service_per_key():
    queue = FairQueue()
    for _ in range(3):
        queue.push(entry("a"))
        queue.push(entry("b"))
    order = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first.key)
        queue.started(first.key, 1000 if first.key == "a" else 100, 10)
    assert order == ["a", "b", "b", "b", "a", "a"]


def test_idle_keys_save_no_turns():
    queue = FairQueue()
    for _ in range(50):
        queue.push(entry("busy"))
    for _ in range(20):
        first = queue.first()
        queue.remove(first)
        queue.started("busy", 100, 10)
    for _ in range(50):
        queue.push(entry("late"))
    keys = []
    for _ in range(20):
        first = queue.first()
        queue.remove(first)
        keys.append(first.key)
        queue.started(first.key, 100, 10)
    assert keys.count("late") in (10, 11), keys


def test_charge_follows_the_answers_length():
    queue = FairQueue()
    long, short = queue.started("long", 10, 10_000), queue.started("short", 10, 10_000)
    queue.push(entry("long"))
    queue.push(entry("short"))
    queue.ended("long", long, 5000)
    queue.ended("short", short, 1)
    assert queue.first().key == "short"
    # The next answer is expected to be as long.
    assert queue.started("long", 10, 10_000) > 1000
    assert queue.started("short", 10, 10_000) < long


def test_keys_are_forgotten():
    queue = FairQueue()
    for i in range(1000):
        charged = queue.started(str(i), 10, 10)
        queue.ended(str(i), charged, 10)
    assert len(queue._flows) < 5


def test_key_with_most_requests_makes_room():
    queue = FairQueue()
    assert queue.displaceable("a") is None
    some = [entry("a") for _ in range(3)]
    for each in some:
        queue.push(each)
    assert queue.displaceable("a") is None, "a key must not displace its own requests"
    assert queue.displaceable("b") is some[-1]
    queue.push(entry("b"))
    assert queue.displaceable("b") is some[-1]
    queue.push(entry("b"))
    assert queue.displaceable("b") is None, "three each would be no better"
    assert (queue.ahead("a"), queue.ahead("b"), queue.ahead("c")) == (5, 4, 0)


def test_overload_begins_with_a_growing_queue_and_ends_without_refusals():
    overload = Overload(PLACES)
    overload.waiting(0.0, 500)
    overload.waiting(INTERVAL + 0.1, 600)
    assert not overload.active(INTERVAL + 0.2), "simultaneous requests are a burst"
    overload.waiting(INTERVAL + 0.3, 608)
    assert not overload.active(INTERVAL + 0.3)
    overload.waiting(1.0, 609)
    assert overload.active(1.0)
    overload.refused(2.0)
    overload.waiting(2.5, 0)
    assert overload.active(1.9 + CALM)
    assert not overload.active(2.1 + CALM)


@pytest.mark.parametrize(("first_token", "limit"), [(0.001, 0.01), (1.0, 0.5), (60.0, 2.0)])
def test_overload_wait_is_half_the_time_to_first_token(first_token, limit):
    overload = Overload(PLACES)
    assert overload.limit == 0.25, "no first token is known"
    overload.answered(0.0, first_token)
    assert overload.limit == limit
