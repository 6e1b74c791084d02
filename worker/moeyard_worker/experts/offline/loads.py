"""Placements by measured loads: the rows that each expert of a fleet has computed, as its router reports them.

A trace has the distinct experts of each decode step but not their rows, and GPUs record no trace inside graphs. Loads
count the rows of prompts and output on any fleet. They do not show which experts are needed together. Torch-free.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard_worker.config.placement import Placement, partition

# A reply of /v1/fleet/experts for 100 layers of 1024 experts and 64 ranks has about 40 MB at most.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Loads:
    """Expert `e` of `layers[j]` computed `rows[j][e]` rows."""

    layers: tuple[int, ...]
    num_experts: int
    rows: tuple[tuple[int, ...], ...]

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """Return the loads by layer and expert."""
        return self.rows


def is_loads(path: Path) -> bool:
    """Return whether `path` holds JSON and not a trace. Raises OSError if it cannot be read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"{"


def read_loads(path: Path) -> Loads:
    """Read a reply of GET /v1/fleet/experts and add up its ranks.

    Raises OSError if it cannot be read, and ValueError for another file or a reply without rows.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is not a reply of /v1/fleet/experts: it has {path.stat().st_size} bytes")
    try:
        counts = _added(json.loads(path.read_bytes())["ranks"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a reply of /v1/fleet/experts: {error!r}") from None
    if not any(count.total() for count in counts.values()):
        raise ValueError(f"{path} counts no rows of experts: ask a server that has answered requests")
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
    """Return the rows of the fullest rank over those of the mean rank, averaged over layers.

    It holds for steps of many rows, where a copy computes half of its expert's rows.
    """
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
    """Return the placements that need no measurement: contiguous shards and round robin.

    Raises ValueError as `partition` does.
    """
    in_turn = tuple(expert % num_ranks for expert in range(num_experts))
    return {
        "contiguous (linear)": Placement.of_shards(layers, partition(num_experts, num_ranks)),
        "in turn (round_robin)": Placement(layers, (in_turn,) * len(layers)),
    }


def format_loads(rows: Collection[tuple[str, float]]) -> str:
    """Return a plain-text table of placements and their `unevenness`."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {uneven:19.3f}" for name, uneven in rows]
    return "\n".join([f"{'placement'.ljust(width)}  rows, fullest / mean", *lines])
