"""The requests that wait for a place at a worker: their sequences, and the clock that sends them away."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from moeyard_router.config import RouterConfig
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.flights import Flight
from moeyard_router.fleet.room import Room
from moeyard_router.fleet.waiting import WaitingRoom
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Rejected

_TICK = 0.005  # seconds between looks at who has waited too long, while anybody waits
_FIRST_GUESS = 128.0  # output tokens, before any answer has ended
_NEW = 0.02  # weight of the latest answer
_LONG = 100  # output tokens of which one more or less does not matter


def ready_sequences(places: int, answer: float) -> int:
    """How many a worker that runs `places` sequences holds ready behind them; answers have `answer` tokens on average.

    Between the end of a sequence and the arrival of the next from here the worker computes a step: without any that is
    ready its place is empty for one step per answer. With more of them ready than end in a step (`places` / `answer`),
    each waits there for no gain.
    """
    ends = places / max(answer, 1.0)
    return 0 if ends < 1 and answer >= _LONG else max(1, round(ends))


class Waiters:
    """The asyncio side of a `WaitingRoom`: flights whose first turn has not come. Those of a request wait as one entry.

    Every flight pushed is started, or ends (`ended`). `drain` is called now and then while anybody waits, `refuse` for
    each that has waited too long or makes room for others; it ends them.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        drain: Callable[[], None],
        refuse: Callable[[float, Flight, Rejected], None],
    ) -> None:
        places = self._places = config.worker_places
        self._answer = _FIRST_GUESS  # output tokens of a sequence
        # Sequences that a worker is given at once.
        self.worker_places = None if places is None else places + ready_sequences(places, self._answer)
        self._most_inflight = config.most_inflight
        self._room = WaitingRoom(time.monotonic(), self._running(len(config.workers)), config.max_queue_seconds)
        self._metrics = metrics
        self._drain = drain
        self._refuse = refuse
        self._ticking = False

    @property
    def num_sequences(self) -> int:
        """Those that wait."""
        return self._room.queue.num_sequences

    def resize(self, num_workers: int, room: Room) -> None:
        """There are so many workers now, which the fleet's room follows, too."""
        room.resize(self._most_inflight(num_workers))
        self._room.resize(self._running(num_workers))

    def _running(self, num_workers: int) -> int:
        """Sequences that so many workers run at once."""
        return self._most_inflight(num_workers) if self._places is None else self._places * num_workers

    def check(self, key: str | None, count: int = 1) -> None:
        """Raise `ApiError` 429 if `count` sequences of `key` would wait too long. Cheap, so it is asked early, too."""
        if self.num_sequences:
            self._room.check(time.monotonic(), key, count)

    def displace(self, now: float, key: str | None, *, until: Callable[[], bool]) -> None:
        """Until there is room, refuse the newest of keys that have more waiting than `key` would have."""
        while self.num_sequences and not until() and (entry := self._room.queue.displaceable(key)) is not None:
            self._send_away(now, entry, "queue_full", "the fleet is full, and others had less waiting")

    def hold(self, now: float) -> None:
        """The fleet is not whole: who waits stays, however long that takes."""
        self._room.hold(now)

    def resume(self, now: float) -> None:
        """It is whole again."""
        self._room.resume(now)

    def push(self, now: float, flights: Sequence[Flight]) -> None:
        """A request waits for its turn, all its sequences as one."""
        entry = Entry(key=flights[0].key, since=now, count=len(flights), load=list(flights))
        for flight in flights:
            flight.entry = entry
        self._room.push(now, entry)
        self._changed()
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK, self._tick)

    def pop(self, now: float) -> list[Flight]:
        """Those whose turn it is, which are `started`; none if nobody waits."""
        entry = self._room.queue.first()
        if entry is None:
            return []
        self._room.start(now, entry)
        self._changed()
        self._metrics.waited.observe(now - entry.since)
        flights: list[Flight] = entry.load
        for flight in flights:
            flight.entry, flight.waited = None, now - entry.since
            self.started(now, flight)
        return flights

    def started(self, now: float, flight: Flight) -> None:
        """A sequence goes to a worker for the first time, waited or not: as `WaitingRoom.started`."""
        assert flight.charged is None, f"{flight.name} starts twice"
        flight.sent = now
        flight.charged = self._room.started(now, flight.key, len(flight.prompt), flight.sampling.max_tokens)

    def answered(self, now: float, seconds: float) -> None:
        """A sequence that had not waited had its first token so long after it was sent."""
        self._room.overload.answered(now, seconds, self._room.queue.num_running)

    def ended(self, now: float, flight: Flight, output: int) -> None:
        """It has ended after so many tokens, wherever it was."""
        if flight.entry is not None:
            self._withdraw(now, flight, flight.entry)
            return
        if flight.charged is None:
            return  # it was sent away
        self._room.queue.ended(flight.key, flight.charged, output)
        flight.charged = None
        if self._places is not None and output:
            self._answer += _NEW * (output - self._answer)
            self.worker_places = self._places + ready_sequences(self._places, self._answer)

    def validate(self, flights: Iterable[Flight]) -> None:
        """Assert that those of `flights`, which are all, that wait are those in the queue, and the others run."""
        queue = self._room.queue
        assert {id(f) for e in queue for f in e.load} == {id(f) for f in flights if f.entry is not None}
        assert all(flight.entry is entry for entry in queue for flight in entry.load), "a flight is in another's place"
        assert all(entry.count == len(entry.load) for entry in queue), "an entry is miscounted"
        assert queue.num_sequences == sum(entry.count for entry in queue), "the queue is miscounted"
        assert queue.num_running == sum(f.charged is not None for f in flights), "what runs is miscounted"

    def _withdraw(self, now: float, flight: Flight, entry: Entry) -> None:
        flight.entry = None
        entry.load.remove(flight)
        if entry.count == 1:
            self._room.withdraw(now, entry)
        else:
            self._room.queue.shrink(entry)
        self._changed()

    def _tick(self) -> None:
        self._ticking = self.num_sequences > 0
        if not self._ticking:
            return
        now = time.monotonic()
        self._drain()
        for entry in self._room.late(now):
            self._send_away(now, entry, "queue_timeout", f"waited {now - entry.since:.1f} s for its start")
        asyncio.get_running_loop().call_later(_TICK, self._tick)

    def _send_away(self, now: float, entry: Entry, reason: str, message: str) -> None:
        self._room.withdraw(now, entry)
        wait = self._room.promise(now, entry.key, entry.count)
        for flight in entry.load:
            flight.entry = None
            told = Rejected(request_id=flight.name, reason=reason, message=message, retry_after=wait)
            self._refuse(now, flight, told)
        self._changed()

    def _changed(self) -> None:
        self._metrics.waiting.set(self.num_sequences)
