"""Placements by measured loads: the rows that each expert of a fleet has had, as its router tells them.

A trace of decode steps has the distinct experts of each and says nothing of how many rows they had, and a fleet on GPUs
records none inside its graphs. Loads count rows, prompts' too, and any fleet has them. What comes together with what
they do not say. Torch-free.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard_worker.config.placement import Placement, partition

# A reply of /v1/fleet/experts of 100 layers of 1024 experts and 64 ranks has some 40 MB at most.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Loads:
    """`rows[j][e]` rows had expert `e` of `layers[j]`."""

    layers: tuple[int, ...]
    num_experts: int
    rows: tuple[tuple[int, ...], ...]

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """By layer and expert."""
        return self.rows


def is_loads(path: Path) -> bool:
    """Whether `path` has JSON, which no trace's file begins as. Raises OSError for what cannot be read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"{"


def read_loads(path: Path) -> Loads:
    """What GET /v1/fleet/experts replied, of all ranks together.

    Raises OSError for what cannot be read, ValueError for what is no such reply or one of no rows.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is no reply of /v1/fleet/experts: it has {path.stat().st_size} bytes")
    try:
        counts = _added(json.loads(path.read_bytes())["ranks"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no reply of /v1/fleet/experts: {error!r}") from None
    if not any(count.total() for count in counts.values()):
        raise ValueError(f"{path} counts no rows of experts: ask a fleet that has answered something")
    num_experts = 1 + max(max(count) for count in counts.values() if count)
    layers = tuple(sorted(counts))
    return Loads(layers, num_experts, tuple(tuple(counts[x][e] for e in range(num_experts)) for x in layers))


def _added(ranks: Sequence[Mapping[str, Any]]) -> dict[int, Counter[int]]:
    counts: dict[int, Counter[int]] = {}
    for rank in ranks:
        for layer, rows in zip(map(int, rank["layers"]), rank["rows"], strict=True):
            count = counts.setdefault(layer, Counter())
            for expert, number in zip(map(int, rank["experts"]), map(int, rows), strict=True):
                if expert < 0 or number < 0:
                    raise ValueError(f"{number} rows of expert {expert}")
                count[expert] += number
    return counts


def unevenness(loads: Sequence[Sequence[int]], placement: Placement) -> float:
    """Of many rows, those of the fullest rank over the mean rank's, mean of the layers; copies bear half of theirs."""
    uneven = []
    for i, rows in enumerate(loads):
        second, held = dict(placement.copies_of(i)), Counter[int]()
        for expert, load in enumerate(rows):
            owner = placement.owners[i][expert]
            for rank in (owner, second.get(expert, owner)):
                held[rank] += load
        uneven.append(max(held.values()) * len(placement.ranks) / max(1, held.total()))
    return sum(uneven) / len(uneven)


def shards(layers: tuple[int, ...], num_experts: int, num_ranks: int) -> dict[str, Placement]:
    """What needs no measuring: contiguous shards, and experts in turn. Raises ValueError as `partition`."""
    in_turn = tuple(expert % num_ranks for expert in range(num_experts))
    return {
        "contiguous (linear)": Placement.of_shards(layers, partition(num_experts, num_ranks)),
        "in turn (round_robin)": Placement(layers, (in_turn,) * len(layers)),
    }


def format_loads(rows: Collection[tuple[str, float]]) -> str:
    """A plain-text table of placements and their `unevenness`."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {uneven:19.3f}" for name, uneven in rows]
    return "\n".join([f"{'placement'.ljust(width)}  rows, fullest / mean", *lines])
