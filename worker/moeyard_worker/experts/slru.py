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

In both the lower layer and the lower id go first where all else is equal.
"""

from collections.abc import Sequence
from typing import ClassVar

from moeyard_kernels.types.expert_ranks import RECENT, add_use, idle_rank, now_at, recent_rank
from moeyard_worker.experts.policy import ExpertKey, Segment
from moeyard_worker.experts.ranked import RankedPolicy


class SegmentedLru(RankedPolicy):
    """See the module's text."""

    settled: ClassVar[Segment] = "protected"

    def __init__(
        self, *, layers: Sequence[int], experts: range, num_slots: int, num_streams: int,
        resident: Sequence[ExpertKey] | None = None,
    ) -> None:  # fmt: skip
        self._uses = [0] * (len(layers) * len(experts))
        super().__init__(
            layers=layers, experts=experts, num_slots=num_slots, num_streams=num_streams, resident=resident
        )

    def _first_rank(self, key: int) -> int:
        return idle_rank(key, uses=0)

    def _note(self, keys: Sequence[int]) -> None:
        now = now_at(self._step)
        for key in keys:
            self._uses[key] = add_use(now, self._uses[key])

    def _used_rank(self, key: int, *, missed: bool) -> int:
        return recent_rank(key, uses=self._uses[key], now=now_at(self._step), visit=self._visit)

    def _left(self, layer: range, needed: set[int]) -> None:
        for key in layer:
            slot = self._slot_of[key]
            if slot >= 0 and self._ranks[slot] >= RECENT and key not in needed:
                self._rank(slot, idle_rank(key, uses=self._uses[key]))
