"""The time to first token during a flood, in virtual time: the waiting room in front of a rank that works in steps."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from moeyard_router.errors import ApiError
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.waiters import ready_sequences
from moeyard_router.fleet.waiting import WaitingRoom

# The rank of bench/paced.py: seconds per step and per row; tokens per request.
BASE, PER_ROW, PLACES = 0.010, 0.0001, 64
PROMPT, OUTPUT = 100, 160
TICK = 0.005


@dataclass
class Request:
    """One request; `first` is None if it was refused."""

    at: float
    sent: float | None = None
    first: float | None = None
    left: int = 0
    charged: float = 0.0


@dataclass
class SteppingFleet:
    """One rank: a request joins its next step and has its first token at the end of that step."""

    seed: int
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.room = WaitingRoom(0.0, PLACES, None)
        self.held, self.running = [], []  # requests at the rank: ready, and in the batch
        self.stepping = False
        self.numbers = itertools.count()
        self.events = []

    def at(self, time, what, *given):
        heapq.heappush(self.events, (time, next(self.numbers), what, given))

    def has_room(self):
        return len(self.held) + len(self.running) < PLACES + ready_sequences(PLACES, OUTPUT)

    def arrive(self, now):
        request = Request(now, left=self.rng.randint(OUTPUT // 2, OUTPUT * 3 // 2))
        self.requests.append(request)
        try:
            self.room.check(now, None)
        except ApiError:
            return
        if self.has_room() and not self.room.queue.num_sequences:
            self.send(now, request)
        else:
            self.room.push(now, Entry(key=None, since=now, count=1, load=request))

    def send(self, now, request):
        request.sent = now
        request.charged = self.room.started(now, None, PROMPT, 1000)
        self.held.append(request)
        if not self.stepping:
            self.step(now)

    def drain(self, now):
        while self.has_room() and (entry := self.room.queue.first()) is not None:
            self.room.start(now, entry)
            self.send(now, entry.load)

    def step(self, now):
        """Start the next step with the requests that are ready."""
        begun = self.held[: PLACES - len(self.running)]
        del self.held[: len(begun)]
        rows = len(self.running) + PROMPT * len(begun)
        self.running += begun
        self.stepping = bool(self.running)
        if self.stepping:
            self.at(now + BASE + PER_ROW * rows, self.stepped)

    def stepped(self, now):
        for request in self.running:
            if request.first is None:
                request.first = now
                if request.sent == request.at:
                    self.room.overload.answered(now, now - request.sent, self.room.queue.num_running)
            request.left -= 1
            if not request.left:
                self.room.queue.ended(None, request.charged, OUTPUT)
        self.running = [request for request in self.running if request.left]
        # The rank continues with its own requests; the queue learns of the free slot a moment later.
        self.step(now)
        self.drain(now)

    def tick(self, now, until):
        for entry in self.room.late(now):
            self.room.withdraw(now, entry)
        if now < until:
            self.at(now + TICK, self.tick, until)

    def run(self, rate, seconds, flood):
        """Run `seconds` at `rate`, then a minute at `flood`; return the sorted seconds to first token of both."""
        at = 0.0
        while at < seconds + 60:
            self.at(at, self.arrive)
            at += self.rng.expovariate(rate if at < seconds else flood)
        self.at(0.0, self.tick, seconds + 70)
        while self.events:
            now, _, what, given = heapq.heappop(self.events)
            what(now, *given)
        assert not self.running
        quiet = sorted(a.first - a.at for a in self.requests if a.at < seconds)
        flooded = sorted(a.first - a.at for a in self.requests if a.at >= seconds + 1 and a.first is not None)
        return quiet, flooded


def share(values, part):
    return values[int(part * len(values))]


CAPACITY = PLACES / OUTPUT / (BASE + PER_ROW * (PLACES + PROMPT * PLACES / OUTPUT))


@pytest.mark.parametrize("factor", [3, 10])
def test_flood_at_most_doubles_the_time_to_first_token(factor):
    """The limit holds from the flood's second second on, because prefills of the free slots come first."""
    quiet, flooded = SteppingFleet(seed=factor).run(0.3 * CAPACITY, 60, factor * CAPACITY)
    assert len(flooded) >= 0.98 * CAPACITY * 59
    print([(round(1e3 * share(quiet, part)), round(1e3 * share(flooded, part))) for part in (0.5, 0.9, 0.99)], "ms")
    assert share(flooded, 0.99) <= 2 * share(quiet, 0.99)


def test_burst_that_fills_the_slots_does_not_count_as_quiet():
    fleet = SteppingFleet(seed=1)
    fleet.run(0.3 * CAPACITY, 60, 10 * CAPACITY)
    assert fleet.room.overload.limit == pytest.approx(0.0121, rel=0.01)
