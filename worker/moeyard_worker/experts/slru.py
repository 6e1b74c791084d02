"""Segmented LRU whose victims are ranked by a decayed count of uses: the default policy. Pure.

The segments are those of a segmented LRU (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance,
1994): an expert is in probation until a decode row hits it, then protected. Who goes is not decided by recency alone. A
model visits its layers in turn, so with fewer slots than one step visits experts, recency evicts every expert just
before its layer comes round again and hits nothing. Therefore the victim is the expert that comes first in this order:

1. Experts that were not needed when decode rows last visited their layer: what the last step used, the next one most
   likely needs. The first is the one with the smallest sum over its uses by decode rows of 2^(-age / HALF_LIFE), age
   in steps (the rule of Lee et al., LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least
   Frequently Used Policies, 2001). A use counts whether the expert was resident or not: a frequent one comes to stay.
2. Those that were needed, by the same sum as of that visit. Where sums are alike (rounded to powers of the root of 2),
   the last visited goes first: its layer will be the last to come round again. So a loop over more experts than slots,
   which recency misses throughout, hits those that stay.

Misses of one wave take at most half of the slots: a layer that needs more experts than that runs in more waves instead
of evicting what all other layers keep.

Prompts visit most experts of a layer once and say little about the next token. Their uses are not counted, and their
misses reuse one another's slots, the newest first, displacing at most `stream_width` other experts at a time. So a long
prompt streams through few slots and decode's hot set stays.
"""

import heapq
import math
from collections.abc import Iterable, Sequence, Set
from typing import ClassVar

from moeyard_worker.experts.policy import Admission, ExpertKey, Placed, RowKind, Segment, plan_waves

# Steps. Of 2, 4, 8, 16 and 32, on traces of the demo model with 1, 4 and 8 streams and on synthetic ones of 48 to 58
# layers, 16 is best by about a point where routing has lasting favourites, and 8 loses less where it has none.
HALF_LIFE = 8


# Where an expert stands in the order of victims, the smallest first: was it needed at its layer's last visit, logarithm
# of its decayed uses, a number that makes ranks distinct, and whose rank it is.
_Rank = tuple[bool, float, int, ExpertKey]


