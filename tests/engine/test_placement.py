"""Owners of experts: contiguous shards, from a file, and without lost ranks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.config.placement import Placement, partition

LAYERS = (1, 2, 5)
WHOLE = Placement.of_shards(LAYERS, partition(12, 3))
UNEVEN = Placement(LAYERS, ((0,) * 9 + (1, 1, 2), (0, 1, 2) * 4, (2,) * 12))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts).map(tuple)
    owners = tuple(draw(st.lists(row, min_size=3, max_size=3)))
    copies = []
    for each in owners if num_ranks > 1 and draw(st.booleans()) else ():
        some = sorted(draw(st.sets(st.integers(0, num_experts - 1))))
        steps = draw(st.lists(st.integers(1, num_ranks - 1), min_size=len(some), max_size=len(some)))
        copies.append(tuple((e, (each[e] + step) % num_ranks) for e, step in zip(some, steps, strict=True)))
    return Placement(LAYERS, owners, tuple(copies))


def test_shards() -> None:
    placed = Placement.of_shards(LAYERS, partition(5, 2))
    assert placed.owners == ((0, 0, 0, 1, 1),) * 3
    assert placed.experts(1) == ((3, 4),) * 3
    assert (placed.ranks, placed.num_experts, placed.num_owned(0)) == ((0, 1), 5, 9)
    with pytest.raises(ValueError, match="does not place each of 4 experts once"):
        Placement.of_shards(LAYERS, [(0, 1), (1, 2)])


@given(placements(), st.sets(st.integers(0, 4)))
def test_remaining_ranks_keep_their_experts_and_share_the_rest(placed: Placement, away: set[int]) -> None:
    left = [rank for rank in placed.ranks if rank not in away]
    if not left:
        with pytest.raises(ValueError, match="no rank remains"):
            placed.without(away)
        return
    dealt = placed.without(away)
    assert set(dealt.ranks) == set(left)
    before, after = ({rank: each.experts(rank) for rank in range(5)} for each in (placed, dealt))
    assert sum(dealt.num_owned(rank) for rank in left) == 3 * placed.num_experts + sum(map(len, dealt.copies))
    for i, row in enumerate(placed.owners):
        second, still = dict(placed.copies_of(i)), dict(dealt.copies_of(i))
        for expert, (old, new) in enumerate(zip(row, dealt.owners[i], strict=True)):
            there = [rank for rank in (old, second.get(expert, old)) if rank in left]
            assert new == there[0] if there else new in left, "experts stay where they are"
            assert still.get(expert) == (there[1] if len(set(there)) > 1 else None)
        # Owners are as even as they can be without moving an expert of a remaining rank.
        count = {rank: len(after[rank][i]) for rank in left}
        gained = [rank for rank in left if count[rank] > len(before[rank][i])]
        assert all(count[rank] <= min(count.values()) + 1 for rank in gained)
        assert all(set(before[rank][i]) <= set(after[rank][i]) for rank in left), "remaining ranks lose no expert"
    assert (dealt.fingerprint == placed.fingerprint) == (dealt == placed)


def test_file_names_all_layers_or_each() -> None:
    def read(value: Any) -> Placement:
        return Placement.parse(json.dumps(value), layers=LAYERS, num_experts=3, num_ranks=2)

    assert read({"owners": [1, 0, 1]}).owners == ((1, 0, 1),) * 3
    assert read({"owners": {"1": [0, 0, 0], "2": [1, 1, 1], "5": [0, 1, 0]}}).experts(1) == ((), (0, 1, 2), (1,))
    copied = read({"owners": [1, 0, 1], "copies": {"2": 0, "0": 0}})
    assert copied.copies == (((0, 0), (2, 0)),) * 3
    assert copied.experts(0) == ((0, 1, 2),) * 3
    assert copied.num_owned(1) == 6
    owners = {"1": [0, 1, 0], "2": [1, 1, 1], "5": [0, 1, 0]}
    assert read({"owners": owners, "copies": {"2": {"1": 0}}}).copies == ((), ((1, 0),), ())
    assert read({"owners": owners, "copies": {"2": {}}}) == read({"owners": owners})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 0, 1], 'it is not a JSON object with "owners"'),
        ({"owners": {"1": [0, 0, 1]}}, "its owners are not those of the MoE layers 1 to 5"),
        ({"owners": [0, 1]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 1, 2]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 1, True]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 0, 0]}, "rank 1 owns no expert"),
        ({"owners": [0, 1, 0], "copies": {"3": 0}}, "layer 1: copies are one of 2 ranks by one of 3 experts"),
        ({"owners": [0, 1, 0], "copies": {"0": 2}}, "layer 1: copies are one of 2 ranks by one of 3 experts"),
        ({"owners": [0, 1, 0], "copies": [1]}, "layer 1: copies are one of 2 ranks by one of 3 experts"),
        ({"owners": [0, 1, 0], "copies": {"1": 1}}, "layer 1: a copy of expert 1 lies on no other rank than its owner"),
        (
            {"owners": {"1": [0, 1, 0], "2": [0, 1, 0], "5": [0, 1, 0]}, "copies": {"3": {"1": 0}}},
            "its copies are not of the MoE layers 1 to 5",
        ),
    ],
)
def test_invalid_files_are_refused(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Placement.parse(json.dumps(value), layers=LAYERS, num_experts=3, num_ranks=2)
    with pytest.raises(ValueError, match="not a JSON object"):
        Placement.parse("[" * 100_000, layers=LAYERS, num_experts=3, num_ranks=2)


def test_invalid_copies_are_refused() -> None:
    for copies, said in {
        ((),): "copies of 1 layers",
        (((0, 1), (0, 2)), (), ()): "has one at most",
        (((12, 0),), (), ()): "12",
        (((0, -1),), (), ()): "no other rank",
    }.items():
        with pytest.raises(ValueError, match=said):
            Placement(LAYERS, WHOLE.owners, copies)


@pytest.mark.parametrize("placed", [WHOLE, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_resizing_moves_as_few_experts_as_possible(placed: Placement, size: int) -> None:
    after = placed.resized(size)
    assert after.ranks == tuple(range(size))
    before = max(placed.ranks) + 1
    for then, now in zip(placed.owners, after.owners, strict=True):
        moved = [(a, b) for a, b in zip(then, now, strict=True) if a != b]
        if size <= before:
            assert all(a >= size > b for a, b in moved), "only experts of removed ranks move"
            assert all(owner < size for owner in now)
        else:
            assert all(b >= before for _, b in moved), "experts move only to new ranks"
            counts = [now.count(rank) for rank in range(size)]
            assert min(counts[before:]) >= max(counts) - 1, counts


def test_copies_stay_when_a_fleet_is_resized() -> None:
    placed = Placement(LAYERS, WHOLE.owners, (((0, 1), (5, 2)), (), ((11, 0),)))
    assert placed.resized(5).copies == placed.copies
    smaller = placed.resized(2)
    assert smaller.copies == (((0, 1),), (), ()), "the copies on rank 2 are gone"
    assert smaller.owners[2][11] == 0, "the rank with the copy becomes the owner"


def test_resizing_back_is_even() -> None:
    back = WHOLE.resized(6).resized(3)
    assert {row.count(rank) for row in back.owners for rank in range(3)} == {4}
    assert WHOLE.resized(3) == WHOLE


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "at least 1 rank, got 0"), (13, "13 ranks for 12 experts per layer: every rank must own one")],
)
def test_invalid_sizes_of_a_fleet(size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WHOLE.resized(size)
