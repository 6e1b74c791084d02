"""What a residency policy decides, how its decisions are counted, and the wave rules that every policy shares. Pure.

A policy knows two moves: `hit` (is this expert resident, and note its use) and `admit` (give a miss a slot, or say that
none can be freed while the wave runs). `plan_waves` turns them into waves; engine and simulator count with `Counters`.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

# Which rows need an expert: a decode row, or prompt rows only. The metrics' label for it is "phase".
RowKind = Literal["decode", "prefill"]
Segment = Literal["probation", "protected"]
ExpertKey = tuple[int, int]  # layer, global expert id

ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)
SEGMENTS: tuple[Segment, ...] = get_args(Segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One expert of a wave and the slot it computes from.

    `kind` is "decode" when a decode row needs the expert, else "prefill". `hit` is None for a miss, else the segment
    the expert was found in. `evicted` is the (layer, expert) whose slot a miss took and `evicted_from` its segment.
    """

    expert: int
    slot: int
    kind: RowKind
    hit: Segment | None = None
    evicted: ExpertKey | None = None
    evicted_from: Segment | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """The slot given to a miss and, when it was not free, whose it was and in which segment."""

    slot: int
    evicted: ExpertKey | None = None
    evicted_from: Segment | None = None


class ResidencyPolicy(Protocol):
    """Decides which experts sit in which slots. Pure: no torch, no clock, no I/O. One instance per rank, all layers."""

    num_slots: int

    # Where an expert that a decode row has hit is found from then on, as long as nothing is evicted. Before that, and
    # for experts that only prompts hit, it is "probation". Lets a cache that holds everything count without asking.
    @property
    def settled(self) -> Segment: ...

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Start with these (layer, expert) resident, in slots 0, 1, ...; the policy must be empty."""
        ...

    def hit(self, key: ExpertKey, kind: RowKind) -> tuple[int, Segment] | None:
        """Slot of a resident expert and the segment it was found in, and note its use; None when it is not resident."""
        ...

    def admit(self, key: ExpertKey, kind: RowKind, pinned: Set[ExpertKey]) -> Admission | None:
        """Make an expert resident without evicting a pinned one; None when no slot can be had before the wave ends.

        Never None when nothing is pinned.
        """
        ...

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        """Make the needed experts of one layer resident, in waves that each fit the slots.

        `decode` and `prefill` are disjoint ascending expert ids: those that a decode row needs, and those that only
        prompt rows need. Every expert appears in exactly one wave; the first wave starts with all hits. A slot is never
        reassigned inside the wave that uses it, and no hit is evicted before its wave.
        """
        ...

    def validate(self) -> None:
        """Assert every invariant of the data structure."""
        ...


def plan_waves(
    policy: ResidencyPolicy, *, layer: int, decode: Sequence[int], prefill: Sequence[int]
) -> list[list[Placed]]:
    """The waves of one access, by the contract of `ResidencyPolicy.access`.

    Hits come first and are pinned in the first wave. Misses follow, decode before prefill; when a miss finds no slot
    that the wave does not use, the wave ends, and its experts (computed by then) may be evicted by the next one.
    """
    wave: list[Placed] = []
    pinned: set[ExpertKey] = set()
    misses: list[tuple[int, RowKind]] = []
    for kind, needed in zip(ROW_KINDS, (decode, prefill), strict=True):
        for expert in needed:
            found = policy.hit((layer, expert), kind)
            if found is None:
                misses.append((expert, kind))
            else:
                wave.append(Placed(expert=expert, slot=found[0], kind=kind, hit=found[1]))
                pinned.add((layer, expert))
    waves = [wave]
    for expert, kind in misses:
        key = (layer, expert)
        admission = policy.admit(key, kind, pinned)
        if admission is None:
            wave, pinned = [], set()
            waves.append(wave)
            admission = policy.admit(key, kind, pinned)
            assert admission is not None, f"the policy found no slot for {key} although nothing is pinned"
        pinned.add(key)
        wave.append(
            Placed(
                expert=expert,
                slot=admission.slot,
                kind=kind,
                evicted=admission.evicted,
                evicted_from=admission.evicted_from,
            )
        )
    return waves if waves[0] else []


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
