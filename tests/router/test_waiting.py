"""The waiting room on a clock of its own: overload, fairness between keys, and what those are told who are refused."""

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
class Told:
    """What became of one request: `wait` None if it was refused, `retry` what it was told."""

    key: str | None
    at: float
    wait: float | None = None
    retry: float | None = None


@dataclass
class Simulation:
    """`PLACES` places before a waiting room, in virtual time; requests take about SERVICE seconds."""

    seed: int
    max_seconds: float | None = None
    service: float = SERVICE
    told: list[Told] = field(default_factory=list)
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
        told = Told(key, now)
        self.told.append(told)
        try:
            self.room.check(now, key)
        except ApiError as error:
            told.retry = error.retry_after
            return told
        if self.running < PLACES and not self.room.queue.num_sequences:
            self.start(now, told)
        else:
            self.room.push(now, Entry(key=key, since=now, count=1, load=told))
        self.most = max(self.most, self.room.queue.num_sequences)
        return told

    def start(self, now, told):
        self.running += 1
        told.wait = now - told.at
        if told.wait == 0:
            self.room.overload.answered(now, FIRST_TOKEN)
        charged = self.room.started(now, told.key, 100, 1000)
        self.at(now + self.service * self.rng.uniform(0.5, 1.5), self.end, told, charged)

    def end(self, now, told, charged):
        self.running -= 1
        self.ends += 1
        self.room.queue.ended(told.key, charged, 100)
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


def waits(told):
    return sorted(t.wait for t in told if t.wait is not None)


def p99(values):
    return values[int(0.99 * len(values))]


@pytest.mark.parametrize(("factor", "share"), [(1.5, 0.97), (3, 0.99), (10, 0.99)])
def test_who_is_admitted_in_overload_hardly_waits_and_no_place_is_idle(factor, share):
    """All but those who came before it was known to be overload, which takes the longer the less it is."""
    s = Simulation(seed=factor)
    s.arrivals(0.5 * CAPACITY, 0, 20)  # quiet before, so that first tokens are known
    s.arrivals(factor * CAPACITY, 20, 80)
    s.run(100)
    flood = [t for t in s.told if 20 <= t.at < 80]
    admitted = waits(flood)
    # With the wait a first token takes at most twice as long.
    assert admitted[int(share * len(admitted))] <= FIRST_TOKEN
    assert len(admitted) >= 0.99 * CAPACITY * 60
    assert len(admitted) + sum(t.retry is not None for t in flood) == len(flood)
    assert s.most <= CAPACITY * factor * (INTERVAL + 0.2) + 20
    assert s.room.queue.num_sequences == s.running == 0


def test_told_times_are_kept():
    """Of those that come back when they were told to, most are admitted, even if all do."""
    s = Simulation(seed=1)
    s.arrivals(5 * CAPACITY, 0, 20)
    back = []

    def come_back(now):
        for told in s.told:
            if told.retry is not None and told.retry > 0:
                s.at(told.at + told.retry, lambda at, told=told: back.append(s.arrive(at, told.key)))
                told.retry = -told.retry

    s.at(20.0, come_back)
    s.run(600)
    assert len(back) > 3 * CAPACITY * 20
    late = [told for told in back if told.at > 21]
    assert sum(told.wait is not None for told in late) > 0.8 * len(late)
    # Nobody was told to wait for more than it takes to serve all who had come.
    assert max(-t.retry for t in s.told if t.retry is not None and t.retry < 0) < 1.3 * 5 * 20


def test_a_burst_waits_and_is_served():
    s = Simulation(seed=2)
    for _ in range(20 * PLACES):
        s.at(0.0, s.arrive, None)
    s.run(10)
    assert len(waits(s.told)) == 20 * PLACES


def test_a_fixed_number_of_clients_is_served_however_many_they_are():
    """A closed loop keeps its queue standing without ever making it grow."""
    s = Simulation(seed=3)
    s.on_end = lambda now: s.at(now + 0.001, s.arrive, None) if now < 60 else None
    for i in range(5 * PLACES):
        s.at(i * 0.001, s.arrive, None)
    s.run(70)
    assert len(waits(s.told)) == len(s.told) > 14 * PLACES


