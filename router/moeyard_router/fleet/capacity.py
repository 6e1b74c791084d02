"""The capacity of a fleet: how many sequences may enter, how fast they leave, and when a client should retry. Pure.

All times are arguments, in monotonic seconds.
"""

import math
from dataclasses import dataclass

from moeyard_router.errors import ApiError

WINDOW = 30.0  # seconds; older events hardly count
UNKNOWN = 5.0  # seconds to wait while no rate is known, because nothing has ended lately
LEAST, MOST = 1.0, 60.0  # seconds; Retry-After stays within


@dataclass(slots=True)
class DrainRate:
    """Amounts per second that left, weighted by e^(-age / WINDOW), since `start`.

    Early on the weights do not sum to one; they are scaled, so that the first minute is no underestimate.
    """

    start: float
    _sum: float = 0.0
    _at: float = 0.0

    def left(self, now: float, amount: float = 1.0) -> None:
        """Count `amount` (sequences, tokens) that left at `now`, which never decreases."""
        self._sum = self._decayed(now) + amount
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the rate at `now`, 0 if nothing has left."""
        seen = -WINDOW * math.expm1(-(now - self.start) / WINDOW)
        return self._decayed(now) / seen if seen > 0 else 0.0

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp((self._at - now) / WINDOW) if self._sum else 0.0


def retry_after(missing: float, per_second: float) -> float:
    """Return the seconds until `missing` (sequences, tokens) leave at this rate, within [LEAST, MOST].

    Below a thousandth per second the rate says nothing, and the result is UNKNOWN.
    """
    if per_second < 1e-3:
        return UNKNOWN
    return min(max(missing / per_second, LEAST), MOST)


class Capacity:
    """Counts sequences in flight and the prompt tokens of those that have no token yet.

    At most `most` sequences may be in flight, and `most_tokens` such tokens unless it is None.
    """

    def __init__(self, now: float, most: int, most_tokens: int | None) -> None:
        self.sequences = 0
        self.unread_tokens = 0
        self._most = most
        self._most_tokens = most_tokens
        self._ends, self._reads = DrainRate(now), DrainRate(now)  # of sequences, and of prompt tokens

    def resize(self, most: int) -> None:
        """Allow at most `most` sequences from now on; those that are there stay."""
        self._most = most

    def fits(self, count: int, tokens: int) -> bool:
        """Whether `count` sequences with `tokens` prompt tokens may enter."""
        most = self._most_tokens
        if self.sequences + count > self._most:
            return False
        return most is None or not self.unread_tokens or self.unread_tokens + tokens <= most

    def check(self, now: float, count: int, tokens: int) -> None:
        """Raise `ApiError` 429 unless `count` sequences with `tokens` prompt tokens may enter."""
        missing = self.sequences + count - self._most
        if missing > 0:
            message = f"{self.sequences} of {self._most} sequences are in flight, no room for {count} more"
            raise ApiError(429, message, reason="queue_full", retry_after=self.wait(now, missing))
        most = self._most_tokens
        # A request of any size enters if no prompt waits, because it could never enter otherwise.
        if most is not None and self.unread_tokens and self.unread_tokens + tokens > most:
            message = f"{self.unread_tokens} of {most} prompt tokens wait to be read, no room for {tokens} more"
            missing = min(self.unread_tokens + tokens - most, self.unread_tokens)
            wait = retry_after(missing, self._reads.per_second(now))
            raise ApiError(429, message, reason="queue_full", retry_after=wait)

    def wait(self, now: float, missing: int) -> float:
        """Return the seconds until `missing` more sequences have ended, by `retry_after`."""
        return retry_after(missing, self._ends.per_second(now))

    def entered(self, prompt: int) -> None:
        """Count a sequence with a prompt of `prompt` tokens."""
        self.sequences += 1
        self.unread_tokens += prompt

    def read(self, now: float, prompt: int) -> None:
        """Count its prompt as read: its first token is there."""
        self.unread_tokens -= prompt
        self._reads.left(now, prompt)

    def left(self, now: float, unread: int, *, ran: bool) -> None:
        """Count its end, with `unread` prompt tokens; a refused sequence (`ran` false) made no room."""
        self.sequences -= 1
        self.unread_tokens -= unread
        if ran:
            self._ends.left(now)

    def cleared(self) -> None:
        """Forget all sequences: the fleet itself ended them."""
        self.sequences = self.unread_tokens = 0
