"""How fast a fleet gets rid of what it holds, and when a client that was refused had better come back. Pure."""

import math
from dataclasses import dataclass

WINDOW = 30.0  # seconds; what is older than a few of these no longer counts
UNKNOWN = 5.0  # seconds to wait where nothing has ended lately, so that nothing is known
LEAST, MOST = 1.0, 60.0  # seconds; Retry-After stays within


@dataclass(slots=True)
class DrainRate:
    """Amounts per second that left, weighted by e^(-age / WINDOW); `start` is when watching began (monotonic seconds).

    The weights of a rate that was watched for less than a few windows do not sum to one yet; they are scaled so that
    they do, so the first minute is no underestimate.
    """

    start: float
    _sum: float = 0.0
    _at: float = 0.0

    def left(self, now: float, amount: float = 1.0) -> None:
        """`amount` (sequences, tokens) left at `now`; never called with an earlier time."""
        self._sum = self._decayed(now) + amount
        self._at = now

    def per_second(self, now: float) -> float:
        """The rate at `now`, 0 where nothing has left."""
        seen = -WINDOW * math.expm1(-(now - self.start) / WINDOW)
        return self._decayed(now) / seen if seen > 0 else 0.0

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp((self._at - now) / WINDOW) if self._sum else 0.0


def retry_after(missing: float, per_second: float) -> float:
    """Seconds until `missing` (sequences, tokens) will have left at this rate, within [LEAST, MOST].

    Below a thousandth per second the rate says nothing: UNKNOWN.
    """
    if per_second < 1e-3:
        return UNKNOWN
    return min(max(missing / per_second, LEAST), MOST)
