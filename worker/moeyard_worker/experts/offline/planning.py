"""Plans which rank should have which experts, from recorded routing: predictions, and balanced placements.

Ranks meet in every MoE layer, so a step takes as long as its fullest rank. With few rows, that is the time in which it
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

# Number of random placements whose mean is reported.
_CHANCES = 16


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of decode rows: `steps[i][j]` are the experts of `layers[j]` in the i-th step, ascending."""

    layers: tuple[int, ...]
    num_experts: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]

    def halves(self) -> tuple["Needs", "Needs"]:
        """Return the first and the second half of the steps."""
        middle = len(self.steps) // 2
        return (
            Needs(self.layers, self.num_experts, self.steps[:middle]),
            Needs(self.layers, self.num_experts, self.steps[middle:]),
        )

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """Return by layer how many steps needed each expert."""
        counts = [Counter[int]() for _ in self.layers]
        for step in self.steps:
            for count, experts in zip(counts, step, strict=True):
                count.update(experts)
        return tuple(tuple(count[expert] for expert in range(self.num_experts)) for count in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Distinct experts of a step, summed over its layers: on the fullest rank of each, and on the mean rank.

    rows: `unevenness` of many steps together, if each step counts an expert once.
    """

    name: str
    fullest: float
    mean: float
    rows: float


def read_needs(path: Path) -> Needs:
    """Read the needs of all ranks from the trace `path`.

    Raises FileNotFoundError, and ValueError for an invalid trace or one with fewer than two steps with decode rows.
    """
    traces = read_trace(path)
    layers = traces[0].header.layers
    num_experts = max(trace.header.experts_stop for trace in traces)
    steps = _steps(traces, {layer: i for i, layer in enumerate(layers)})
    if len(steps) < 2:
        raise ValueError(f"trace {path} has {len(steps)} steps with decode rows, which is too few for a prediction")
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
    """Return a placement by load: the most needed expert first, each on the rank with the least load that has room.

    Ranks own as many experts of a layer as with contiguous shards. The rule is longest processing time first (Graham,
    1969), as in DeepSeek's EPLB. Raises ValueError as `partition` does.
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
    """Return `balanced` with experts of the same steps moved to different ranks (`swapping.apart`).

    Raises ValueError as `partition` does.
    """
    start = balanced(needs, num_ranks)
    rows = (apart(owners, [step[i] for step in needs.steps], num_ranks) for i, owners in enumerate(start.owners))
    return Placement(needs.layers, tuple(rows))


def by_chance(needs: Needs, num_ranks: int, seed: int) -> Placement:
    """Return random shards of equal size in every layer. Raises ValueError as `partition` does."""
    chance, rows = random.Random(seed), []
    for _ in needs.layers:
        row = [rank for rank, shard in enumerate(partition(needs.num_experts, num_ranks)) for _ in shard]
        chance.shuffle(row)
        rows.append(tuple(row))
    return Placement(needs.layers, tuple(rows))


def copied(needs: Needs | Loads, placement: Placement, count: int) -> Placement:
    """Return the placement with second copies of up to `count` experts per layer, as far as they even out the load.

    Each copy relieves the fullest rank: half of an expert's load moves to the rank with the least load. A rank gets at
    most its even share of a layer's copies. DeepSeek's EPLB also copies and packs by load. Raises ValueError for a
    negative count, more copies than experts, or a single rank.
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
    """Predict the mean step of `needs` with `placement`, and the unevenness of steps with many rows.

    Copies compute half of their experts' rows if these are many. Exchanges send few rows to owners only.
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
    """Predict several placements: contiguous, random, balanced, and balanced with copies.

    Placements are made from the first half of the steps and predicted for the second. Raises ValueError as `partition`
    and `copied` do.
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
    """Compare placements by `unevenness` of the loads that they were made from. Raises ValueError as `compare` does."""
    best = balanced(loads, num_ranks)
    placements = shards(loads.layers, loads.num_experts, num_ranks) | {"balanced by load": best}
    placements |= {f"balanced, {count} copied": copied(loads, best, count) for count in num_copies}
    return [(name, unevenness(loads.rows, placement)) for name, placement in placements.items()]


def format_plan(predictions: Sequence[Prediction], *, expert_bytes: int | None) -> str:
    """Return a plain-text table, with the bytes of a step's weights on the fullest rank if `expert_bytes` is known."""
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
