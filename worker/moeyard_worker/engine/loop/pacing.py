"""When the next step is planned while one runs on a device: late enough for who arrives meanwhile to be in it.

Planned as soon as there is room for it, a step holds who was there then: a prompt that arrives a moment later waits for
the end of the step that runs and for all of the next one. A step of prompts takes tens of milliseconds, and to plan and
launch one a few, so it is planned when those are left. How long a step takes is guessed by the steps before that were
most like it, and it is no harm to guess too short; one that ends sooner is seen to.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable

from moeyard_worker.exchange.base import PeerRows

# Of so many steps that are most like it the shortest counts; so many are kept of those whose most rows have as many
# bits, so that output does not make it forget prompts.
_LIKE, _KEPT = 4, 16
# What planning a step took of the host's time, of so many steps the most, and that many times it.
_PLANNED, _TIMES = 16, 1.5
# Seconds for what is not known of a host; and less than so many are not worth waiting.
_SPARE_S, _WORTH_S = 2e-3, 4e-3

_Size = tuple[int, int]  # rows: of the rank that brings most, for which all wait, and of all, for the experts


class Pacing:
    """Of one rank's loop; all times are monotonic seconds, or seconds."""

    def __init__(self) -> None:
        # By bits of the most rows; the latest first.
        self._took: dict[int, deque[tuple[_Size, float]]] = {}
        self._planned: deque[float] = deque(maxlen=_PLANNED)
        # Steps in flight, oldest first: their sizes.
        self._flying: deque[_Size] = deque()
        self._ends = 0.0

    def launched(self, rows: PeerRows, *, seconds: float, now: float) -> None:
        """A step of so many rows was planned and launched in `seconds` of the host's own.

        What waits for the device in the midst of a launch, as for the ids of prompts whose experts lack slots, counts
        as the host's, so that such steps are planned at once.
        """
        size = rows.most, sum(rows.counts)
        begins = max(now - seconds, self._ends) if self._flying else now - seconds
        self._planned.append(seconds)
        self._flying.append(size)
        self._ends = begins + self._guess(size)

    def completed(self, seconds: float | None, *, now: float) -> None:
        """The oldest step in flight has ended; it took `seconds` of a device, None: of one without a clock."""
        size = self._flying.popleft()
        if seconds is not None:
            self._took.setdefault(size[0].bit_length(), deque(maxlen=_KEPT)).appendleft((size, seconds))
        self._ends = now + sum(map(self._guess, self._flying))

    def clear(self) -> None:
        """Nothing is in flight any more."""
        self._flying.clear()

    def too_early(self, begin: Callable[[], bool], pause: Callable[[Callable[[], bool]], bool]) -> bool:
        """Wait until the next step is to be planned while one runs, or is to `begin`: False. True where `pause`, which
        waits until what it is given is so, has heard something before."""
        due = self.due(time.monotonic())
        while time.monotonic() < due and not begin():
            if pause(lambda: time.monotonic() >= due or begin()):
                return True
        return False

    def due(self, now: float) -> float:
        """When the next step is to be planned while these run; in the past if that is to be as soon as it can be."""
        if not self._flying or not self._planned:
            return -math.inf
        due = self._ends - _TIMES * max(self._planned) - _SPARE_S
        return due if due - now > _WORTH_S else -math.inf

    def _guess(self, size: _Size) -> float:
        """As long as steps like it took at least: with more rows no less, with fewer their share; 0: none has ended."""
        near = self._took[min(self._took, key=lambda bits: abs(bits - size[0].bit_length()))] if self._took else ()
        here = tuple(map(math.log2, size))
        # Of those that are as like it, the latest.
        like = heapq.nsmallest(_LIKE, near, key=lambda took: math.dist(here, tuple(map(math.log2, took[0]))))
        return min((took * min(1.0, size[0] / most, size[1] / total) for (most, total), took in like), default=0.0)
