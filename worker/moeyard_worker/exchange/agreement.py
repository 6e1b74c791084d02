"""How ranks that found a failure agree on its name: rounds of the smallest finding known, until nobody new is missed.

A rank killed between two sends is missed by one peer here and by another there, before either could tell the other.
Hence nobody names a failure alone. In every round each rank says the smallest finding it knows to all others and waits
for what they say in that round; who has gone is not waited for. After a round in which exactly those spoke who had
spoken in the round before (before the first: all), it knows what every rank that is still there knows, so the smallest
finding is settled, and it says so; whoever hears that it is settled takes it over and repeats it. One loss takes two
rounds, every further one while agreeing at most one more.

That is the flooding consensus for crashes with a detector that does not err (Guerraoui and Rodrigues, "Introduction to
Reliable Distributed Programming", 2006, 5.1): connections that end are such a detector. A rank that is stopped is given
up when a round's time has passed and takes over what the others settled once it wakes. Pure: events in, frames out.
"""

from collections.abc import Iterable

from moeyard_worker.exchange.finding import Finding
from moeyard_worker.exchange.frames import SETTLED, PoisonFrame


class Agreement:
    """One rank's part. Life: construct, then `hear` and `leave` as things happen and send all that `advance` returns.

    settled: the finding that all name, once there is one; nothing changes it any more.
    """

    def __init__(self, peers: Iterable[int], finding: Finding) -> None:
        self.settled: Finding | None = None
        self._peers = frozenset(peers)
        self._gone: set[int] = set()
        self._best = finding
        self._round = 0
        self._before = self._peers
        self._spoke: dict[int, set[int]] = {}
        self._ended = False

    def hear(self, peer: int, poison: PoisonFrame) -> None:
        """A peer's word, in the order it was sent. Of a peer that was given up only what is settled counts."""
        if self.settled is not None:
            return
        if poison.round == SETTLED:
            self._best = self.settled = poison.finding
        elif peer not in self._gone:
            self._best = min(self._best, poison.finding)
            self._spoke.setdefault(poison.round, set()).add(peer)

    def leave(self, peer: int) -> None:
        """A peer whose connection ended, after all it had sent was heard."""
        self._gone.add(peer)

    def give_up(self) -> None:
        """This round's time has passed: whoever has not spoken in it is not waited for any more."""
        self._gone |= self._missing()

    def advance(self) -> list[PoisonFrame]:
        """What to send to every peer now, in this order; also to those that are gone, who may only be slow."""
        frames: list[PoisonFrame] = []
        if self._ended:
            return frames
        if self._round == 0 and self.settled is None:
            frames.append(self._next_round())
        while self.settled is None and not self._missing():
            spoke = frozenset(self._spoke.get(self._round, ()))
            if spoke == self._before:
                self.settled = self._best
            else:
                self._before = spoke
                frames.append(self._next_round())
        if self.settled is not None:
            self._ended = True
            frames.append(PoisonFrame(round=SETTLED, finding=self.settled))
        return frames

    def _next_round(self) -> PoisonFrame:
        self._round += 1
        return PoisonFrame(round=self._round, finding=self._best)

    def _missing(self) -> frozenset[int]:
        return self._peers - self._spoke.get(self._round, set()) - self._gone