def test_a_limit_is_a_limit():
    s = Simulation(seed=4, max_seconds=2.0)
    s.arrivals(4 * CAPACITY, 0, 40)
    s.run(60)
    admitted = waits(s.told)
    assert 1.5 < p99(admitted) <= 2.0 + TICK
    assert len(admitted) >= 0.99 * CAPACITY * 40


def test_a_flood_under_one_key_does_not_touch_another():
    s = Simulation(seed=5)
    s.arrivals(0.5 * CAPACITY, 0, 20, "light")
    s.arrivals(10 * CAPACITY, 20, 80, "flood")
    s.arrivals(0.3 * CAPACITY, 20, 80, "light")
    s.run(100)
    light = [t for t in s.told if t.key == "light" and t.at > 25]  # until then it has more places than its share
    assert sum(t.wait is not None for t in light) >= 0.98 * len(light)
    assert p99(waits(light)) < 0.6
    flood = waits([t for t in s.told if t.key == "flood"])
    assert len(flood) + len(waits(light)) >= 0.98 * CAPACITY * 60


def test_two_floods_share():
    s = Simulation(seed=6)
    s.arrivals(9 * CAPACITY, 0, 60, "a")
    s.arrivals(3 * CAPACITY, 0, 60, "b")
    s.run(80)
    counts = {key: len(waits([t for t in s.told if t.key == key and t.at > 5])) for key in "ab"}
    assert 0.8 < counts["a"] / counts["b"] < 1.25, counts


def entry(key, count=1):
    return Entry(key=key, since=0.0, count=count)


def test_turns_go_by_what_keys_were_served():
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


def test_nobody_saves_up_turns():
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


def test_an_answer_is_charged_as_long_as_it_was():
    queue = FairQueue()
    long, short = queue.started("long", 10, 10_000), queue.started("short", 10, 10_000)
    queue.push(entry("long"))
    queue.push(entry("short"))
    queue.ended("long", long, 5000)
    queue.ended("short", short, 1)
    assert queue.first().key == "short"
    # And the next one is expected to be as long.
    assert queue.started("long", 10, 10_000) > 1000
    assert queue.started("short", 10, 10_000) < long


def test_keys_are_forgotten():
    queue = FairQueue()
    for i in range(1000):
        charged = queue.started(str(i), 10, 10)
        queue.ended(str(i), charged, 10)
    assert len(queue._flows) < 5


def test_the_fattest_makes_room():
    queue = FairQueue()
    assert queue.displaceable("a") is None
    some = [entry("a") for _ in range(3)]
    for each in some:
        queue.push(each)
    assert queue.displaceable("a") is None, "nobody displaces its own"
    assert queue.displaceable("b") is some[-1]
    queue.push(entry("b"))
    assert queue.displaceable("b") is some[-1]
    queue.push(entry("b"))
    assert queue.displaceable("b") is None, "three each would be no better"
    assert (queue.ahead("a"), queue.ahead("b"), queue.ahead("c")) == (5, 4, 0)


def test_overload_is_a_queue_that_grows_and_ends_when_nobody_is_refused():
    overload = Overload(PLACES)
    overload.waiting(0.0, 500)
    overload.waiting(INTERVAL + 0.1, 600)
    assert not overload.active(INTERVAL + 0.2), "whatever comes at once is a burst"
    overload.waiting(INTERVAL + 0.3, 608)
    assert not overload.active(INTERVAL + 0.3)
    overload.waiting(1.0, 609)
    assert overload.active(1.0)
    overload.refused(2.0)
    overload.waiting(2.5, 0)
    assert overload.active(1.9 + CALM)
    assert not overload.active(2.1 + CALM)


@pytest.mark.parametrize(("first_token", "limit"), [(0.001, 0.01), (1.0, 0.5), (60.0, 2.0)])
def test_the_wait_in_overload_is_half_a_first_token_within_bounds(first_token, limit):
    overload = Overload(PLACES)
    assert overload.limit == 0.25, "no first token is known"
    overload.answered(0.0, first_token)
    assert overload.limit == limit
