"""Calls of several ranks that are waited for together, as long as their processes give signs of life."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from moeyard.rank import RanksLost, named
from moeyard.ray_member import Member, Progress, gather, tell_progress

ASK_SECONDS = 1.0
# How long a process that starts may be silent: at the fleet's start, when files may be cold, and later. Then it is at
# least as long as the whole start took.
FIRST_SIGN_SECONDS, SIGN_SECONDS = 300.0, 60.0


class Signs:
    """Asks processes whether they live, each again a second after its last answer.

    `seconds` is how long one may stay silent. To import torch, or to read it from a cold disk, holds the interpreter's
    lock for many seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = FIRST_SIGN_SECONDS
        self.clock = clock

    def started(self, seconds: float) -> None:
        """The fleet's start took so long."""
        self.seconds = max(SIGN_SECONDS, seconds)

    def lost(self, members: Mapping[int, Member]) -> RanksLost | None:
        """The loss of those of `members` (by rank) that are silent for too long; None if all give signs of life."""
        now, silent = self.clock(), []
        for rank, member in members.items():
            if member.asked is None or (now - member.asked_at >= ASK_SECONDS and _answered(member)):
                member.asked, member.asked_at = member.actor.alive.remote(), now
            elif now - member.asked_at > self.seconds:
                silent.append(rank)
        if not silent:
            return None
        return RanksLost(silent, f"{named(silent)} gave no sign of life for {self.seconds:.0f} s while starting")


def _answered(member: Member) -> bool:
    """Whether the process has answered; keep what it said. Its end is an answer, too: other calls tell of it."""
    if not ray.wait([member.asked], timeout=0)[0]:
        return False
    with contextlib.suppress(RayError):  # boundary: it has ended
        member.place = ray.get(member.asked)
    return True


class Calls:
    """Waits for calls of a fleet's `members`; `check` is called meanwhile, and ends the wait by an exception.

    `at_once` says whether the first failure is raised at once. A fleet that recovers hears all ranks first: what the
    sound ones did is not done again.
    """

    def __init__(
        self, members: Callable[[], list[Member]], *, check: Callable[[], None], at_once: Callable[[], bool]
    ) -> None:
        self.signs = Signs()
        self._members, self._check, self._at_once = members, check, at_once

    def __call__(
        self, calls: Mapping[int, Any], took: Callable[[int, Any], None] = lambda rank, result: None, *,
        timeout: float | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """Give `took` the result of one call per rank; raises RanksLost with the first one's own message.

        Calls without a `timeout` may take any time, as long as their processes give signs of life. `progress` gets the
        bytes that all have loaded.
        """
        members = self._members()

        def check() -> None:
            self._check()
            if progress is not None and calls:
                tell_progress([members[rank] for rank in calls], progress)

        def silent(ranks: Collection[int]) -> RanksLost | None:
            return self.signs.lost({rank: members[rank] for rank in ranks}) if timeout is None else None

        gather(calls, took, timeout=timeout, check=check, silent=silent, at_once=self._at_once())