class SegmentedLru:
    """Slots and ranks of the resident experts of one rank; see the module's text for the rules.

    `cycle` is the number of (layer, expert) pairs that one token visits on this rank, at most.
    """

    settled: ClassVar[Segment] = "protected"

    def __init__(self, *, num_slots: int, cycle: int) -> None:
        if num_slots < 1 or cycle < 1:
            raise ValueError(f"slru needs at least 1 slot and a cycle of at least 1, got {num_slots} and {cycle}")
        self.num_slots = num_slots
        self.stream_width = max(1, min(num_slots, max(cycle, num_slots // 5)) // 4)
        self._slot_of: dict[ExpertKey, int] = {}
        self._protected: set[ExpertKey] = set()
        # Every resident expert is either streamed by a prompt (oldest first) or ranked.
        self._streamed: dict[ExpertKey, None] = {}
        self._ranks: dict[ExpertKey, _Rank] = {}
        # Ranks given in the running wave are of pinned experts and wait in `_pending` until they can matter. The heap
        # also holds ranks that are no longer true: dropped when they surface, or all at once when they are many.
        self._heap: list[_Rank] = []
        self._pending: list[_Rank] = []
        self._order = 0
        # Base 2 logarithm of the decayed sum, as it would be at step 0: then it changes with a use only, not with time.
        self._log_uses: dict[ExpertKey, float] = {}
        self._step = 0
        self._now = 0.0  # in half-lives
        self._layer = -1
        self._last_visit: dict[int, Sequence[int]] = {}

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        assert not self._slot_of, "only an empty cache can be filled up front"
        for key in keys:
            self._slot_of[key] = len(self._slot_of)
            self._rank(key, recent=False)
        assert len(self._slot_of) <= self.num_slots, f"{len(self._slot_of)} experts in {self.num_slots} slots"

    def hit(self, key: ExpertKey, kind: RowKind) -> tuple[int, Segment] | None:
        if kind == "decode":
            now = self._now
            before = self._log_uses.get(key)
            self._log_uses[key] = now if before is None else now + math.log2(1 + 2 ** (before - now))
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        found: Segment = "protected" if key in self._protected else "probation"
        if kind == "decode":
            self._streamed.pop(key, None)
            self._protected.add(key)
            self._rank(key, recent=True)
        return slot, found

    def admit(self, key: ExpertKey, kind: RowKind, pinned: Set[ExpertKey]) -> Admission | None:
        # Slots are handed out in order and never given back: a victim's slot goes straight to the miss that wanted it.
        used = len(self._slot_of)
        admission = Admission(used) if used < self.num_slots else self._evict(kind, pinned)
        if admission is None:
            return None
        self._slot_of[key] = admission.slot
        if kind == "decode":
            self._rank(key, recent=True)
        else:
            self._streamed[key] = None
        return admission

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        if decode:
            if layer <= self._layer:
                self._step += 1
                self._now = self._step / HALF_LIFE
            self._layer = layer
            needed = set(decode)
            for expert in self._last_visit.get(layer, ()):
                if expert not in needed and (layer, expert) in self._ranks:
                    self._rank((layer, expert), recent=False)
            self._last_visit[layer] = decode
        self._settle_pending()
        return plan_waves(self, layer=layer, decode=decode, prefill=prefill)

    def validate(self) -> None:
        slots = sorted(self._slot_of.values())
        assert len(slots) <= self.num_slots, f"{len(slots)} experts resident in {self.num_slots} slots"
        assert slots == list(range(len(slots))), f"slots handed out twice or skipped: {slots}"
        assert self._slot_of.keys() == self._ranks.keys() | self._streamed.keys(), "an expert is in no order of victims"
        assert not self._ranks.keys() & self._streamed.keys(), "an expert is in two orders of victims"
        assert self._protected <= self._ranks.keys(), "an expert is protected that no decode row has hit"
        assert set(self._ranks.values()) <= {*self._heap, *self._pending}, "a rank is missing in the heap"

    def _rank(self, key: ExpertKey, *, recent: bool) -> None:
        self._order += 1
        log_uses = self._log_uses.get(key, -math.inf)
        if recent:
            rank: _Rank = (True, int(2 * (log_uses - self._now)), -self._order, key)
        else:
            rank = (False, log_uses, self._order, key)
        self._ranks[key] = rank
        self._pending.append(rank)

    def _settle_pending(self) -> None:
        for rank in self._pending:
            heapq.heappush(self._heap, rank)
        self._pending.clear()
        if len(self._heap) > 4 * self.num_slots:
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)

    def _evict(self, kind: RowKind, pinned: Set[ExpertKey]) -> Admission | None:
        if not pinned:
            self._settle_pending()
        elif len(pinned) >= self.num_slots // 2:
            return None
        victim = None
        if self._streamed:
            victim = next((key for key in reversed(self._streamed) if key not in pinned), None)
        if victim is None:
            if kind == "prefill" and len(self._streamed) >= self.stream_width:
                return None
            victim = self._lowest(pinned)
        if victim is None:
            return None
        found: Segment = "protected" if victim in self._protected else "probation"
        admission = Admission(self._slot_of.pop(victim), victim, found)
        self._streamed.pop(victim, None)
        self._ranks.pop(victim, None)
        self._protected.discard(victim)
        return admission

    def _lowest(self, pinned: Set[ExpertKey]) -> ExpertKey | None:
        skipped: list[_Rank] = []
        lowest = None
        heap, ranks = self._heap, self._ranks
        while heap:
            rank = heapq.heappop(heap)
            key = rank[3]
            if ranks.get(key) is rank:
                if key not in pinned:
                    lowest = key
                    break
                skipped.append(rank)
        for rank in skipped:
            heapq.heappush(self._heap, rank)
        return lowest
