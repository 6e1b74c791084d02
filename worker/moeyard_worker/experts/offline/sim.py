"""Replays a routing trace through a residency policy: the engine's cache without the engine. Torch-free.

Policy, start and counters are the engine's own objects, so that a simulation with
the policy and slots of the recorded run counts exactly what that run counted.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeyard_kernels.types.expert_ranks import slots_of_layers
from moeyard_worker.experts.offline.trace import RankTrace, read_trace
from moeyard_worker.experts.policies import start_policy
from moeyard_worker.experts.policy import ROW_KINDS, SEGMENTS, Counters, ExpertKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Totals of one rank. `num_slots` is what was used: at most the rank's experts over all layers, `num_experts`."""

    rank: int
    num_slots: int
    num_experts: int
    num_accesses: int
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What a policy would have done with a trace: per rank, and all ranks together in `total`."""

    policy: str
    ranks: tuple[RankResult, ...]
    total: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Hits on a trace that no policy can exceed, whatever it foresees."""

    num_slots: int
    num_hits: int
    num_misses: int

    @property
    def hit_rate(self) -> float | None:
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else None


def simulate(path: Path, policy: str | None = None, slots: int | None = None) -> SimResult:
    """Replay the trace named `path`; `slots` per rank. What is None is taken from the recorded run.

    Raises ValueError for an unknown policy, fewer than 1 slot or a bad trace, FileNotFoundError when there is none.
    """
    traces = read_trace(path)
    name = traces[0].header.policy if policy is None else policy
    ranks = tuple(_replay(trace, name, trace.header.num_slots if slots is None else slots) for trace in traces)
    total = Counters()
    for rank in ranks:
        total.add(rank.counters)
    return SimResult(policy=name, ranks=ranks, total=total)


def belady(path: Path, slots: int | None) -> tuple[Optimum, ...]:
    """Per rank, hits that no policy can exceed: keep the experts whose next use is nearest (Belady, 1966).

    Starts as the engine does. An access counts its hits before anything is replaced. A hit is then an expert kept from
    one use to its next, at most `slots` are kept at a time, and choosing those that end first is optimal. It is a
    bound, tight but for less than one slot and for prompts: here a miss may be used without taking a slot for the
    moment, and what a prompt missed may be kept, neither of which the engine does.
    """
    if slots is not None and slots < 1:
        raise ValueError(f"the expert cache needs at least 1 slot, got {slots}")
    return tuple(_optimum(t, t.header.num_slots if slots is None else slots) for t in read_trace(path))


def format_table(result: SimResult, optima: Sequence[Optimum]) -> str:
    """A plain-text table: one row per rank and one for all, percentages of all accesses of experts.

    The last column is the hit rate that none can exceed: `optima` are of the same slots, one per rank.
    """
    heads = ["rank", "slots", "experts", "hits", "misses", "evictions", "hit %"]
    heads += [f"{segment} {kind}" for segment in SEGMENTS for kind in ROW_KINDS] + ["best %"]
    rows = [heads]
    for rank, best in zip(result.ranks, optima, strict=True):
        numbers = [str(rank.rank), str(rank.num_slots), str(rank.num_experts)]
        rows.append([*numbers, *_cells(rank.counters), _percent(best.hit_rate)])
    if len(result.ranks) > 1:
        slots = sum(rank.num_slots for rank in result.ranks)
        experts = sum(rank.num_experts for rank in result.ranks)
        hits, misses = sum(o.num_hits for o in optima), sum(o.num_misses for o in optima)
        best_rate = _percent(hits / (hits + misses) if hits + misses else None)
        rows.append(["all", str(slots), str(experts), *_cells(result.total), best_rate])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"policy {result.policy}", *lines])


def _cells(counters: Counters) -> list[str]:
    totals = [counters.num_hits, counters.num_misses, counters.num_evictions]
    by_segment = [counters.hits[segment, kind] for segment in SEGMENTS for kind in ROW_KINDS]
    return [*map(str, totals), _percent(counters.hit_rate), *map(str, by_segment)]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f}"


def _replay(trace: RankTrace, name: str, slots: int) -> RankResult:
    header = trace.header
    policy = start_policy(name, layers=header.layers, experts=header.experts, num_slots=slots)
    counters, num_accesses = Counters(), 0
    for access in trace:
        num_accesses += 1
        for wave in policy.access(access.layer, access.decode, access.prefill):
            counters.count(wave)
    policy.validate()
    return RankResult(
        rank=header.rank,
        num_slots=policy.num_slots,
        num_experts=len(header.layers) * len(header.experts),
        num_accesses=num_accesses,
        counters=counters,
    )


def _optimum(trace: RankTrace, slots: int) -> Optimum:
    uses = [[(access.layer, expert) for expert in access.decode + access.prefill] for access in trace]
    num_uses = sum(map(len, uses))
    total = len(trace.header.layers) * len(trace.header.experts)
    if slots >= total:
        return Optimum(num_slots=total, num_hits=num_uses, num_misses=0)
    following: list[list[int]] = []  # for each use, the index of the access that needs the expert next; -1 for never
    upcoming: dict[ExpertKey, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        following.append([upcoming.get(key, -1) for key in uses[i]])
        upcoming.update(dict.fromkeys(uses[i], i))
    following.reverse()
    # Resident expert -> its next use; experts never needed again are not kept.
    kept = {key: upcoming[key] for key in _first_resident(trace, slots) if key in upcoming}
    # Heap of (-next use, key), stale entries dropped when they surface.
    farthest = [(-i, key) for key, i in kept.items()]
    heapq.heapify(farthest)
    num_hits = 0
    for keys, nexts in zip(uses, following, strict=True):
        num_hits += sum(kept.pop(key, None) is not None for key in keys)
        for key, i in zip(keys, nexts, strict=True):
            if i >= 0:
                kept[key] = i
                heapq.heappush(farthest, (-i, key))
        while len(kept) > slots:
            i, key = heapq.heappop(farthest)
            if kept.get(key) == -i:
                del kept[key]
    return Optimum(num_slots=slots, num_hits=num_hits, num_misses=num_uses - num_hits)


def _first_resident(trace: RankTrace, slots: int) -> list[ExpertKey]:
    layers, first = trace.header.layers, trace.header.experts_start
    counts = slots_of_layers(slots, len(layers))
    return [(layer, first + i) for layer, count in zip(layers, counts, strict=True) for i in range(count)]
