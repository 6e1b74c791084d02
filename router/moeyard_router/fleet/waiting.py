"""The waiting room before the workers: who goes next, who may come in, who has waited too long. Pure.

Requests wait here and not at the workers, which hold no more than keeps them busy: so a request goes to the rank that
has room when it is its turn, keys take turns, and what waits outlives a worker. Among keys (http/keys.py names them)
the fair queue decides; what a client says of itself (`x-session-id`, `user`) does not make it another one, or anybody
could be many.
"""

import math

from moeyard_router.errors import ApiError
from moeyard_router.fleet.drain import UNKNOWN, DrainRate
from moeyard_router.fleet.fair import Entry, FairQueue
from moeyard_router.fleet.overload import Overload

_MOST = 600.0  # seconds; nobody is told to come back later than that
_ENOUGH = 8  # starts after which their rate says something
_EMPTY = 1.0  # seconds without anybody who waits, after which the rate of starts is no longer what the fleet can do
# Places become free one by one: a key below its share of them may wait for so many of its turns, whatever the limit.
_TURNS = 8


class WaitingRoom:
    """Owner of the queue. `places` sequences run at once; `max_seconds` is how long a request may wait.

    With None, a request may wait as long as it takes, except in overload (`Overload`). `now` is monotonic seconds.
    """

    def __init__(self, now: float, places: int, max_seconds: float | None) -> None:
        self.queue = FairQueue()
        self._places = places
        self.overload = Overload(places)
        self._max_seconds = max_seconds
        self._starts = DrainRate(now)  # of sequences, since some wait
        self._num_starts = 0
        self._last = -math.inf  # when somebody last waited
        self._held: float | None = None  # since when nothing runs
        self._slots: dict[str | None, float] = {}  # until when places are promised to those of a key that were refused

    def resize(self, places: int) -> None:
        """So many sequences run at once from now on."""
        self._places = self.overload.places = places

    def limit(self, now: float, key: str | None) -> float | None:
        """Seconds that a request of `key` may wait at most; None for any time."""
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
        """Raise `ApiError` 429 if `count` sequences that `key` sends now would have to wait longer than they may."""
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
        """It waits."""
        if now - self._last > _EMPTY:
            self._starts, self._num_starts = DrainRate(now), 0
        self.queue.push(entry)
        self._changed(now)

    def start(self, now: float, entry: Entry) -> None:
        """It waits no more and goes to a worker, as `started` is then told."""
        self.queue.remove(entry)
        self._changed(now)

    def started(self, now: float, key: str | None, prompt: int, most: int) -> float:
        """A sequence goes to a worker, waited or not; returns what `FairQueue.ended` wants to know of it."""
        if now - self._last <= _EMPTY:
            self._starts.left(now)
            self._num_starts += 1
        return self.queue.started(key, prompt, most)

    def withdraw(self, now: float, entry: Entry) -> None:
        """It waits no more, and does not run."""
        self.queue.remove(entry)
        self._changed(now)

    def late(self, now: float) -> list[Entry]:
        """Those that have waited too long; the caller withdraws them."""
        self._changed(now)
        limits = {key: self.limit(now, key) for key in {entry.key for entry in self.queue}}
        late = [e for e in self.queue if (limit := limits[e.key]) is not None and now - e.since - e.excused >= limit]
        if late:
            self.overload.refused(now)
        return late

    def hold(self, now: float) -> None:
        """Nothing runs for a while: nobody is refused for the time that this takes."""
        if self._held is None:
            self._held = now

    def resume(self, now: float) -> None:
        """It runs again. Who waits now is a burst that the fleet brought about itself."""
        if self._held is None:
            return
        for entry in self.queue:
            entry.excused += now - max(self._held, entry.since)
        self._held = None
        self._starts, self._num_starts = DrainRate(now), 0
        self.overload.waiting(now, 0)
        self._changed(now)

    def promise(self, now: float, key: str | None, count: int = 1) -> float:
        """Seconds after which somebody that is refused had better come back, on whose behalf a place is then free.

        Those who were refused before are told earlier times: a key's share of the rate at which sequences start is
        handed out once, so that they do not all come back at once to be refused again. A key that asks more often than
        it was told to only makes its own times longer.
        """
        rate = self._rate(now)
        if rate is None:
            return UNKNOWN
        if len(self._slots) > 4096:
            self._slots = {name: at for name, at in self._slots.items() if at > now}
        keys = max(1, self.queue.num_keys)
        at = max(self._slots.get(key, 0.0), now + self.queue.ahead(key) / rate) + count * keys / rate
        at = self._slots[key] = min(at, now + _MOST)
        return at - now

    def _rate(self, now: float) -> float | None:
        """Sequences per second that come to their turn; None before that is known."""
        rate = self._starts.per_second(now)
        return rate if self._num_starts >= _ENOUGH and rate > 1e-3 else None

    def _changed(self, now: float) -> None:
        num = self.queue.num_sequences
        if num:
            self._last = now
        if self._held is None:
            self.overload.waiting(now, num)
