"""Processes that are to take the places of ranks which still serve, and how ranks differ from the fleet's config."""

from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from moeyard.ray_member import STOP_SECONDS, Member, lost_of, setup_of
from moeyard.same_weights import SameWeights


class Spares:
    """`members[rank]` is the next process of a rank, `changes[rank]` what its processes have otherwise than others."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.changes: dict[int, Mapping[str, Any]] = {}
        self._before: dict[int, Mapping[str, Any]] = {}

    def note(self, rank: int, changes: Mapping[str, Any]) -> None:
        """From its next process on a rank has these, too."""
        self._before[rank] = self.changes.get(rank, {})
        self.changes[rank] = {**self._before[rank], **changes}

    def prepared(self, rank: int, weights: SameWeights) -> bool:
        """Whether a rank's next process is set up; raises RanksLost if it cannot, and as `weights` does."""
        spare = self.members[rank]
        if not ray.wait([spare.setting_up], timeout=0)[0]:
            return False
        try:
            spare.setup = ray.get(spare.setting_up)
        except RayError as error:
            raise lost_of(rank, error) from error
        weights.check(rank, setup_of(spare))
        return True

    def take(self, rank: int) -> Member | None:
        """A rank's next process, if there is one: from now on it is the rank's."""
        return self.members.pop(rank, None)

    def used(self, ranks: Collection[int]) -> None:
        """The changes of these stay: they serve with them."""
        self._before = {rank: changes for rank, changes in self._before.items() if rank not in ranks}

    def forget_from(self, first: int) -> None:
        """Ranks from this one on are not there any more."""
        self.changes = {rank: changes for rank, changes in self.changes.items() if rank < first}

    def abandon(self, rank: int) -> None:
        """Undo what was prepared for a rank and not used."""
        if (spare := self.members.pop(rank, None)) is not None:
            # Let it put away what it has in shared memory.
            ray.wait([spare.setting_up], timeout=STOP_SECONDS)
            ray.wait([spare.actor.stop.remote()], timeout=STOP_SECONDS)
            ray.kill(spare.actor)
        if rank in self._before:
            self.changes[rank] = self._before.pop(rank)
