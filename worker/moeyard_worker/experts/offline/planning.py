"""Which experts ought to lie on which rank, by what was routed: predictions over a trace, and a balanced placement.

Ranks meet in every MoE layer, so a step takes as long as its fullest rank: where rows are few, as long as that one
reads the weights of its distinct experts. Torch-free.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeyard_worker.config.placement import Copies, Placement, partition
from moeyard_worker.experts.offline.loads import Loads, shards, unevenness
from moeyard_worker.experts.offline.swapping import apart
from moeyard_worker.experts.offline.trace import RankTrace, read_trace

# How many placements by chance the mean is taken of.
_CHANCES = 16


@dataclass(frozen=True, slots=True)
class Needs:
    """What decode rows needed: `steps[i][j]` are the experts of `layers[j]` in the i-th step, ascending."""

    layers: tuple[int, ...]
    num_experts: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]

    def halves(self) -> tuple["Needs", "Needs"]:
        """The steps before the middle and those behind it."""
        middle = len(self.steps) // 2
        return (
            Needs(self.layers, self.num_experts, self.steps[:middle]),
            Needs(self.layers, self.num_experts, self.steps[middle:]),
        )

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """In how many steps each expert was needed, by layer."""
        counts = [Counter[int]() for _ in self.layers]
        for step in self.steps:
            for count, experts in zip(counts, step, strict=True):
                count.update(experts)
        return tuple(tuple(count[expert] for expert in range(self.num_experts)) for count in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Distinct experts of a step, summed over its layers: on the fullest rank of each, and on the mean rank.

    `rows`: `unevenness` of many steps together, each of which counts an expert once.
    """

    name: str
    fullest: float
    mean: float
    rows: float


def read_needs(path: Path) -> Needs:
    """What all ranks of the trace named `path` needed together.

    Raises FileNotFoundError without one, ValueError for a bad one and for one of fewer than two steps with decode rows.
    """
    traces = read_trace(path)
    layers = traces[0].header.layers
    num_experts = max(trace.header.experts_stop for trace in traces)
    steps = _steps(traces, {layer: i for i, layer in enumerate(layers)})
    if len(steps) < 2:
        raise ValueError(f"trace {path} has {len(steps)} steps with decode rows: nothing can be said of others")
    return Needs(layers, num_experts, steps)


