"""Snapshots of per-sequence state: the prompt prefixes that have one, and their slots. Pure.

A snapshot is the state of all layers after a whole number of prompt pages, in a slot without an owner. It is found by
the hash of the last of these pages, while the page index has that page. The state at such a position does not depend on
the request that computed it (one answer).
"""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """A snapshot: its slot, its eviction priority, and how many requests started from it."""

    slot: int
    worth: int
    num_used: int = 0


class SnapshotPool:
    """Owner of `slots`. Each is free, reserved for a snapshot that a step takes, or holds a snapshot.

    The snapshot of least worth is evicted first, and of equal ones the least recently used. Worth is the number of uses
    plus the worth of the last evicted snapshot when it was used (dynamic ageing, LFU-DA: Arlitt et al. 2000). So
    snapshots that were popular once are evicted, too. The first use does not count: it is a conversation's next turn,
    which takes a snapshot of its own.

    num_taken, num_used, num_evicted: totals since the start of snapshots, of requests that started from one, and of
    evictions.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.num_slots = len(slots)
        self.num_taken = self.num_used = self.num_evicted = 0
        self._free = list(reversed(slots))
        self._age = 0  # worth of the last evicted snapshot
        # By page hash: the snapshot after that page, least recently used first; and the slot reserved for one.
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._reserved: dict[bytes, int] = {}

    @property
    def num_held(self) -> int:
        """Number of snapshots."""
        return len(self._held)

    def reach(self, hashes: Sequence[bytes], unit: int) -> int:
        """Return how many of these pages the longest snapshot covers: a multiple of `unit`, 0 without a snapshot."""
        if not self._held:
            return 0
        whole = len(hashes) - len(hashes) % unit
        return next((n for n in range(whole, 0, -unit) if hashes[n - 1] in self._held), 0)

    def use(self, digest: bytes) -> int:
        """Return the slot of the snapshot after the page with this hash, for a request that starts there.

        Later chunks of the same step and later steps may overwrite the slot.
        """
        self._held.move_to_end(digest)
        self.num_used += 1
        held = self._held[digest]
        held.num_used += 1
        held.worth = self._age + held.num_used
        return held.slot

    def reserve(self, digest: bytes) -> int | None:
        """Return a slot for a new snapshot. None if there is one already, or if all slots are reserved."""
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
        """Make a snapshot usable after the step that took it is completed."""
        self._held[digest] = _Held(self._reserved.pop(digest), self._age + 1)
        self.num_taken += 1

    def cancel(self, digest: bytes) -> None:
        """Free the reserved slot of a snapshot that may not have been taken."""
        self._free.append(self._reserved.pop(digest))

    def forget(self, digest: bytes) -> None:
        """Drop the snapshot after a page that the page index has evicted."""
        held = self._held.pop(digest, None)
        if held is not None:
            self._free.append(held.slot)

    def _least(self) -> bytes:
        """Return the hash of the next snapshot to evict."""
        return min(self._held, key=lambda digest: self._held[digest].worth)

    def validate(self, reserved: Iterable[bytes], known: KeysView[bytes]) -> None:
        """Assert all invariants. `reserved` is what the requests reserve, `known` what the page index has."""
        assert sorted(reserved) == sorted(self._reserved), "a snapshot is taken for nobody, or twice"
        assert self._held.keys() <= known, "a snapshot behind a page that cannot be found"
        assert not self._held.keys() & self._reserved.keys(), "a snapshot is taken that is there"
        slots = [*self._free, *(held.slot for held in self._held.values()), *self._reserved.values()]
        for held in self._held.values():
            assert 0 <= held.worth - self._age <= max(1, held.num_used), "a snapshot is worth what it cannot be"
        assert len(set(slots)) == len(slots) == self.num_slots, "a slot of snapshots is lost or has two owners"
