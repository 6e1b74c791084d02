"""What people have done to a running fleet: ranks drained, given back, restarted one after the other; more, or fewer.

A command comes from any thread, and one is carried out at a time, by the thread that replaces lost ranks: so a loss
goes before a restart, and both never happen at once.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moeyard.rank import FleetError
from moeyard.scaling import Resizable, Scaling, named, named_count
from moeyard_router.fleet.orders import UNKNOWN, Drain

Say = Callable[[str], None]


class Refused(ValueError):
    """A command that is not carried out, or not to its end. `exit_code` 2: another attempt changes nothing."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Restartable(Resizable, Protocol):
    """What is used of a fleet."""

    def prepare(self, rank: int, changes: Mapping[str, Any]) -> bool:
        """Begin to start the process that is to take a rank's place; False if it can only start once that is gone."""
        ...

    def prepared(self, rank: int) -> bool:
        """Whether it has started; raises FleetError if it cannot."""
        ...

    def abandon(self, rank: int) -> None:
        """The rank stays, or is replaced by another as it was."""
        ...


@dataclass(slots=True)
class _Errand:
    """A command on its way: `ranks` are still to be done, the first of them now, in `phase`; it drains since `since`.

    `left` are the sequences that it had when it was last asked; `waits`: it was said that the fleet is not whole. To
    have more or fewer ranks is a `scaling`, and none of the rest.
    """

    name: str
    ranks: list[int]
    seconds: float
    changes: Mapping[str, Any]
    began: float
    phase: str = "settle"
    since: float = 0.0
    left: int = UNKNOWN
    waits: bool = False
    done: list[int] = field(default_factory=list)
    words: "queue.SimpleQueue[str | Refused | None]" = field(default_factory=queue.SimpleQueue)
    scaling: Scaling | None = None


