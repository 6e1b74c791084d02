"""State slots of one rank, for models with state per sequence, such as linear attention. Pure."""

from collections.abc import Iterable


class SlotPool:
    """`num_slots` slots of `size` places each, with one owner at a time.

    A slot's number is its first place: 0, size, 2 * size, and so on.
    """

    def __init__(self, num_slots: int, size: int = 1) -> None:
        self.num_slots = num_slots
        self._all = range(0, num_slots * size, size)
        self._free = list(reversed(self._all))

    @property
    def num_free(self) -> int:
        """Number of slots that can be allocated now."""
        return len(self._free)

    def allocate(self) -> int:
        """Return a free slot with stale contents. Raises ValueError if there is none."""
        if not self._free:
            raise ValueError(f"all {self.num_slots} state slots are taken")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Free a slot."""
        assert slot in self._all, f"slot {slot} is none of {self.num_slots}"
        assert slot not in self._free, f"slot {slot} is released more often than it was taken"
        self._free.append(slot)

    def validate(self, held: Iterable[int]) -> None:
        """Assert all invariants. `held` are the slots of all owners."""
        assert sorted([*held, *self._free]) == list(self._all), "a slot is lost or has two owners"
