"""Least recently used: one recency list over all slots, prompts and decode alike. The plain baseline. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import ClassVar

from moeyard_worker.experts.policy import Admission, ExpertKey, Placed, RowKind, Segment, plan_waves


class Lru:
    """Slots and recency of the resident experts of one rank. Its one list is counted as segment "probation".

    `cycle` is not needed; it is taken so that every policy is made alike.
    """

    settled: ClassVar[Segment] = "probation"

    def __init__(self, *, num_slots: int, cycle: int) -> None:
        if num_slots < 1:
            raise ValueError(f"lru needs at least 1 slot, got {num_slots}")
        self.num_slots = num_slots
        self._slots: OrderedDict[ExpertKey, int] = OrderedDict()  # oldest use first

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        assert not self._slots, "only an empty cache can be filled up front"
        for key in keys:
            self._slots[key] = len(self._slots)
        assert len(self._slots) <= self.num_slots, f"{len(self._slots)} experts in {self.num_slots} slots"

    def hit(self, key: ExpertKey, kind: RowKind) -> tuple[int, Segment] | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        self._slots.move_to_end(key)
        return slot, "probation"

    def admit(self, key: ExpertKey, kind: RowKind, pinned: Set[ExpertKey]) -> Admission | None:
        if len(self._slots) < self.num_slots:
            admission = Admission(len(self._slots))
        else:
            victim = next((resident for resident in self._slots if resident not in pinned), None)
            if victim is None:
                return None
            admission = Admission(self._slots.pop(victim), victim, "probation")
        self._slots[key] = admission.slot
        return admission

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        return plan_waves(self, layer=layer, decode=decode, prefill=prefill)

    def validate(self) -> None:
        assert len(self._slots) <= self.num_slots, f"{len(self._slots)} experts resident in {self.num_slots} slots"
        slots = sorted(self._slots.values())
        assert slots == list(range(len(slots))), f"slots handed out twice or skipped: {slots}"
