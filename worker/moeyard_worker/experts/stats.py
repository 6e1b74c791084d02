"""Counters of an expert cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add

from moeyard_kernels.backend import ExpertRun
from moeyard_kernels.types.expert_residency import ResidencyCounts
from moeyard_worker.experts.owned import Owned
from moeyard_worker.experts.policy import SEGMENTS, Counters, Segment
from moeyard_worker.protocol import ExpertLoads


@dataclass(slots=True)
class CacheStats:
    """Running totals for the metrics.

    bytes_copied: bytes written into slots, with the first filling.
    bytes_to_host: bytes of evicted experts written into host memory.
    bytes_by_peers: those of them that other ranks read for this one. `bytes_for_peers`: read here for other ranks.
    stall_seconds: for each access with misses since the last drain, how long the host waited for copies.
    copy_seconds: total time of copies. On a GPU, the time of gathering misses of decode rows beside rows that hit.
    load_imbalance: by layer, rows of the busiest local expert over the mean, at the last access with known counts.
    expert_rows: by layer, the rows that each local expert has computed so far.
    records_dropped: accesses that could not be recorded; None without recording.
    """

    counters: Counters = field(default_factory=Counters)
    bytes_copied: int = 0
    bytes_to_host: int = 0
    bytes_for_peers: int = 0
    bytes_by_peers: int = 0
    copy_seconds: float = 0.0
    stall_seconds: list[float] = field(default_factory=list)
    load_imbalance: dict[int, float] = field(default_factory=dict)
    expert_rows: dict[int, list[int]] = field(default_factory=dict)
    records_dropped: int | None = None

    def take(self, counts: ResidencyCounts, *, num_slots: int, slot_bytes: int, all_on_host: bool) -> None:
        """Take over the totals of a device. `slot_bytes` are those of one slot.

        all_on_host: host memory holds the evicted experts already.
        """
        counters = self.counters
        for i, segment in enumerate(SEGMENTS):
            counters.hits[segment, "decode"] = counts.decode_hits[i]
            counters.hits[segment, "prefill"] = counts.prompt_hits[i]
            counters.evictions[segment, "decode"] = counts.evictions[i]
        counters.misses["decode"] = counts.decode_misses
        counters.misses["prefill"] = counts.prompt_misses
        self.copy_seconds = counts.gather_seconds
        self.bytes_for_peers, self.bytes_by_peers = counts.bytes_for_peers, counts.bytes_by_peers
        self.bytes_copied = (num_slots + counters.num_misses) * slot_bytes
        self.bytes_to_host = 0 if all_on_host else counters.num_evictions * slot_bytes


class Counting:
    """Updates the totals of a cache that has the experts `owned` of `layers`."""

    def __init__(self, layers: tuple[int, ...], owned: Owned) -> None:
        self.stats = CacheStats()
        self._layers = layers
        self._owned = owned
        # Local ids that no decode row has used yet, if everything is resident.
        self._unsettled = {layer: set(range(len(each))) for layer, each in zip(layers, owned, strict=True)}

    def change(self, owned: Owned) -> None:
        """Count other experts from now on. Experts that stay keep their rows, and none is settled."""
        rows = self.stats.expert_rows
        for layer, old, new in zip(self._layers, self._owned, owned, strict=True):
            self._unsettled[layer] = set(range(len(new)))
            if layer in rows:
                counted = dict(zip(old, rows[layer], strict=True))
                rows[layer] = [counted.get(expert, 0) for expert in new]
        self._owned = owned
        self.stats.load_imbalance.clear()

    def loads(self, rank: int, chosen: Sequence[Sequence[int]] = ()) -> ExpertLoads:
        """Return the rows that the experts have computed, empty if the host does not know them.

        chosen: counts of a device instead: for each layer, how many of this rank's rows chose each expert.
        """
        known = self.stats.expert_rows
        experts = tuple(sorted(set(chain.from_iterable(self._owned))))
        rows, held = list[int](), list[int]()
        for layer, each in zip(self._layers, self._owned, strict=True) if known else ():
            counted = dict(zip(each, known.get(layer, ()), strict=False))
            rows += [counted.get(expert, 0) for expert in experts]
        if chosen:
            assert len(chosen) == len(self._layers), f"choices of {len(chosen)} gates in {len(self._layers)} layers"
            uneven = any(len(each) < len(experts) for each in self._owned)
            held = [int(expert in each) for each in map(set, self._owned) for expert in experts] if uneven else []
        return ExpertLoads(
            rank=rank,
            layers=self._layers,
            experts=experts,
            rows=tuple(rows),
            chosen=tuple(chain.from_iterable(chosen)),
            held=tuple(held),
        )

    def observe_load(self, layer: int, counts: Sequence[int]) -> None:
        total = sum(counts)
        if total:
            self.stats.load_imbalance[layer] = max(counts) * len(counts) / total
            before = self.stats.expert_rows.get(layer)
            self.stats.expert_rows[layer] = list(counts) if before is None else list(map(add, before, counts))

    def count_resident(self, layer: int, run: ExpertRun, settled: Segment) -> None:
        """Count as the policy would: all are hits, and settled ones if decode rows used the expert before."""
        self.observe_load(layer, run.counts)
        decode, prefill = needed(run)
        hits = self.stats.counters.hits
        unsettled = self._unsettled[layer]
        if unsettled:
            fresh = unsettled.intersection(decode)
            unsettled -= fresh
            hits["probation", "decode"] += len(fresh)
            hits[settled, "decode"] += len(decode) - len(fresh)
            num_unsettled = len(unsettled.intersection(prefill))
            hits["probation", "prefill"] += num_unsettled
            hits[settled, "prefill"] += len(prefill) - num_unsettled
        else:
            hits[settled, "decode"] += len(decode)
            hits[settled, "prefill"] += len(prefill)


def needed(run: ExpertRun) -> tuple[list[int], list[int]]:
    """Return local ids of the experts that a decode row needs, and of those that only prompt rows need, ascending."""
    decode: list[int] = []
    prefill: list[int] = []
    for local, (count, num_decode) in enumerate(zip(run.counts, run.decode_counts, strict=True)):
        if count:
            (decode if num_decode else prefill).append(local)
    return decode, prefill
