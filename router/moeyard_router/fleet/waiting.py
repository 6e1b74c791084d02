"""The router's queue: which request starts next, which may enter, and which has waited too long. Pure.

Requests queue in the router, and the workers hold only the sequences that keep them busy. So a request goes to a rank
with room when its turn comes, API keys take turns, and the queue survives the loss of a worker. The fair queue decides
between keys. Names that a client chooses (`x-session-id`, `user`) do not count, because a client could claim many.

A queue that absorbs a burst is good. A queue that stands and grows makes every request late (Nichols and Jacobson,
"Controlling Queue Delay", ACM Queue 2012; Maurer, "Fail at Scale", ACM Queue 2015). So every burst may wait at first.
The queue's length after it has stood for `INTERVAL` counts as the number of concurrent clients. A benchmark of fixed
concurrency keeps it there, and all its requests are served. If the queue grows beyond that, more requests arrive than
end. Then no request waits longer than `limit`, until none had to be refused for `CALM` seconds.
"""

import math
from dataclasses import dataclass

from moeyard_router.errors import ApiError
from moeyard_router.fleet.capacity import UNKNOWN, DrainRate
from moeyard_router.fleet.fair import Entry, FairQueue

INTERVAL = 0.5  # seconds; requests before an overload may wait this long, so it is far below the 60 s of a drill
CALM = 5.0  # seconds
# Longest wait in overload, as a share of a quiet fleet's time to first token. A full fleet takes longer anyway.
_SHARE = 0.5
_LEAST, _MOST, _UNKNOWN = 0.01, 2.0, 0.25  # seconds
# Weights of the latest first token in the average, if it came earlier or later. A late one says little about a quiet
# fleet: its step may have started many sequences, or its prompt may have been long.
_SOONER, _LATER = 0.2, 0.01
_LONGEST_RETRY = 600.0  # seconds; the longest Retry-After
_ENOUGH = 8  # starts before their rate is used
_EMPTY = 1.0  # seconds with an empty queue, after which the rate of starts no longer shows the fleet's capacity
# A key below its share may wait for this many of its turns despite the limit, because places become free one by one.
_TURNS = 8


