"""Snapshots of the state that a model keeps per sequence: of which prompt beginnings, in which slots. Pure.

A snapshot is what every such layer keeps of a prompt behind a whole number of its pages, in a slot that no sequence
owns. It is found by the hash of the last of these pages, so only while the page index knows that page too. Positions
where one may be taken have the same state whoever computed it (one answer), so whose it was does not matter.
"""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """A snapshot: its slot, how many requests began behind it, what it is worth beside others."""

    slot: int
    worth: int
    num_used: int = 0


class SnapshotPool:
    """Owner of the slots `slots`, each free, reserved for a snapshot that a step takes, or holding one.

    When none is free the snapshot goes that is worth least, of equals the least recently used. Worth is how often it
    was used, the first time not counted (that is a conversation's next turn, which leaves a snapshot of its own), on
    top of what was worth the last that had gone by then: so what was much liked once goes too (dynamic ageing, LFU-DA:
    Arlitt et al. 2000). `num_taken`, `num_used` and `num_evicted` count since the start: those kept, requests that
    began behind one, those that made room for another.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.num_slots = len(slots)
        self.num_taken = self.num_used = self.num_evicted = 0
        self._free = list(reversed(slots))
        self._age = 0  # what was worth the last that went
        # Of a page's hash: the snapshot behind it, least recently used first; the slot that will hold it.
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._reserved: dict[bytes, int] = {}

    @property
    def num_held(self) -> int:
        """Snapshots that can be found."""
        return len(self._held)

    def reach(self, hashes: Sequence[bytes], unit: int) -> int:
        """How many of the pages with these hashes the longest snapshot covers, a multiple of `unit`; 0 without one."""
        if not self._held:
            return 0
        whole = len(hashes) - len(hashes) % unit
        return next((n for n in range(whole, 0, -unit) if hashes[n - 1] in self._held), 0)

    def use(self, digest: bytes) -> int:
        """The slot of the snapshot behind the page with this hash, for a request that begins there.

        It may be written again by any later chunk of the same step, and by later steps.
        """
        self._held.move_to_end(digest)
        self.num_used += 1
        held = self._held[digest]
        held.num_used += 1
        held.worth = self._age + held.num_used
        return held.slot

    def reserve(self, digest: bytes) -> int | None:
        """A slot for a snapshot that a planned step takes; None where there is one, or will be, or every slot waits."""
        if digest in self._held or digest in self._reserved:
            return None
        if not self._free:
            if not self._held:
                return None
            gone = self._held.pop(self._least())
            self._age = gone.worth
            self._free.append(gone.slot)
            self.num_evicted += 1
        self._reserved[digest] = slot = self._free.pop()
        return slot

    def keep(self, digest: bytes) -> None:
        """The step that took the snapshot is completed: it can be found."""
        self._held[digest] = _Held(self._reserved.pop(digest), self._age + 1)
        self.num_taken += 1

    def cancel(self, digest: bytes) -> None:
        """The snapshot was not taken, or nobody knows."""
        self._free.append(self._reserved.pop(digest))

    def forget(self, digest: bytes) -> None:
        """The page index knows this page no more, so nothing leads to what is behind it."""
        held = self._held.pop(digest, None)
        if held is not None:
            self._free.append(held.slot)

    def _least(self) -> bytes:
        """The snapshot that goes next."""
        return min(self._held, key=lambda digest: self._held[digest].worth)

    def validate(self, reserved: Iterable[bytes], known: KeysView[bytes]) -> None:
        """Assert all invariants: `reserved` by the requests that say so, `known` to the page index."""
        assert sorted(reserved) == sorted(self._reserved), "a snapshot is taken for nobody, or twice"
        assert self._held.keys() <= known, "a snapshot behind a page that cannot be found"
        assert not self._held.keys() & self._reserved.keys(), "a snapshot is taken that is there"
        slots = [*self._free, *(held.slot for held in self._held.values()), *self._reserved.values()]
        for held in self._held.values():
            assert 0 <= held.worth - self._age <= max(1, held.num_used), "a snapshot is worth what it cannot be"
        assert len(set(slots)) == len(slots) == self.num_slots, "a slot of snapshots is lost or has two owners"