class Upkeep:
    """Life: construct; `drain`, `undrain`, `restart`, `scale` from any thread; `turn` now and then from one; `close`.

    `order(drain)` has all routers take it and returns the sequences that they have at its rank; UNKNOWN where they do
    not say. `drained` are the ranks that take no new requests.
    """

    def __init__(
        self,
        fleet: Restartable,
        num_ranks: int,
        *,
        order: Callable[[Drain], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._num_ranks, self._order, self._clock = fleet, num_ranks, order, clock
        self._lock = threading.Lock()
        self._drained: frozenset[int] = frozenset()
        # Each with the errand that it came after, which alone it may stop; None: a scaling is given up.
        self._given_back: queue.SimpleQueue[tuple[int | None, _Errand | None]] = queue.SimpleQueue()
        self._errand: _Errand | None = None
        self._closed: str | None = None

    @property
    def drained(self) -> frozenset[int]:
        """Ranks that take no new requests."""
        scaling = None if self._errand is None else self._errand.scaling
        return self._drained if scaling is None or not scaling.drains else self._drained | scaling.leaving

    def drain(self, rank: int, *, seconds: float, say: Say) -> str:
        """Take a rank's requests away: what it has may run for so long, the rest goes on elsewhere. Raises Refused."""
        self._check(rank)
        if not set(range(self._num_ranks)) - self._drained - {rank}:
            raise Refused(
                f"no other rank than {rank} takes requests; `moeyard restart --worker {rank}` lets them wait meanwhile",
                2,
            )
        self._run("drain", [rank], seconds=seconds, changes={}, say=say)
        return (
            f"rank {rank} is drained: it computes its experts for the others and takes no requests until "
            f"`moeyard undrain --worker {rank}` or `moeyard restart --worker {rank}`"
        )

    def undrain(self, rank: int) -> str:
        """Let a rank take requests again, also one that is being drained or is about to be restarted."""
        self._check(rank)
        self._given_back.put((rank, self._errand))
        return f"rank {rank} takes requests"

    def restart(self, ranks: Sequence[int], *, seconds: float, changes: Mapping[str, Any], say: Say) -> str:
        """Drain each of these, all if there are none, and put a new process in its place. Raises Refused."""
        for rank in ranks:
            self._check(rank)
        ranks = ranks or range(self._num_ranks)
        took = self._run("restart", list(ranks), seconds=seconds, changes=changes, say=say)
        return f"{named(ranks)} restarted in {took:.1f} s"

    def scale(self, size: int, *, seconds: float, say: Say) -> str:
        """Have so many ranks: new ones load first, or those that go are drained as by `drain`. Raises Refused.

        As many as there are: nothing to do; if they are about to be others, that is given up.
        """
        if size < 1:
            raise Refused("a fleet has one worker at least; to end it, end `moeyard serve`", 2)
        if size == self._num_ranks:
            errand = self._errand
            if errand is None or errand.scaling is None:
                return f"there are {named_count(size)} already"
            self._given_back.put((None, errand))
            return f"{named_count(size)}, as before: going on with {errand.scaling.size} is given up"
        if not set(range(size)) - self._drained:
            raise Refused(f"none of {named(range(size))} takes requests; see `moeyard undrain`", 2)
        before = self._num_ranks
        took = self._run("scale", [], seconds=seconds, changes={}, say=say, size=size)
        return f"{named_count(size)} in place of {before}, after {took:.1f} s"

    def turn(self, restart: Callable[[int], bool], scale: Callable[[], bool]) -> None:
        """Go on with what was asked for. `restart(rank)` replaces one, `scale` has all ranks of another size meet.

        Both say whether the fleet goes on; `scale` raises FleetError if it does as it was before.
        """
        while not self._given_back.empty():
            self._give_back(*self._given_back.get())
        errand = self._errand
        if errand is None:
            return
        if errand.scaling is not None:
            self._scale(errand, errand.scaling, scale)
            return
        try:
            self._advance(errand, errand.ranks[0], restart)
        except FleetError as error:
            self._abandon(errand, f"the next process of rank {errand.ranks[0]} does not start: {error}")

    def replaced(self, ranks: Collection[int]) -> None:
        """These were lost, and have new processes."""
        errand = self._errand
        if errand is not None and errand.scaling is not None and ranks:
            errand.scaling.again()
        if errand is not None and errand.name == "restart" and errand.ranks[0] in ranks:
            errand.words.put(f"rank {errand.ranks[0]} was lost, and is replaced")
            self._fleet.abandon(errand.ranks[0])
            self._drained -= {errand.ranks[0]}
            self._order(Drain(ranks=tuple(sorted(self._drained)), rank=errand.ranks[0]))
            self._next(errand)

    def failed(self, ranks: Collection[int]) -> None:
        """The new processes of these did not come up: the next ones are as those before."""
        for rank in ranks:
            self._fleet.abandon(rank)
            if self._errand is not None:
                self._errand.words.put(f"rank {rank}: its new process failed; another starts with the flags as before")

    def close(self, reason: str) -> None:
        """Nothing is carried out any more."""
        with self._lock:
            self._closed = reason
            errand, self._errand = self._errand, None
        if errand is not None:
            errand.words.put(Refused(reason))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise Refused(f"there is no rank {rank}; this server has {named(range(self._num_ranks))}", 2)

    def _run(
        self, name: str, ranks: list[int], *, seconds: float, changes: Mapping[str, Any], say: Say,
        size: int | None = None,
    ) -> float:  # fmt: skip
        now = self._clock()
        errand = _Errand(name, ranks, seconds, changes, began=now, since=now)
        if size is not None:
            errand.scaling = Scaling(
                self._fleet, size=size, num_ranks=self._num_ranks, drained=lambda: self.drained, order=self._order,
                seconds=seconds, say=errand.words.put, clock=self._clock,
            )  # fmt: skip
        with self._lock:
            if self._closed is not None:
                raise Refused(self._closed)
            if self._errand is not None:
                raise Refused(f"busy: {_told(self._errand, now)}; wait for its end")
            self._errand = errand
        while (word := errand.words.get()) is not None:
            if isinstance(word, Refused):
                raise word
            say(word)
        return self._clock() - now

    def _advance(self, errand: _Errand, rank: int, restart: Callable[[int], bool]) -> None:
        now = self._clock()
        if errand.phase == "settle":
            if self._order(Drain(ranks=tuple(sorted(self._drained)), rank=rank)) == UNKNOWN:
                # A fleet that recovers has other cares.
                if not errand.waits:
                    errand.words.put("waiting for the fleet to be whole")
                errand.waits = True
                return
            beside = errand.name == "restart" and self._fleet.prepare(rank, errand.changes)
            if beside:
                errand.words.put(f"rank {rank}: its next process starts")
            errand.phase = "prepare" if beside else "begin"
        if errand.phase == "prepare" and self._fleet.prepared(rank):
            errand.phase = "begin"
        if errand.phase == "begin":
            self._drained |= {rank}
            errand.phase, errand.since = "drain", now
        if errand.phase == "drain":
            self._empty(errand, rank, now, restart)

    def _empty(self, errand: _Errand, rank: int, now: float, restart: Callable[[int], bool]) -> None:
        """Until the rank has nothing more, or its time is over."""
        ranks = tuple(sorted(self._drained))
        left = self._order(Drain(ranks=ranks, rank=rank))
        if left not in (errand.left, UNKNOWN):
            if errand.left == UNKNOWN:
                errand.words.put(f"rank {rank} takes no new requests, and has {left}")
            errand.left = left
        if left == UNKNOWN or (left and now - errand.since < errand.seconds):
            return
        if left:
            stays = self._order(Drain(ranks=ranks, rank=rank, carry=True))
            if stays == UNKNOWN:
                return
            errand.words.put(f"rank {rank}: {left - stays} of its {left} requests go on elsewhere")
        if errand.name == "restart":
            self._order(Drain(ranks=ranks, rank=rank, leaves=True))
            self._drained -= {rank}
            errand.phase = "replace"
            if not restart(rank):
                return  # whoever stops or gives up tells it
            errand.words.put(f"rank {rank} is restarted, {self._clock() - now:.1f} s without steps")
        self._next(errand)

    def _next(self, errand: _Errand) -> None:
        errand.done.append(errand.ranks.pop(0))
        errand.phase, errand.left, errand.since, errand.waits = "settle", UNKNOWN, self._clock(), False
        if not errand.ranks:
            self._end(errand, None)

    def _scale(self, errand: _Errand, scaling: Scaling, scale: Callable[[], bool]) -> None:
        try:
            over = scaling.turn(scale)
        except FleetError as error:
            self._stay(errand, str(error), getattr(error, "exit_code", 1))
            return
        if over:
            self._num_ranks = scaling.size
            self._drained = self._drained.intersection(range(scaling.size))
            self._end(errand, None)

    def _stay(self, errand: _Errand, reason: str, exit_code: int = 1) -> None:
        """The number of ranks is not changed after all."""
        self._fleet.end_resize()
        errand.scaling = None
        self._order(Drain(ranks=tuple(sorted(self._drained)), rank=0))
        self._end(errand, Refused(f"{reason}; the fleet goes on with {named_count(self._num_ranks)}", exit_code))

    def _give_back(self, rank: int | None, errand: _Errand | None) -> None:
        now = errand if errand is self._errand else None
        if now is not None and now.scaling is not None:
            if rank is None or rank in now.scaling.leaving:
                self._stay(now, "given up" if rank is None else f"rank {rank} was given back by `moeyard undrain`")
        elif now is not None and now.ranks[0] == rank:
            self._abandon(now, f"rank {rank} was given back by `moeyard undrain`")
            return
        if rank is not None:
            self._drained -= {rank}
            self._order(Drain(ranks=tuple(sorted(self.drained)), rank=rank))

    def _abandon(self, errand: _Errand, reason: str) -> None:
        """The rank goes on as it was, and takes requests."""
        rank = errand.ranks[0]
        if errand.name == "restart":
            self._fleet.abandon(rank)
        self._drained -= {rank}
        self._order(Drain(ranks=tuple(sorted(self._drained)), rank=rank))
        done = f"; {named(errand.done)} restarted before" if errand.done else ""
        self._end(errand, Refused(f"{reason}; it goes on as it was{done}"))

    def _end(self, errand: _Errand, word: Refused | None) -> None:
        with self._lock:
            self._errand = None
        errand.words.put(word)


def _told(errand: _Errand, now: float) -> str:
    if errand.scaling is not None:
        return f"the fleet is to have {named_count(errand.scaling.size)}, for {now - errand.began:.0f} s"
    what = "drained" if errand.name == "drain" else "restarted"
    return f"rank {errand.ranks[0]} is being {what}, for {now - errand.began:.0f} s"
