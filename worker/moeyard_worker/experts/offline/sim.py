"""Replays a routing trace through a residency policy: the engine's cache without the engine. Torch-free.

Policy, start and counters are those of the engine. A simulation with the policy and slots of the recorded run has
exactly the counts of that run.
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
    """Totals of one rank. `num_experts` is the number of its experts over all layers, `num_slots` at most as large."""

    rank: int
    num_slots: int
    num_experts: int
    num_accesses: int
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """The result of a policy on a trace: per rank, and `total` for all ranks."""

    policy: str
    ranks: tuple[RankResult, ...]
    total: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """An upper bound of the hits of any policy on a trace."""

    num_slots: int
    num_hits: int
    num_misses: int

    @property
    def hit_rate(self) -> float | None:
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else None


def simulate(path: Path, policy: str | None = None, slots: int | None = None) -> SimResult:
    """Replay the trace `path` with `slots` per rank. None means the value of the recorded run.

    Raises ValueError for an unknown policy, fewer than 1 slot or an invalid trace, and FileNotFoundError.
    """
    traces = read_trace(path)
    name = traces[0].header.policy if policy is None else policy
    ranks = tuple(_replay(trace, name, trace.header.num_slots if slots is None else slots) for trace in traces)
    total = Counters()
    for rank in ranks:
        total.add(rank.counters)
    return SimResult(policy=name, ranks=ranks, total=total)


def belady(path: Path, slots: int | None) -> tuple[Optimum, ...]:
    """Return per rank an upper bound of hits: keep the experts whose next use is nearest (Belady, 1966).

    It starts with the same experts as the engine. An access counts its hits before anything is replaced. A hit is an
    expert that was kept from one use to the next. At most `slots` are kept, and keeping those with the nearest next use
    is optimal. The bound is tight up to one slot and prompts: here a miss needs no slot, and a prompt's miss may be
    kept. The engine does neither.
    """
    if slots is not None and slots < 1:
        raise ValueError(f"the expert cache needs at least 1 slot, got {slots}")
    return tuple(_optimum(t, t.header.num_slots if slots is None else slots) for t in read_trace(path))


def format_table(result: SimResult, optima: Sequence[Optimum]) -> str:
    """Return a plain-text table: one row per rank and one for all, in percent of all accesses of experts.

    The last column is the upper bound of the hit rate. `optima` has one entry per rank, for the same slots.
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
    following: list[list[int]] = []  # for each use, the index of the next access that needs the expert; -1 for none
    upcoming: dict[ExpertKey, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        following.append([upcoming.get(key, -1) for key in uses[i]])
        upcoming.update(dict.fromkeys(uses[i], i))
    following.reverse()
    # Resident expert -> its next use. Experts without a next use are not kept.
    kept = {key: upcoming[key] for key in _first_resident(trace, slots) if key in upcoming}
    # Heap of (-next use, key). Outdated entries are dropped when popped.
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
