"""When the next step is planned while one runs on a device: late enough to include requests that arrive meanwhile.

A step that is planned as soon as there is room holds the requests of that moment. A prompt that arrives a moment later
waits for the end of the running step and for all of the next one. A step of prompts takes tens of milliseconds, and
planning and launching one takes a few, so the next is planned when only these few are left. The length of a step is
guessed from similar steps before it. A guess that is too short does no harm, and a step that ends early is noticed.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable

from moeyard_worker.exchange.base import PeerRows

# The shortest of the `_SIMILAR` most similar steps counts. `_HISTORY` steps are remembered for each bit length of their
# largest rank's rows, so that steps of output do not displace steps of prompts.
_SIMILAR, _HISTORY = 4, 16
# Planning is expected to take `_TIMES` the longest of the last `_PLANNED` plans.
_PLANNED, _TIMES = 16, 1.5
# Seconds of reserve for an unknown host, and the shortest wait that is worthwhile.
_SPARE_S, _WORTH_S = 2e-3, 4e-3

# Rows of the largest rank, for which all ranks wait, and rows of all ranks, which the experts compute.
_Size = tuple[int, int]


class Pacing:
    """The pace of one rank's loop; all times are monotonic seconds, or seconds."""

    def __init__(self) -> None:
        # By bit length of the largest rank's rows, the latest step first.
        self._took: dict[int, deque[tuple[_Size, float]]] = {}
        self._planned: deque[float] = deque(maxlen=_PLANNED)
        # The sizes of the steps in flight, oldest first.
        self._flying: deque[_Size] = deque()
        self._ends = 0.0

    def launched(self, rows: PeerRows, *, seconds: float, now: float) -> None:
        """Note a step that was planned and launched in `seconds` of the host's time.

        Waits for the device during a launch, as for prompts whose experts lack slots, count as the host's time, so
        that such steps are planned at once.
        """
        size = rows.most, sum(rows.counts)
        begins = max(now - seconds, self._ends) if self._flying else now - seconds
        self._planned.append(seconds)
        self._flying.append(size)
        self._ends = begins + self._guess(size)

    def completed(self, seconds: float | None, *, now: float) -> None:
        """Note the end of the oldest step in flight, which took `seconds` of a device (None: not measured)."""
        size = self._flying.popleft()
        if seconds is not None:
            self._took.setdefault(size[0].bit_length(), deque(maxlen=_HISTORY)).appendleft((size, seconds))
        self._ends = now + sum(map(self._guess, self._flying))

    def clear(self) -> None:
        """Forget the steps in flight."""
        self._flying.clear()

    def too_early(self, begin: Callable[[], bool], pause: Callable[[Callable[[], bool]], bool]) -> bool:
        """Wait until the next step is due, or until `begin()` is true, and return False.

        `pause` waits until its argument is true. Return True if it returns true, because a message has arrived first.
        """
        due = self.due(time.monotonic())
        while time.monotonic() < due and not begin():
            if pause(lambda: time.monotonic() >= due or begin()):
                return True
        return False

    def due(self, now: float) -> float:
        """Return the time to plan the next step while others run. A time in the past means at once."""
        if not self._flying or not self._planned:
            return -math.inf
        due = self._ends - _TIMES * max(self._planned) - _SPARE_S
        return due if due - now > _WORTH_S else -math.inf

    def _guess(self, size: _Size) -> float:
        """Return the shortest time of similar steps, scaled down if they had more rows; 0 before any step ended."""
        near = self._took[min(self._took, key=lambda bits: abs(bits - size[0].bit_length()))] if self._took else ()
        here = tuple(map(math.log2, size))
        # Among equally similar steps the latest count.
        like = heapq.nsmallest(_SIMILAR, near, key=lambda took: math.dist(here, tuple(map(math.log2, took[0]))))
        return min((took * min(1.0, size[0] / most, size[1] / total) for (most, total), took in like), default=0.0)
