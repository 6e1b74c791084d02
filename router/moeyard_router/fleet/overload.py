"""Whether more comes in than the fleet can do, and how long a request may wait then. Pure: times are handed in.

A queue that takes up a burst is good; one that stands and grows only makes everybody late (Nichols and Jacobson,
"Controlling Queue Delay", ACM Queue 2012; Maurer, "Fail at Scale", ACM Queue 2015). So any burst may wait at first.
The number that wait when the queue has stood for `INTERVAL` is taken as what the fleet's clients bring along: as many
clients as there were, each with one request after the other (a benchmark of fixed concurrency), keep it there and are
all served. If it grows beyond that, more comes than goes, and from then on nobody waits longer than `limit`, until
nobody had to be refused for `CALM` seconds.
"""

from dataclasses import dataclass

INTERVAL = 0.5  # seconds; what came before may have had to wait as long, so it is kept far below the 60 s of a drill
CALM = 5.0  # seconds
# Of the time that a first token takes in a quiet fleet: in a full one it takes longer as it is, and twice is allowed.
_SHARE = 0.5
_LEAST, _MOST, _UNKNOWN = 0.01, 2.0, 0.25  # seconds
# Weights of the latest first token, if it came sooner than thought and if later: one of a step that many begin in, or
# of a long prompt, says little of a quiet fleet.
_SOONER, _LATER = 0.2, 0.01


@dataclass(slots=True)
class Overload:
    """Watches how many sequences wait. `places`: how many run at once."""

    places: int
    _since: float | None = None  # when somebody began to wait
    _level: int | None = None  # how many waited an INTERVAL later
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
        """So many wait now; said whenever it changes, and now and then."""
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
        """Somebody was, for the time that it would have waited: the overload goes on."""
        if self.active(now):
            self._until = now + CALM

    def answered(self, now: float, seconds: float, running: int = 0) -> None:
        """A sequence that had not waited had its first token so long after it was sent; so many run by now.

        Where more than half of the places are taken a later one tells nothing of a quiet fleet: a flood fills all
        places at once before it is known to be one, and their first tokens come after all their prompts.
        """
        if self.active(now):
            return
        before = seconds if self._first_token is None else self._first_token
        if seconds < before or 2 * running <= self.places:
            self._first_token = before + (_SOONER if seconds < before else _LATER) * (seconds - before)
