"""Placements from the row counts of a fleet: parsing, refusals and improvements."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moeyard_worker.experts.offline.loads import Loads, is_loads, read_loads, unevenness
from moeyard_worker.experts.offline.planning import balanced, compare_loads, copied, read_needs

TRACE = Path(__file__).parent / "data" / "demo-routing"


def reply(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"time": 1.0, "generation": 3, "ranks": [{"rank": i, **rank} for i, rank in enumerate(ranks)]}


def written(folder: Path, value: Any) -> Path:
    file = folder / "loads.json"
    file.write_text(json.dumps(value))
    return file


def test_rows_of_all_ranks_are_added_by_layer_and_expert(tmp_path: Path) -> None:
    # Both ranks have expert 1. Expert 3 has no rows.
    file = written(
        tmp_path,
        reply(
            {"layers": [2, 1], "experts": [0, 1], "rows": [[5, 7], [1, 0]]},
            {"layers": [1, 2], "experts": [1, 2, 3], "rows": [[4, 0, 0], [2, 9, 0]]},
            {"layers": [], "experts": [], "rows": []},  # no report
        ),
    )
    assert is_loads(file)
    assert read_loads(file) == Loads((1, 2), 4, ((1, 4, 0, 0), (5, 9, 9, 0)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"ranks": [{"layers": [1], "experts": [0], "rows": [[1, 2]]}]},
            "is not a reply of .*: ValueError",
        ),
        ({"ranks": [{"layers": [1], "experts": [0]}]}, "is not a reply of /v1/fleet/experts: KeyError"),
        ({"ranks": [{"layers": [1], "experts": [-1], "rows": [[1]]}]}, "1 rows of expert -1"),
        ({"ranks": [{"layers": [1], "experts": ["a"], "rows": [[1]]}]}, "is not a reply of /v1/fleet/experts"),
        ({"object": "error"}, "is not a reply of /v1/fleet/experts: KeyError"),
        ({"ranks": [{"layers": [1], "experts": [0, 1], "rows": [[0, 0]]}]}, "counts no rows of experts"),
        ({"ranks": []}, "counts no rows of experts"),
    ],
)
def test_invalid_replies_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_loads(written(tmp_path, value))


def test_truncated_and_too_large_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    file.write_text('{"ranks": [')
    with pytest.raises(ValueError, match="is not a reply"):
        read_loads(file)
    with file.open("wb") as large:
        large.truncate((1 << 26) + 1)
    with pytest.raises(ValueError, match="67108865 bytes"):
        read_loads(file)


def test_trace_is_not_mistaken_for_loads() -> None:
    assert not is_loads(TRACE)
    assert read_needs(TRACE).num_experts > 1


def test_copies_balance_rows_of_hot_experts() -> None:
    """Distinct experts per step cannot show this: all experts have rows in every step, but few have most of them."""
    chance = random.Random(4)
    rows = tuple(tuple(int(4000 / (1 + e) ** 1.1) + chance.randrange(9) for e in range(32)) for _ in range(3))
    loads = Loads((1, 2, 3), 32, rows)
    table = dict(compare_loads(loads, 4, num_copies=[1, 4]))
    assert list(table) == [
        "contiguous (linear)",
        "in turn (round_robin)",
        "balanced by load",
        "balanced, 1 copied",
        "balanced, 4 copied",
    ]
    assert table["contiguous (linear)"] > table["in turn (round_robin)"] > table["balanced by load"] >= 1
    assert table["balanced by load"] > table["balanced, 1 copied"] > table["balanced, 4 copied"] >= 1
    best = balanced(loads, 4)
    assert table["balanced, 4 copied"] == unevenness(rows, copied(loads, best, 4))
    # Expert 0 exceeds a rank's even share, so its owner is the fullest rank.
    held = [sum(load for load, owner in zip(rows[0], best.owners[0], strict=True) if owner == r) for r in range(4)]
    assert unevenness(rows[:1], balanced(Loads((1,), 32, rows[:1]), 4)) == pytest.approx(max(held) * 4 / sum(rows[0]))
