"""Ranks on their way into a fleet, or out of it, beside the steps of those that serve."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from moeyard.rank import RanksLost, named
from moeyard.ray_member import STOP_SECONDS, Member, end_all, lost_of, setup_of
from moeyard.resize_plan import ResizePlan

ANSWER_SECONDS = 15.0


class Resizing:
    """Ranks that come set up and load on their own; those that stay read the experts of ranks that go.

    `members` are those that come, by rank, `stay` the others. `stage` until it says None, then the fleet may go on in
    an epoch of `plan.placement`.
    """

    def __init__(
        self,
        plan: ResizePlan,
        *,
        stay: Mapping[int, Member],
        actors: Mapping[int, Any],
        spec: Callable[[int], dict[str, Any]],
        moves: bool,
    ) -> None:
        """`actors` of ranks that come, which `spec(rank)` sets up; `moves`: experts come to those that stay."""
        self.plan = plan
        self.members = {rank: Member(actor, actor.setup.remote(spec(rank))) for rank, actor in actors.items()}
        self._stay = stay
        self._asked: dict[int, Any] = {}
        self._patience = 0.0
        self._reading = {
            rank: member.actor.prepare.remote(plan.placement, plan.slots.get(rank, 0))
            for rank, member in (stay.items() if moves else ())
        }

    def stage(self) -> str | None:
        """What is waited for, None when nothing is. Never blocks. Raises RanksLost with the words of who cannot.

        "" while those that came are asked whether they are there still, which they must be before others stop for them.
        """
        for rank, member in self.members.items():
            if member.setup is None and (result := _taken(rank, member.setting_up)) is not None:
                member.setup = result
            if member.loading is not None and member.report is None:
                member.report = _taken(rank, member.loading)
        starting = [rank for rank, member in self.members.items() if member.setup is None]
        if starting:
            return f"starting {named(starting)}"
        per_node = Counter(setup_of(member)["node"] for member in self.members.values())
        for member in self.members.values():
            if member.loading is None:
                member.loading = member.actor.load.remote(per_node[setup_of(member)["node"]])
        if loading := [rank for rank, member in self.members.items() if member.report is None]:
            return f"loading the experts of {named(loading)}"
        for rank, member in self.members.items():
            member.has = self.plan.placement.experts(rank)
        for rank in [rank for rank, ref in self._reading.items() if _taken(rank, ref) is not None]:
            self._stay[rank].read = self.plan.placement.experts(rank)
            del self._reading[rank]
        if self._reading:
            return f"reading experts at {named(self._reading)}"
        return None if self._all_here() else ""

    def _all_here(self) -> bool:
        """Whether all that came have answered since the last time that this was so."""
        if not self._asked:
            self._asked = {rank: member.actor.progress.remote() for rank, member in self.members.items()}
            self._patience = time.monotonic() + ANSWER_SECONDS
            return not self._asked
        silent = [rank for rank, ref in self._asked.items() if _taken(rank, ref) is None]
        if silent and time.monotonic() > self._patience:
            raise RanksLost(silent, f"worker {silent[0]} has loaded its experts, and does not answer any more")
        self._asked = {} if not silent else self._asked
        return not silent

    @property
    def reading(self) -> list[Any]:
        """Calls of ranks that still read."""
        return list(self._reading.values())


def end(members: list[Member]) -> None:
    """Let members of no epoch put away what they have in shared memory, and end them."""
    ray.wait([m.setting_up for m in members], num_returns=len(members), timeout=STOP_SECONDS) if members else None
    end_all(members)


def _taken(rank: int, ref: Any) -> Any:
    """What a call returned, None if it has not yet; raises RanksLost."""
    if not ray.wait([ref], timeout=0)[0]:
        return None
    try:
        return ray.get(ref)
    except RayError as error:
        raise lost_of(rank, error) from error
