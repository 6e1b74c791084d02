"""The decisions of residency policies, and the counters that engine and simulator share. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

# The rows that need an expert: at least one decode row, or prompt rows only. The metrics' label is "phase".
RowKind = Literal["decode", "prefill"]
Segment = Literal["probation", "protected"]
ExpertKey = tuple[int, int]  # layer, global expert id

ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)
SEGMENTS: tuple[Segment, ...] = get_args(Segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One expert of a wave and its slot.

    kind: "decode" if a decode row needs the expert, else "prefill".
    hit: the segment in which the expert was found, or None for a miss.
    evicted, evicted_from: (layer, expert) that lost its slot to a miss, and its segment. None for a prompt's miss,
        which uses a stream slot, numbered from `num_slots` on.
    """

    expert: int
    slot: int
    kind: RowKind
    hit: Segment | None = None
    evicted: ExpertKey | None = None
    evicted_from: Segment | None = None


def _by_segment() -> dict[tuple[Segment, RowKind], int]:
    return {(segment, kind): 0 for segment in SEGMENTS for kind in ROW_KINDS}


@dataclass(slots=True)
class Counters:
    """Running totals of a policy's decisions, each expert counted once per access, by the rows that needed it.

    Evictions are counted by the victim's segment and the rows of the miss that took its slot.
    """

    hits: dict[tuple[Segment, RowKind], int] = field(default_factory=_by_segment)
    misses: dict[RowKind, int] = field(default_factory=lambda: dict.fromkeys(ROW_KINDS, 0))
    evictions: dict[tuple[Segment, RowKind], int] = field(default_factory=_by_segment)

    def count(self, wave: Iterable[Placed]) -> None:
        """Add the decisions of one wave."""
        for placed in wave:
            if placed.hit is not None:
                self.hits[placed.hit, placed.kind] += 1
                continue
            self.misses[placed.kind] += 1
            if placed.evicted_from is not None:
                self.evictions[placed.evicted_from, placed.kind] += 1

    def add(self, other: "Counters") -> None:
        """Add another rank's totals."""
        for segment_kind, hits in other.hits.items():
            self.hits[segment_kind] += hits
            self.evictions[segment_kind] += other.evictions[segment_kind]
        for kind, misses in other.misses.items():
            self.misses[kind] += misses

    @property
    def num_hits(self) -> int:
        return sum(self.hits.values())

    @property
    def num_misses(self) -> int:
        return sum(self.misses.values())

    @property
    def num_evictions(self) -> int:
        return sum(self.evictions.values())

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses of experts, in [0, 1]; None before the first one."""
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else None
