"""Processes that are ahead of a rank's start by what takes most of it, for whichever rank is lost next.

Starting Python and importing torch takes seconds (6 of the 14 in which a rank on a GPU was replaced, see
docs/reliability.md) and is the same for every rank: so it is done beforehand. Such a process has touched no GPU and no
checkpoint.
"""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

# What a process that has imported everything may take to say so.
ANSWER_SECONDS = 2.0


class Standby:
    """Keeps `count` actors of `make()` that have imported what a rank runs. Calls come one at a time."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make, self._count = make, count
        self._actors: list[tuple[Any, Any]] = []  # each with the call that imports

    def fill(self) -> None:
        """Start as many as are missing; returns at once."""
        while len(self._actors) < self._count:
            actor = self._make()
            self._actors.append((actor, actor.warm.remote()))

    @property
    def kept(self) -> bool:
        """Whether there are any."""
        return self._count > 0

    def ready(self) -> bool:
        """Whether the next one to be taken has imported everything, or is gone; raises RayError with what it said."""
        if not self._actors:
            return True
        _, warming = self._actors[0]
        if not ray.wait([warming], timeout=0)[0]:
            return False
        ray.get(warming)
        return True

    def take(self) -> Any | None:
        """One that still answers, or is not ready yet; None if there is none."""
        while self._actors:
            actor, warming = self._actors.pop(0)
            try:
                if ray.wait([warming], timeout=0)[0]:
                    # Again: it may have ended since.
                    ray.get([warming, actor.warm.remote()], timeout=ANSWER_SECONDS)
            except RayError:  # boundary: it has ended, so there is one less
                ray.kill(actor)
                continue
            return actor
        return None

    def forget(self) -> None:
        """Drop them without a word to Ray, which has ended."""
        self._actors = []

    def stop(self) -> None:
        """End them; `fill` starts others, with the code that is on the disk then."""
        for actor, _ in self._actors:
            ray.kill(actor)
        self._actors = []
