"""The time to the first token in a flood, on a clock of its own: the waiting room before a rank that works in steps."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from moeyard_router.errors import ApiError
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.waiters import ready_sequences
from moeyard_router.fleet.waiting import WaitingRoom

# A rank as in bench/paced.py: seconds of a step, and of each of its rows; requests of so many tokens.
BASE, PER_ROW, PLACES = 0.010, 0.0001, 64
PROMPT, OUTPUT = 100, 160
TICK = 0.005


@dataclass
class Asked:
    """One request; `first` is None if it was refused."""

    at: float
    sent: float | None = None
    first: float | None = None
    left: int = 0
    charged: float = 0.0


@dataclass
class SteppingFleet:
    """One rank: what was sent to it takes part from its next step on, and has its first token when that ends."""

    seed: int
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.room = WaitingRoom(0.0, PLACES, None)
        self.held, self.running = [], []  # at the rank: ready, and taking part
        self.stepping = False
        self.numbers = itertools.count()
        self.events = []

    def at(self, time, what, *given):
        heapq.heappush(self.events, (time, next(self.numbers), what, given))

    def has_room(self):
        return len(self.held) + len(self.running) < PLACES + ready_sequences(PLACES, OUTPUT)

    def arrive(self, now):
        asked = Asked(now, left=self.rng.randint(OUTPUT // 2, OUTPUT * 3 // 2))
        self.asked.append(asked)
        try:
            self.room.check(now, None)
        except ApiError:
            return
        if self.has_room() and not self.room.queue.num_sequences:
            self.send(now, asked)
        else:
            self.room.push(now, Entry(key=None, since=now, count=1, load=asked))

    def send(self, now, asked):
        asked.sent = now
        asked.charged = self.room.started(now, None, PROMPT, 1000)
        self.held.append(asked)
        if not self.stepping:
            self.step(now)

    def drain(self, now):
        while self.has_room() and (entry := self.room.queue.first()) is not None:
            self.room.start(now, entry)
            self.send(now, entry.load)

    def step(self, now):
        """The next one, with what is there now."""
        begun = self.held[: PLACES - len(self.running)]
        del self.held[: len(begun)]
        rows = len(self.running) + PROMPT * len(begun)
        self.running += begun
        self.stepping = bool(self.running)
        if self.stepping:
            self.at(now + BASE + PER_ROW * rows, self.stepped)

    def stepped(self, now):
        for asked in self.running:
            if asked.first is None:
                asked.first = now
                if asked.sent == asked.at:
                    self.room.overload.answered(now, now - asked.sent, self.room.queue.num_running)
            asked.left -= 1
            if not asked.left:
                self.room.queue.ended(None, asked.charged, OUTPUT)
        self.running = [asked for asked in self.running if asked.left]
        # The rank goes on with what it has; that a place is free is known where the others wait a moment later.
        self.step(now)
        self.drain(now)

    def tick(self, now, until):
        for entry in self.room.late(now):
            self.room.withdraw(now, entry)
        if now < until:
            self.at(now + TICK, self.tick, until)

    def run(self, rate, seconds, flood):
        """Arrivals at `rate` for `seconds`, then at `flood` for a minute; sorted seconds to first tokens of both."""
        at = 0.0
        while at < seconds + 60:
            self.at(at, self.arrive)
            at += self.rng.expovariate(rate if at < seconds else flood)
        self.at(0.0, self.tick, seconds + 70)
        while self.events:
            now, _, what, given = heapq.heappop(self.events)
            what(now, *given)
        assert not self.running
        quiet = sorted(a.first - a.at for a in self.asked if a.at < seconds)
        flooded = sorted(a.first - a.at for a in self.asked if a.at >= seconds + 1 and a.first is not None)
        return quiet, flooded


def share(values, part):
    return values[int(part * len(values))]


CAPACITY = PLACES / OUTPUT / (BASE + PER_ROW * (PLACES + PROMPT * PLACES / OUTPUT))


@pytest.mark.parametrize("factor", [3, 10])
def test_first_tokens_in_a_flood_come_within_twice_the_quiet_time(factor):
    """From the second after it began: until then it fills the free places, whose prompts take what they take."""
    quiet, flooded = SteppingFleet(seed=factor).run(0.3 * CAPACITY, 60, factor * CAPACITY)
    assert len(flooded) >= 0.98 * CAPACITY * 59
    print([(round(1e3 * share(quiet, part)), round(1e3 * share(flooded, part))) for part in (0.5, 0.9, 0.99)], "ms")
    assert share(flooded, 0.99) <= 2 * share(quiet, 0.99)


def test_a_burst_that_fills_the_places_is_no_measure_of_a_quiet_fleet():
    fleet = SteppingFleet(seed=1)
    fleet.run(0.3 * CAPACITY, 60, 10 * CAPACITY)
    assert fleet.room.overload.limit == pytest.approx(0.0121, rel=0.01)
