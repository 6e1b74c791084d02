"""The residency policies, and the registry by name. Pure."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from moeyard_kernels.types.expert_ranks import RECENT, add_use, idle_rank, lru_rank, now_at, recent_rank
from moeyard_worker.experts.policy import ExpertKey, Segment
from moeyard_worker.experts.ranked import RankedPolicy


class Lru(RankedPolicy):
    """Evict the expert that decode rows used least recently. This is the baseline.

    Within one visit, hits count as used before misses, both in ascending order. All experts are in segment "probation".
    """

    settled: ClassVar[Segment] = "probation"

    def _first_rank(self, key: int) -> int:
        return lru_rank(key, visit=0, missed=False)

    def _note(self, keys: Sequence[int]) -> None:
        """Its visit is all that counts."""

    def _used_rank(self, key: int, *, missed: bool) -> int:
        return lru_rank(key, visit=self._visit, missed=missed)


class SegmentedLru(RankedPolicy):
    """Evict by a decayed count of uses: the default policy.

    An expert is in probation until a decode row hits it, then protected. The segments are those of a segmented LRU
    (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, 1994). Recency alone does not choose
    the victim. A model visits its layers in turn, so with fewer slots than experts of one step, recency evicts every
    expert just before its layer is visited again and hits nothing. The victim is the first expert in this order:

    1. Experts that decode rows did not need when they last visited their layer. The next step most likely needs those
       that the last step used. Among them, the first has the smallest sum of 2^(-age / HALF_LIFE) over its uses by
       decode rows, age in steps. (Lee et al., LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and
       Least Frequently Used Policies, 2001.) A use counts whether the expert was resident or not.
    2. Experts that they needed, by the same sum at that visit. If sums are equal (rounded to powers of the root of 2),
       the expert visited last goes first, because its layer is visited again last. So a loop over more experts than
       slots, which always misses under recency, hits the experts that stay.

    If all else is equal, the lower layer and then the lower id go first.
    """

    settled: ClassVar[Segment] = "protected"

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


POLICIES: Mapping[str, type[RankedPolicy]] = MappingProxyType({"lru": Lru, "slru": SegmentedLru})


def start_policy(
    name: str,
    *,
    layers: Sequence[int],
    experts: range,
    num_slots: int,
    num_streams: int = 1,
    resident: Sequence[ExpertKey] | None = None,
) -> RankedPolicy:
    """Return the policy of one rank with every slot filled. Engine and simulator both use this function.

    layers, experts: the MoE layers and the rank's shard.
    num_slots: at most the number of experts is used.
    num_streams: number of further slots, for misses of prompts.
    resident: the expert in each slot. None: the first experts of every layer.

    Raises ValueError for an unknown name or fewer than 1 slot.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown expert cache policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](
        layers=layers, experts=experts, num_slots=num_slots, num_streams=num_streams, resident=resident
    )
