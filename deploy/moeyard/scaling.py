"""`moeyard scale`: a running fleet gets more workers, or goes on with fewer."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from moeyard_router.fleet.orders import UNKNOWN, Drain


class Resizable(Protocol):
    """What is used of a fleet."""

    def begin_resize(self, size: int) -> bool:
        """Begin to become `size` ranks, beside steps; False if it has to be asked again. Raises FleetError."""
        ...

    def resize_stage(self) -> str | None:
        """What that waits for, "" for a moment, None if nothing any more; raises FleetError."""
        ...

    def end_resize(self) -> None:
        """End ranks that have left, or were to come and do not."""
        ...


class Scaling:
    """One command on its way, turned by the thread that replaces lost ranks.

    Ranks that come start and load, and those that stay read what comes to them, while all serve; ranks that go are
    drained meanwhile. Then `scale` ends the epoch and begins another. Until then nothing has changed that a `drain`
    order, and `Resizable.end_resize`, do not take back.
    """

    def __init__(
        self,
        fleet: Resizable,
        *,
        size: int,
        num_ranks: int,
        drained: Callable[[], Collection[int]],
        order: Callable[[Drain], int],
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """From `num_ranks` to `size`. `drained` are all that take no new requests; the other arguments as Upkeep's."""
        self.size, self.leaving = size, frozenset(range(size, num_ranks))
        self.drains = False  # those that leave take no new requests
        self._fleet, self._drained, self._order, self._say, self._clock = fleet, drained, order, say, clock
        self._seconds, self._since, self._left = seconds, 0.0, UNKNOWN
        self._began = self._waits = False
        self._stage: str | None = None

    def turn(self, scale: Callable[[], bool]) -> bool:
        """Go on; True when the fleet has its new size. Raises FleetError if it stays as it was."""
        if not self._began and not self._begin():
            return False
        stage = self._fleet.resize_stage()
        if stage and stage != self._stage:
            self._say(stage)
        self._stage = stage
        if not self._emptied() or stage is not None:
            return False
        if self._order(self._drain()) == UNKNOWN:
            return False  # a fleet that recovers has other cares
        now = self._clock()
        self._order(self._drain(size=self.size))
        if not scale():
            return False  # whoever stops or gives up tells it
        self._say(f"going on with {named_count(self.size)}, {self._clock() - now:.1f} s without steps")
        return True

    def again(self) -> None:
        """Ranks were lost and are there again: those that stay read anew what comes to them."""
        if self.leaving and self._began:
            self._fleet.end_resize()
            self._began = False

    def _begin(self) -> bool:
        whole = self._order(self._drain()) != UNKNOWN
        if not whole or not self._fleet.begin_resize(self.size):
            if not whole and not self._waits:
                self._say("waiting for the fleet to be whole")
            self._waits = True
            return False
        if self.leaving and not self.drains:
            self.drains, self._since = True, self._clock()
        self._began = True
        return True

    def _emptied(self) -> bool:
        """Whether those that leave have nothing more; what they have when their time is over goes on elsewhere."""
        if not self.leaving:
            return True
        held = [self._order(self._drain(rank=rank)) for rank in sorted(self.leaving)]
        if UNKNOWN in held:
            return False
        left = sum(held)
        if left != self._left:
            if self._left == UNKNOWN:
                who, one = named(sorted(self.leaving)), len(self.leaving) == 1
                self._say(f"{who} {'takes' if one else 'take'} no new requests, and {'has' if one else 'have'} {left}")
            self._left = left
        if not left:
            return True
        if self._clock() - self._since < self._seconds or self._stage is not None:
            return False
        stay = [self._order(self._drain(rank=rank, carry=True)) for rank in sorted(self.leaving)]
        if UNKNOWN in stay:
            return False
        self._say(f"{left - sum(stay)} of {left} requests go on at ranks that stay")
        self._left = sum(stay)
        return True

    def _drain(self, *, rank: int = 0, carry: bool = False, size: int | None = None) -> Drain:
        return Drain(ranks=tuple(sorted(self._drained())), rank=rank, carry=carry, size=size)


def named(ranks: Sequence[int]) -> str:
    """In words."""
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def named_count(size: int) -> str:
    """So many workers."""
    return "one worker" if size == 1 else f"{size} workers"