def _steps(traces: Iterable[RankTrace], index: Mapping[int, int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    found: dict[int, list[set[int]]] = {}
    for trace in traces:
        for access in trace:
            if access.decode:
                step = found.setdefault(access.step, [set() for _ in index])
                step[index[access.layer]].update(access.decode)
    return tuple(tuple(tuple(sorted(experts)) for experts in found[number]) for number in sorted(found))


def balanced(needs: Needs | Loads, num_ranks: int) -> Placement:
    """Experts dealt by load: the most needed first, each to the rank with the least by then that has room.

    Ranks own as many experts of a layer as in contiguous shards, so that memory is as even. The greedy rule is that of
    longest processing time first (Graham, 1969), as DeepSeek's EPLB has it. Raises ValueError as `partition`.
    """
    sizes = [len(shard) for shard in partition(needs.num_experts, num_ranks)]
    return Placement(needs.layers, tuple(_dealt(loads, sizes) for loads in needs.loads()))


def _dealt(loads: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    owners, held, room = [0] * len(loads), [0] * len(sizes), list(sizes)
    for expert in sorted(range(len(loads)), key=lambda each: (-loads[each], each)):
        rank = min((r for r in range(len(sizes)) if room[r]), key=lambda r: (held[r], r))
        owners[expert] = rank
        held[rank] += loads[expert]
        room[rank] -= 1
    return tuple(owners)


def together(needs: Needs, num_ranks: int) -> Placement:
    """`balanced`, and then experts that are needed in the same steps moved apart (`swapping.apart`).

    Raises ValueError as `partition`.
    """
    start = balanced(needs, num_ranks)
    rows = (apart(owners, [step[i] for step in needs.steps], num_ranks) for i, owners in enumerate(start.owners))
    return Placement(needs.layers, tuple(rows))


def by_chance(needs: Needs, num_ranks: int, seed: int) -> Placement:
    """Shards of equal size, dealt by chance in every layer. Raises ValueError as `partition`."""
    chance, rows = random.Random(seed), []
    for _ in needs.layers:
        row = [rank for rank, shard in enumerate(partition(needs.num_experts, num_ranks)) for _ in shard]
        chance.shuffle(row)
        rows.append(tuple(row))
    return Placement(needs.layers, tuple(rows))


def copied(needs: Needs | Loads, placement: Placement, count: int) -> Placement:
    """The same with second copies of up to `count` experts of every layer, as far as they even out its load.

    One after the other relieves the fullest rank: half of an expert's load goes to the rank with the least by then, of
    those that have not their even share of the layer's copies, so that memory stays as even. DeepSeek's EPLB copies
    and packs by load, too. Raises ValueError for a negative count, more than there are experts, or one rank.
    """
    if not 0 <= count <= needs.num_experts:
        raise ValueError(f"{count} copies per layer of {needs.num_experts} experts")
    if count and len(placement.ranks) < 2:
        raise ValueError("a second copy needs a second rank")
    copies = tuple(
        _copied(loads, owners, placement.ranks, count)
        for loads, owners in zip(needs.loads(), placement.owners, strict=True)
    )
    return replace(placement, copies=copies if any(copies) else ())


def _copied(loads: Sequence[int], owners: Sequence[int], ranks: Sequence[int], count: int) -> Copies:
    held, room = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, -(-count // len(ranks)))
    for expert, owner in enumerate(owners):
        held[owner] += loads[expert]
    copies: dict[int, int] = {}
    for _ in range(count):
        fullest = max(ranks, key=lambda r: (held[r], -r))
        target = min((r for r in ranks if room[r] and r != fullest), key=lambda r: (held[r], r), default=None)
        whole = [e for e, owner in enumerate(owners) if owner == fullest and e not in copies]
        if target is None or not whole:
            break
        after = {e: max(held[fullest] - loads[e] / 2, held[target] + loads[e] / 2) for e in whole}
        expert = min(whole, key=lambda e: (after[e], e))
        if after[expert] >= held[fullest]:
            break
        copies[expert] = target
        room[target] -= 1
        held[target] += loads[expert] / 2
        held[fullest] -= loads[expert] / 2
    return tuple(sorted(copies.items()))


def predict(name: str, needs: Needs, placement: Placement) -> Prediction:
    """What a mean step of `needs` asks of ranks that own experts by `placement`, and how uneven many rows would be.

    Copies bear half of their experts' rows where these are many. Few rows go to owners alone, as the exchanges have it.
    """
    fullest = total = 0
    for step in needs.steps:
        for experts, owners in zip(step, placement.owners, strict=True):
            fullest += max(Counter(owners[expert] for expert in experts).values(), default=0)
            total += len(experts)
    count = len(needs.steps)
    return Prediction(
        name=name,
        fullest=fullest / count,
        mean=total / count / len(placement.ranks),
        rows=unevenness(needs.loads(), placement),
    )


def compare(needs: Needs, num_ranks: int, *, num_copies: Collection[int] = ()) -> tuple[Prediction, ...]:
    """Placements beside each other: contiguous, by chance, balanced, and balanced with copies.

    What is placed by needs is so by those of the first half of the steps, and all are asked for the second: what is to
    come is not known to who places. Raises ValueError as `partition` and `copied`.
    """
    known, coming = needs.halves()
    given = shards(needs.layers, needs.num_experts, num_ranks)
    chances = [predict("", coming, by_chance(needs, num_ranks, seed)) for seed in range(_CHANCES)]
    best = together(known, num_ranks)
    return (
        *(predict(each, coming, placement) for each, placement in given.items()),
        Prediction(
            name=f"by chance (mean of {_CHANCES})",
            fullest=sum(each.fullest for each in chances) / _CHANCES,
            mean=chances[0].mean,
            rows=sum(each.rows for each in chances) / _CHANCES,
        ),
        predict("balanced by load", coming, balanced(known, num_ranks)),
        predict("kept apart", coming, best),
        *(predict(f"kept apart, {count} copied", coming, copied(known, best, count)) for count in num_copies),
    )


def compare_loads(loads: Loads, num_ranks: int, *, num_copies: Collection[int] = ()) -> list[tuple[str, float]]:
    """The same by `unevenness` alone, of the loads that the placements were made of. Raises ValueError as `compare`."""
    best = balanced(loads, num_ranks)
    placements = shards(loads.layers, loads.num_experts, num_ranks) | {"balanced by load": best}
    placements |= {f"balanced, {count} copied": copied(loads, best, count) for count in num_copies}
    return [(name, unevenness(loads.rows, placement)) for name, placement in placements.items()]


def format_plan(predictions: Sequence[Prediction], *, expert_bytes: int | None) -> str:
    """A plain-text table; with bytes of a step's weights on the fullest rank where those of an expert are known."""
    heads = ["placement", "experts, fullest rank", "mean rank", "fullest / mean", "rows, fullest / mean"]
    rows = [heads + ["MB, fullest rank"] * (expert_bytes is not None)]
    for each in predictions:
        cells = [each.name, f"{each.fullest:.2f}", f"{each.mean:.2f}", f"{each.fullest / each.mean:.3f}"]
        cells.append(f"{each.rows:.3f}")
        if expert_bytes is not None:
            cells.append(f"{each.fullest * expert_bytes * 1e-6:.3g}")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
