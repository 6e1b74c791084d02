"""The requests that wait for a place at a worker: their tickets, their names, and the clock that sends them away."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeyard_router.config import RouterConfig
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.ticket import Lost, Ticket
from moeyard_router.fleet.waiting import WaitingRoom
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Rejected, SamplingParams

NOWHERE = Route(rank=-1, reason="waiting")
_TICK = 0.02  # seconds between looks at who has waited too long, while anybody waits
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


@dataclass(slots=True, eq=False)
class Order:
    """What a request wants of the fleet; a sequence that was given up meanwhile is None."""

    request_id: str
    sequences: list[tuple[Sequence[int], SamplingParams] | None]
    client: str | None
    ticket: Ticket

    def name(self, index: int) -> str:
        """What the workers call a sequence."""
        return f"{self.request_id}-{index}"


class Waiters:
    """The asyncio side of a `WaitingRoom`. Every sequence pushed ends as started, abandoned, refused or lost.

    `drain` is called now and then while anybody waits; `ended` as `Room.left` for each that will not run.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        drain: Callable[[], None],
        left: Callable[[float, int], None],
    ) -> None:
        places = self._places = config.worker_places
        self._answer = _FIRST_GUESS  # output tokens of a sequence
        # Sequences that a worker is given at once.
        self.worker_places = None if places is None else places + ready_sequences(places, self._answer)
        total = config.max_inflight if places is None else places * len(config.workers)
        self._room = WaitingRoom(time.monotonic(), total, config.max_queue_seconds)
        self._metrics = metrics
        self._drain = drain
        self._left = left
        self._names: dict[str, tuple[Entry, int]] = {}  # of every sequence that waits
        self._ticking = False

    @property
    def num_sequences(self) -> int:
        """Those that wait."""
        return len(self._names)

    def check(self, key: str | None, count: int = 1) -> None:
        """Raise `ApiError` 429 if `count` sequences of `key` would wait too long. Cheap, so it is asked early, too."""
        if self._names:
            self._room.check(time.monotonic(), key, count)

    def displace(self, now: float, key: str | None, *, until: Callable[[], bool]) -> None:
        """Until there is room, refuse the newest of keys that have more waiting than `key` would have."""
        while self._names and not until() and (entry := self._room.queue.displaceable(key)) is not None:
            self._refuse(now, entry, "queue_full", "the fleet is full, and others had less waiting")

    def push(self, now: float, key: str | None, order: Order) -> None:
        """A request waits, all its sequences as one."""
        known = [sequence for sequence in order.sequences if sequence is not None]
        entry = Entry(key=key, since=now, count=len(known), load=order)
        for index in range(len(order.sequences)):
            name = order.name(index)
            assert name not in self._names, f"request id {name} already waits"
            self._names[name] = (entry, index)
            order.ticket.opened(index, name, NOWHERE)
        self._room.push(now, entry)
        self._changed()
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK, self._tick)

    def first(self) -> Entry | None:
        """Whose turn it is."""
        return self._room.queue.first()

    def start(self, now: float, entry: Entry) -> None:
        """It goes to the workers now."""
        self._room.start(now, entry)
        self._forget(entry)
        self._metrics.waited.observe(now - entry.since)

    def started(self, now: float, key: str | None, prompt: int, most: int) -> float:
        """A sequence goes to a worker, waited or not: as `WaitingRoom.started`."""
        return self._room.started(now, key, prompt, most)

    def answered(self, now: float, seconds: float) -> None:
        """A sequence that had not waited had its first token so long after it was sent."""
        self._room.overload.answered(now, seconds)

    def ended(self, key: str | None, charged: float, output: int) -> None:
        """It has ended there: as `FairQueue.ended`."""
        self._room.queue.ended(key, charged, output)
        if self._places is not None and output:
            self._answer += _NEW * (output - self._answer)
            self.worker_places = self._places + ready_sequences(self._places, self._answer)

    def abandon(self, now: float, name: str) -> None:
        """Nobody wants this sequence any more. Unknown ones are ignored."""
        found = self._names.pop(name, None)
        if found is None:
            return
        entry, index = found
        prompt, _ = entry.load.sequences[index]
        entry.load.sequences[index] = None
        if entry.count == 1:
            self._room.withdraw(now, entry)
        else:
            self._room.queue.shrink(entry)
        self._left(now, len(prompt))
        self._changed()

    def end_all(self, now: float, reason: str) -> None:
        """Everybody who waits is told that it was for nothing."""
        for entry in list(self._room.queue):
            self._room.withdraw(now, entry)
            for index in self._leave(now, entry):
                entry.load.ticket.put(now, index, Lost(reason))
        self._changed()

    def validate(self) -> int:
        """Assert that names and queue agree; the prompt tokens of all who wait."""
        queue = self._room.queue
        names = {order.name(i) for e in queue for order in (e.load,) for i, s in enumerate(order.sequences) if s}
        assert names == set(self._names), "who waits is not who is known to wait"
        assert queue.num_sequences == len(self._names) == sum(e.count for e in queue), "the queue is miscounted"
        return sum(len(s[0]) for e in queue for s in e.load.sequences if s is not None)

    def _tick(self) -> None:
        self._ticking = bool(self._names)
        if not self._ticking:
            return
        now = time.monotonic()
        self._drain()
        for entry in self._room.late(now):
            self._refuse(now, entry, "queue_timeout", f"waited {now - entry.since:.1f} s for its start")
        asyncio.get_running_loop().call_later(_TICK, self._tick)

    def _refuse(self, now: float, entry: Entry, reason: str, message: str) -> None:
        self._room.withdraw(now, entry)
        wait = self._room.promise(now, entry.key, entry.count)
        for index in self._leave(now, entry):
            name = entry.load.name(index)
            told = Rejected(request_id=name, reason=reason, message=message, retry_after=wait)
            entry.load.ticket.put(now, index, told)
        self._changed()

    def _leave(self, now: float, entry: Entry) -> list[int]:
        """Those of its sequences that still wait leave without having run."""
        order = entry.load
        indices = [index for index, sequence in enumerate(order.sequences) if sequence is not None]
        for index in indices:
            del self._names[order.name(index)]
            self._left(now, len(order.sequences[index][0]))
        return indices

    def _forget(self, entry: Entry) -> None:
        for index, sequence in enumerate(entry.load.sequences):
            if sequence is not None:
                del self._names[entry.load.name(index)]
        self._changed()

    def _changed(self) -> None:
        self._metrics.waiting.set(len(self._names))