@dataclass(slots=True)
class Overload:
    """Watches the queue's length for overload. `places` sequences run at once."""

    places: int
    _since: float | None = None  # time since which the queue has not been empty
    _level: int | None = None  # its length an INTERVAL later
    _until: float = 0.0
    _first_token: float | None = None

    @property
    def limit(self) -> float:
        """Seconds that a request may wait while there is overload."""
        return _UNKNOWN if self._first_token is None else min(max(_SHARE * self._first_token, _LEAST), _MOST)

    def active(self, now: float) -> bool:
        """Whether there is overload."""
        return now < self._until

    def waiting(self, now: float, num: int) -> None:
        """Record the queue's length, whenever it changes and periodically."""
        if not num:
            self._since = self._level = None
            return
        if self._since is None:
            self._since = now
        elif self._level is None:
            if now - self._since >= INTERVAL:
                self._level = num
        elif num > self._level + max(8, self.places // 8):
            self._until = now + CALM

    def refused(self, now: float) -> None:
        """Prolong the overload because a request was refused for its wait."""
        if self.active(now):
            self._until = now + CALM

    def answered(self, now: float, seconds: float, running: int = 0) -> None:
        """Record the time to first token of a sequence that had not waited, while `running` sequences run.

        A late one is ignored if more than half of the places are taken. A sudden flood fills all places before it is
        detected, and its first tokens come after all its prompts.
        """
        if self.active(now):
            return
        before = seconds if self._first_token is None else self._first_token
        if seconds < before or 2 * running <= self.places:
            self._first_token = before + (_SOONER if seconds < before else _LATER) * (seconds - before)


class WaitingRoom:
    """Owner of the queue. `places` sequences run at once. All times are monotonic seconds.

    `max_seconds`: how long a request may wait. None: no limit, except in overload (`Overload`).
    """

    def __init__(self, now: float, places: int, max_seconds: float | None) -> None:
        self.queue = FairQueue()
        self._places = places
        self.overload = Overload(places)
        self._max_seconds = max_seconds
        self._starts = DrainRate(now)  # of sequences, while others wait
        self._num_starts = 0
        self._last = -math.inf  # time at which the queue last held a request
        self._held: float | None = None  # time since which nothing runs
        self._slots: dict[str | None, float] = {}  # per key, the latest Retry-After time that a refused request got

    def resize(self, places: int) -> None:
        """Change the number of sequences that run at once."""
        self._places = self.overload.places = places

    def limit(self, now: float, key: str | None) -> float | None:
        """Return the longest wait of a request of `key` in seconds, None for no limit."""
        if self._held is not None:
            return None
        if self._max_seconds is not None:
            return self._max_seconds
        if not self.overload.active(now):
            return None
        running, keys = self.queue.share(key)
        rate = self._rate(now)
        if keys < 2 or rate is None or running * keys > self._places:
            return self.overload.limit
        return max(self.overload.limit, _TURNS * keys / rate)

    def check(self, now: float, key: str | None, count: int = 1) -> None:
        """Raise `ApiError` 429 if `count` new sequences of `key` would wait longer than their limit."""
        limit = self.limit(now, key) if self.queue.num_sequences else None
        if limit is None:
            return
        ahead = self.queue.ahead(key)
        rate = self._rate(now)
        if rate is not None and ahead / rate > limit:
            self.overload.refused(now)
            message = f"the fleet is full: {ahead} sequences go first, which takes {ahead / rate:.1f} s"
            raise ApiError(429, message, reason="overload", retry_after=self.promise(now, key, count))

    def push(self, now: float, entry: Entry) -> None:
        """Queue a request."""
        if now - self._last > _EMPTY:
            self._starts, self._num_starts = DrainRate(now), 0
        self.queue.push(entry)
        self._changed(now)

    def start(self, now: float, entry: Entry) -> None:
        """Remove a request from the queue because it goes to a worker. `started` follows for each sequence."""
        self.queue.remove(entry)
        self._changed(now)

    def started(self, now: float, key: str | None, prompt: int, most: int) -> float:
        """Count the start of a sequence, with or without a wait. Return its charge for `FairQueue.ended`."""
        if now - self._last <= _EMPTY:
            self._starts.left(now)
            self._num_starts += 1
        return self.queue.started(key, prompt, most)

    def withdraw(self, now: float, entry: Entry) -> None:
        """Remove a request from the queue that does not start."""
        self.queue.remove(entry)
        self._changed(now)

    def late(self, now: float) -> list[Entry]:
        """Return the requests that have waited too long. The caller withdraws them."""
        self._changed(now)
        limits = {key: self.limit(now, key) for key in {entry.key for entry in self.queue}}
        late = [e for e in self.queue if (limit := limits[e.key]) is not None and now - e.since - e.excused >= limit]
        if late:
            self.overload.refused(now)
        return late

    @property
    def is_held(self) -> bool:
        """Whether the clock of all waits stands."""
        return self._held is not None

    def hold(self, now: float) -> None:
        """Stop the clock of all waits, because nothing runs."""
        if self._held is None:
            self._held = now

    def resume(self, now: float) -> None:
        """Start the clock of all waits again. The present queue is a burst that the fleet itself caused."""
        if self._held is None:
            return
        for entry in self.queue:
            entry.excused += now - max(self._held, entry.since)
        self._held = None
        self._starts, self._num_starts = DrainRate(now), 0
        self.overload.waiting(now, 0)
        self._changed(now)

    def promise(self, now: float, key: str | None, count: int = 1) -> float:
        """Return the seconds after which a refused request should retry, when a place is expected to be free.

        Each share of a key's rate of starts is promised only once, the earliest first. So refused requests do not all
        return at the same time. A key that retries too early only delays its own later times.
        """
        rate = self._rate(now)
        if rate is None:
            return UNKNOWN
        if len(self._slots) > 4096:
            self._slots = {name: at for name, at in self._slots.items() if at > now}
        keys = max(1, self.queue.num_keys)
        at = max(self._slots.get(key, 0.0), now + self.queue.ahead(key) / rate) + count * keys / rate
        at = self._slots[key] = min(at, now + _LONGEST_RETRY)
        return at - now

    def _rate(self, now: float) -> float | None:
        """Return the sequences per second that leave the queue, None while unknown."""
        rate = self._starts.per_second(now)
        return rate if self._num_starts >= _ENOUGH and rate > 1e-3 else None

    def _changed(self, now: float) -> None:
        num = self.queue.num_sequences
        if num:
            self._last = now
        if self._held is None:
            self.overload.waiting(now, num)
