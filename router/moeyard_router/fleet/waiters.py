"""The sequences that queue for a place on a worker. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from moeyard_router.config import RouterConfig
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.flights import Flight
from moeyard_router.fleet.waiting import WaitingRoom
from moeyard_worker.protocol import Rejected

_FIRST_GUESS = 128.0  # output tokens of a sequence, before any has ended
_NEW = 0.02  # weight of the latest answer in the average
_LONG = 100  # output tokens; an empty place for one step hardly matters after an answer this long


def ready_sequences(places: int, answer: float) -> int:
    """Return how many sequences a worker holds beyond the `places` that run. `answer`: average output tokens.

    The worker computes a step between the end of a sequence and the arrival of the next one. Without a ready sequence,
    a place stays empty for one step per answer. `places` / `answer` sequences end per step, so more ready sequences
    have no use.
    """
    ends = places / max(answer, 1.0)
    return 0 if ends < 1 and answer >= _LONG else max(1, round(ends))


class Waiters:
    """The sequences before their first start. The sequences of one request wait as one entry.

    `worker_places`: how many sequences a worker gets at once, None for no limit.
    """

    def __init__(self, now: float, config: RouterConfig) -> None:
        places = self._places = config.worker_places
        self._answer = _FIRST_GUESS  # average output tokens of a sequence
        self.worker_places = None if places is None else places + ready_sequences(places, self._answer)
        self._most_inflight = config.most_inflight
        self.room = WaitingRoom(now, self._running(len(config.workers)), config.max_queue_seconds)
        self.queue = self.room.queue

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""
        self.room.resize(self._running(num_workers))

    def _running(self, num_workers: int) -> int:
        """Return how many sequences run at once on `num_workers`."""
        return self._most_inflight(num_workers) if self._places is None else self._places * num_workers

    def push(self, now: float, flights: Sequence[Flight]) -> None:
        """Queue the sequences of one request."""
        entry = Entry(key=flights[0].key, since=now, count=len(flights), load=list(flights))
        for flight in flights:
            flight.entry = entry
        self.room.push(now, entry)

    def pop(self, now: float) -> list[Flight]:
        """Remove and start the sequences of the next request. Empty if none waits."""
        entry = self.queue.first()
        if entry is None:
            return []
        self.room.start(now, entry)
        flights: list[Flight] = entry.load
        for flight in flights:
            flight.entry, flight.waited = None, now - entry.since
            self.started(now, flight)
        return flights

    def started(self, now: float, flight: Flight) -> None:
        """Charge for a sequence that goes to a worker for the first time, with or without a wait."""
        assert flight.charged is None, f"{flight.name} starts twice"
        flight.sent = now
        flight.charged = self.room.started(now, flight.key, len(flight.prompt), flight.sampling.max_tokens)

    def answered(self, now: float, flight: Flight) -> None:
        """Take the first token of a sequence as a measurement for the overload limit."""
        if not flight.waited and not flight.began:
            self.room.overload.answered(now, now - flight.sent, self.queue.num_running)

    def ended(self, now: float, flight: Flight, output: int) -> None:
        """Settle the charge of a sequence that ended after `output` tokens, or remove it from the queue."""
        if flight.entry is not None:
            self._withdraw(now, flight, flight.entry)
        elif flight.charged is not None:
            self.queue.ended(flight.key, flight.charged, output)
            flight.charged = None
            if self._places is not None and output:
                self._answer += _NEW * (output - self._answer)
                self.worker_places = self._places + ready_sequences(self._places, self._answer)

    def displace(self, now: float, key: str | None, until: Callable[[], bool]) -> Iterator[tuple[Flight, Rejected]]:
        """Refuse the newest requests of keys with longer queues than `key` would have, `until` there is room."""
        while self.queue.num_sequences and not until() and (entry := self.queue.displaceable(key)) is not None:
            yield from self._refuse(now, entry, "queue_full", "the fleet is full, and others had less waiting")

    def late(self, now: float) -> Iterator[tuple[Flight, Rejected]]:
        """Refuse the requests that have waited too long."""
        for entry in self.room.late(now):
            yield from self._refuse(now, entry, "queue_timeout", f"waited {now - entry.since:.1f} s for its start")

    def validate(self, flights: Iterable[Flight]) -> None:
        """Assert that the queue holds the waiting ones of `flights` (all), and that all counts are right."""
        queue, flights = self.queue, list(flights)
        assert {id(f) for e in queue for f in e.load} == {id(f) for f in flights if f.entry is not None}
        assert all(flight.entry is entry for entry in queue for flight in entry.load), "a flight has another entry"
        assert all(entry.count == len(entry.load) for entry in queue), "an entry is miscounted"
        assert all(flight.key == entry.key for entry in queue for flight in entry.load), "another key pays"
        assert queue.num_sequences == sum(entry.count for entry in queue), "the queue is miscounted"
        assert queue.num_running == sum(f.charged is not None for f in flights), "what runs is miscounted"
        for key in {flight.key for flight in flights}:
            runs = sum(f.charged is not None for f in flights if f.key == key)
            assert queue.share(key)[0] == runs, f"key {key} counts {queue.share(key)[0]} of {runs} sequences"

    def _withdraw(self, now: float, flight: Flight, entry: Entry) -> None:
        flight.entry = None
        entry.load.remove(flight)
        if entry.count == 1:
            self.room.withdraw(now, entry)
        else:
            self.queue.shrink(entry)

    def _refuse(self, now: float, entry: Entry, reason: str, message: str) -> Iterator[tuple[Flight, Rejected]]:
        self.room.withdraw(now, entry)
        wait = self.room.promise(now, entry.key, entry.count)
        for flight in entry.load:
            flight.entry = None
            yield flight, Rejected(request_id=flight.name, reason=reason, message=message, retry_after=wait)
