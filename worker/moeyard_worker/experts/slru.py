"""Segmented LRU: experts prove themselves in probation before they are protected. Pure.

Two recency lists share the slots (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, 1994):
a miss enters probation, a decode hit in probation promotes to protected. Two changes for experts of a language model:

- Probation's quota is at least one token's cycle (MoE layers x experts per token). A smaller one evicts every expert
  before its layer comes round again, so none is ever hit. And it lends its unused room: promotion never demotes; only
  when a victim is needed does protected shrink to its target, its tail going to the recent end of probation.
- Prompts visit most experts of a layer once and say little about the next token. Their misses enter probation at its
  old end, where the next victim is taken, and may displace at most `stream_width` other experts at a time; their hits
  move nothing. So a long prompt streams through few slots and decode's hot set stays.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import ClassVar

from moeyard_worker.experts.policy import Admission, Key, Phase, Placed, Segment, plan_waves


class SegmentedLru:
    """Slots and recency of the resident experts of one rank; see the module's text for the rules.

    `cycle` is the number of (layer, expert) pairs that one token visits on this rank, at most.
    """

    settled: ClassVar[Segment] = "protected"

    def __init__(self, *, num_slots: int, cycle: int) -> None:
        if num_slots < 1 or cycle < 1:
            raise ValueError(f"slru needs at least 1 slot and a cycle of at least 1, got {num_slots} and {cycle}")
        self.num_slots = num_slots
        self.quota = min(num_slots, max(cycle, num_slots // 5))
        self.target = num_slots - self.quota
        self.stream_width = max(1, self.quota // 4)
        # Each maps an expert to its slot, oldest use first. Prompt misses sit in `_stream`, newest last: it is the old
        # end of probation, and its newest entry is the first victim of all.
        self._stream: OrderedDict[Key, int] = OrderedDict()
        self._probation: OrderedDict[Key, int] = OrderedDict()
        self._protected: OrderedDict[Key, int] = OrderedDict()

    def fill(self, keys: Iterable[Key]) -> None:
        assert self._num_used() == 0, "only an empty cache can be filled up front"
        for key in keys:
            self._probation[key] = len(self._probation)
        assert len(self._probation) <= self.num_slots, f"{len(self._probation)} experts in {self.num_slots} slots"

    def hit(self, key: Key, phase: Phase) -> tuple[int, Segment] | None:
        slot = self._protected.get(key)
        if slot is not None:
            if phase == "decode":
                self._protected.move_to_end(key)
            return slot, "protected"
        home = self._probation if key in self._probation else self._stream
        slot = home.get(key)
        if slot is None:
            return None
        if phase == "decode":
            del home[key]
            self._protected[key] = slot
        return slot, "probation"

    def admit(self, key: Key, phase: Phase, pinned: Set[Key]) -> Admission | None:
        admission = self._free_slot() or self._evict(phase, pinned)
        if admission is not None:
            home = self._probation if phase == "decode" else self._stream
            home[key] = admission.slot
        return admission

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        return plan_waves(self, layer=layer, decode=decode, prefill=prefill)

    def validate(self) -> None:
        slots = [*self._stream.values(), *self._probation.values(), *self._protected.values()]
        keys = [*self._stream, *self._probation, *self._protected]
        assert len(slots) <= self.num_slots, f"{len(slots)} experts resident in {self.num_slots} slots"
        assert sorted(slots) == list(range(len(slots))), f"slots handed out twice or skipped: {sorted(slots)}"
        assert len(set(keys)) == len(keys), "an expert is resident twice"
        assert 1 <= self.quota <= self.num_slots, f"quota {self.quota} of {self.num_slots} slots"
        assert 1 <= self.stream_width <= self.quota, f"stream width {self.stream_width} of quota {self.quota}"

    def _num_used(self) -> int:
        return len(self._stream) + len(self._probation) + len(self._protected)

    def _free_slot(self) -> Admission | None:
        # Slots are handed out in order and never given back: a victim's slot goes straight to the miss that wanted it.
        used = self._num_used()
        return Admission(used) if used < self.num_slots else None

    def _evict(self, phase: Phase, pinned: Set[Key]) -> Admission | None:
        while len(self._protected) > self.target:
            key, slot = self._protected.popitem(last=False)
            self._probation[key] = slot
        victim = next((key for key in reversed(self._stream) if key not in pinned), None)
        if victim is not None:
            return Admission(self._stream.pop(victim), victim, "probation")
        if phase == "prefill" and len(self._stream) >= self.stream_width:
            return None
        victim = next((key for key in self._probation if key not in pinned), None)
        if victim is not None:
            return Admission(self._probation.pop(victim), victim, "probation")
        if phase == "prefill":
            return None
        victim = next((key for key in self._protected if key not in pinned), None)
        return None if victim is None else Admission(self._protected.pop(victim), victim, "protected")
