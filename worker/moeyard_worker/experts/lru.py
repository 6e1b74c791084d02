"""Least recently used by decode rows: one order over all slots. The plain baseline. Pure."""

from collections.abc import Sequence
from typing import ClassVar

from moeyard_kernels.types.expert_ranks import lru_rank
from moeyard_worker.experts.policy import Segment
from moeyard_worker.experts.ranked import RankedPolicy


class Lru(RankedPolicy):
    """Of experts that one visit needed, misses count as used after hits, and each in ascending order.

    Its one order is counted as segment "probation".
    """

    settled: ClassVar[Segment] = "probation"

    def _first_rank(self, key: int) -> int:
        return lru_rank(key, visit=0, missed=False)

    def _note(self, keys: Sequence[int]) -> None:
        """Its visit is all that counts."""

    def _used_rank(self, key: int, *, missed: bool) -> int:
        return lru_rank(key, visit=self._visit, missed=missed)
