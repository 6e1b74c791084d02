"""Snapshots of the state that a model keeps per sequence: of which prompt beginnings, in which slots. Pure.

A snapshot is what every such layer keeps of a prompt behind a whole number of its pages, in a slot that no sequence
owns. It is found by the hash of the last of these pages, so only while the page index knows that page too. Positions
where one may be taken have the same state whoever computed it (one answer), so whose it was does not matter.
"""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence


class SnapshotPool:
    """Owner of the slots `slots`, each free, reserved for a snapshot that a step takes, or holding one.

    When none is free the least recently used snapshot goes. `num_taken`, `num_used` and `num_evicted` count since the
    start: those kept, requests that began behind one, those that made room for another.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.num_slots = len(slots)
        self.num_taken = self.num_used = self.num_evicted = 0
        self._free = list(reversed(slots))
        # Of a page's hash: the slot of the snapshot behind it, least recently used first; the slot that will hold it.
        self._held: OrderedDict[bytes, int] = OrderedDict()
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
        return self._held[digest]

    def reserve(self, digest: bytes) -> int | None:
        """A slot for a snapshot that a planned step takes; None where there is one, or will be, or every slot waits."""
        if digest in self._held or digest in self._reserved:
            return None
        if not self._free:
            if not self._held:
                return None
            self._free.append(self._held.popitem(last=False)[1])
            self.num_evicted += 1
        self._reserved[digest] = slot = self._free.pop()
        return slot

    def keep(self, digest: bytes) -> None:
        """The step that took the snapshot is completed: it can be found."""
        self._held[digest] = self._reserved.pop(digest)
        self.num_taken += 1

    def cancel(self, digest: bytes) -> None:
        """The snapshot was not taken, or nobody knows."""
        self._free.append(self._reserved.pop(digest))

    def forget(self, digest: bytes) -> None:
        """The page index knows this page no more, so nothing leads to what is behind it."""
        slot = self._held.pop(digest, None)
        if slot is not None:
            self._free.append(slot)

    def validate(self, reserved: Iterable[bytes], known: KeysView[bytes]) -> None:
        """Assert all invariants: `reserved` by the requests that say so, `known` to the page index."""
        assert sorted(reserved) == sorted(self._reserved), "a snapshot is taken for nobody, or twice"
        assert self._held.keys() <= known, "a snapshot behind a page that cannot be found"
        assert not self._held.keys() & self._reserved.keys(), "a snapshot is taken that is there"
        slots = [*self._free, *self._held.values(), *self._reserved.values()]
        assert len(set(slots)) == len(slots) == self.num_slots, "a slot of snapshots is lost or has two owners"
