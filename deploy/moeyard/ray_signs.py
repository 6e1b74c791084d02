"""Signs of life of processes that start or load, so that one that hangs is replaced."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping

import ray
from ray.exceptions import RayError

from moeyard.rank import RanksLost, named
from moeyard.ray_member import Member

ASK_SECONDS = 1.0


class Signs:
    """Asks processes whether they live, each again a second after its last answer.

    `seconds` is how long one may stay silent. To import torch, or to read it from a cold disk, holds the interpreter's
    lock for many seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock

    def lost(self, members: Mapping[int, Member]) -> RanksLost | None:
        """The loss of those of `members` (by rank) that are silent for too long; None if all give signs of life."""
        now, silent = self._clock(), []
        for rank, member in members.items():
            if member.asked is None or (now - member.asked_at >= ASK_SECONDS and _answered(member)):
                member.asked, member.asked_at = member.actor.alive.remote(), now
            elif now - member.asked_at > self.seconds:
                silent.append(rank)
        return silence(silent, self.seconds) if silent else None


def silence(ranks: Collection[int], seconds: float) -> RanksLost:
    """The loss of ranks that are silent."""
    return RanksLost(ranks, f"{named(ranks)} gave no sign of life for {seconds:.0f} s while starting")


def _answered(member: Member) -> bool:
    """Whether the process has answered; keep what it said. Its end is an answer, too: other calls tell of it."""
    if not ray.wait([member.asked], timeout=0)[0]:
        return False
    with contextlib.suppress(RayError):  # boundary: it has ended
        member.place = ray.get(member.asked)
    return True
