"""When the next step is planned while one runs on a device: late enough for who arrives meanwhile to be in it.

Planned as soon as there is room for it, a step holds who was there then: a prompt that arrives a moment later waits for
the end of the step that runs and for all of the next one. A step of prompts takes tens of milliseconds, and to plan and
launch one a few, so it is planned when those are left. How long a step takes is guessed by the last ones of its size,
and it is no harm to guess too short; one that ends sooner is seen to.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable

from moeyard_worker.scheduling.step import Step

# Of so many steps of a size the shortest counts, once there have been as many.
_KEPT = 4
# What planning a step took of the host's time, of so many steps the most, and that many times it.
_PLANNED, _TIMES = 16, 1.5
# Seconds for what is not known of a host; and less than so many are not worth waiting.
_SPARE_S, _WORTH_S = 2e-3, 4e-3
# Steps of about as many prompt rows take as long.
_ROWS = 256

_Size = tuple[int, int, int]


class Pacing:
    """Of one rank's loop; all times are monotonic seconds, or seconds."""

    def __init__(self) -> None:
        self._took: defaultdict[_Size, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._planned: deque[float] = deque(maxlen=_PLANNED)
        # Steps in flight, oldest first: their sizes.
        self._flying: deque[_Size] = deque()
        self._ends = 0.0

    def launched(self, step: Step, *, of_peers: int, seconds: float, now: float) -> None:
        """A step of this rank was planned and launched in `seconds` of the host's own; no rank brings more than
        `of_peers` rows to it.

        What waits for the device in the midst of a launch, as for the ids of prompts whose experts lack slots, counts
        as the host's, so that such steps are planned at once.
        """
        prompt, decode = step.num_prefill_tokens, step.num_tokens - step.num_prefill_tokens
        size = -(-prompt // _ROWS), max(decode - 1, 0).bit_length() + (decode > 0), -(-of_peers // _ROWS)
        begins = max(now - seconds, self._ends) if self._flying else now - seconds
        self._planned.append(seconds)
        self._flying.append(size)
        self._ends = begins + self._guess(size)

    def completed(self, seconds: float | None, *, now: float) -> None:
        """The oldest step in flight has ended; it took `seconds` of a device, None: of one without a clock."""
        size = self._flying.popleft()
        if seconds is not None:
            self._took[size].append(seconds)
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
        took = self._took.get(size, ())
        return min(took) if len(took) == _KEPT else 0.0
