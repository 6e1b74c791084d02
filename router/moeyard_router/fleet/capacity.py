"""The capacity of a fleet: how many sequences may enter, how fast they end, and when a client should retry. Pure.

All times are arguments, in monotonic seconds.
"""

import math
from dataclasses import dataclass

from moeyard_router.errors import ApiError

WINDOW = 30.0  # seconds; older events hardly count
UNKNOWN = 5.0  # seconds until a retry while no rate is known, because nothing has ended lately
LEAST, MOST = 1.0, 60.0  # bounds of Retry-After in seconds


@dataclass(slots=True)
class DrainRate:
    """Rate at which amounts have left since `start`, weighted by e^(-age / WINDOW).

    The weights are scaled to a sum of one, so that the first minute is no underestimate.
    """

    start: float
    _sum: float = 0.0
    _at: float = 0.0

    def left(self, now: float, amount: float = 1.0) -> None:
        """Count `amount` (sequences, tokens) that left at `now`, which never decreases."""
        self._sum = self._decayed(now) + amount
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the rate at `now`. 0 if nothing has left."""
        seen = -WINDOW * math.expm1(-(now - self.start) / WINDOW)
        return self._decayed(now) / seen if seen > 0 else 0.0

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp((self._at - now) / WINDOW) if self._sum else 0.0


def retry_after(missing: float, per_second: float) -> float:
    """Return the seconds until `missing` (sequences, tokens) leave at this rate, within [LEAST, MOST].

    UNKNOWN for a rate below a thousandth per second, which means nothing.
    """
    if per_second < 1e-3:
        return UNKNOWN
    return min(max(missing / per_second, LEAST), MOST)


class Capacity:
    """Counts the sequences in flight, and the prompt tokens of those without a first token.

    At most `most` sequences may be in flight, and `most_tokens` such tokens, unless it is None.
    """

    def __init__(self, now: float, most: int, most_tokens: int | None) -> None:
        self.sequences = 0
        self.unread_tokens = 0
        self._most = most
        self._most_tokens = most_tokens
        self._ends, self._reads = DrainRate(now), DrainRate(now)  # of sequences, and of prompt tokens

    def resize(self, most: int) -> None:
        """Change the limit of sequences. Those in flight stay."""
        self._most = most

    def refusal(self, now: float, count: int, tokens: int) -> ApiError | None:
        """Return a 429 if `count` sequences with `tokens` prompt tokens may not enter, else None."""
        missing = self.sequences + count - self._most
        if missing > 0:
            message = f"{self.sequences} of {self._most} sequences are in flight, no room for {count} more"
            return ApiError(429, message, reason="queue_full", retry_after=self.wait(now, missing))
        most = self._most_tokens
        # A request of any size enters if no other prompt waits, because it could never enter otherwise.
        if most is not None and self.unread_tokens and self.unread_tokens + tokens > most:
            message = f"{self.unread_tokens} of {most} prompt tokens wait to be read, no room for {tokens} more"
            missing = min(self.unread_tokens + tokens - most, self.unread_tokens)
            wait = retry_after(missing, self._reads.per_second(now))
            return ApiError(429, message, reason="queue_full", retry_after=wait)
        return None

    def wait(self, now: float, missing: int) -> float:
        """Return the expected seconds until `missing` more sequences have ended, as `retry_after`."""
        return retry_after(missing, self._ends.per_second(now))

    def entered(self, prompt: int) -> None:
        """Count a sequence with a prompt of `prompt` tokens."""
        self.sequences += 1
        self.unread_tokens += prompt

    def read(self, now: float, prompt: int) -> None:
        """Count a prompt as read, because its first token has arrived."""
        self.unread_tokens -= prompt
        self._reads.left(now, prompt)

    def left(self, now: float, unread: int, *, ran: bool) -> None:
        """Count the end of a sequence with `unread` prompt tokens. A refused one has not `ran` and made no room."""
        self.sequences -= 1
        self.unread_tokens -= unread
        if ran:
            self._ends.left(now)

    def cleared(self) -> None:
        """Forget all sequences, because the fleet itself ended them."""
        self.sequences = self.unread_tokens = 0
