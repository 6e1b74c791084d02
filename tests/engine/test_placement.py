"""Who owns which expert: contiguous, from a file, and without those that are away."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.config.placement import Placement
from moeyard_worker.experts.placement import partition

LAYERS = (1, 2, 5)
WHOLE = Placement.of_shards(LAYERS, partition(12, 3))
UNEVEN = Placement(LAYERS, ((0,) * 9 + (1, 1, 2), (0, 1, 2) * 4, (2,) * 12))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts).map(tuple)
    return Placement(LAYERS, tuple(draw(st.lists(row, min_size=3, max_size=3))))


def test_shards() -> None:
    placed = Placement.of_shards(LAYERS, partition(5, 2))
    assert placed.owners == ((0, 0, 0, 1, 1),) * 3
    assert placed.experts(1) == ((3, 4),) * 3
    assert (placed.ranks, placed.num_experts, placed.num_owned(0)) == ((0, 1), 5, 9)
    with pytest.raises(ValueError, match="does not place each of 4 experts once"):
        Placement.of_shards(LAYERS, [(0, 1), (1, 2)])


@given(placements(), st.sets(st.integers(0, 4)))
def test_those_that_stay_keep_what_they_have_and_share_the_rest(placed: Placement, away: set[int]) -> None:
    left = [rank for rank in placed.ranks if rank not in away]
    if not left:
        with pytest.raises(ValueError, match="nobody is left"):
            placed.without(away)
        return
    dealt = placed.without(away)
    assert set(dealt.ranks) == set(left)
    assert sum(dealt.num_owned(rank) for rank in left) == 3 * placed.num_experts
    for before, after in zip(placed.owners, dealt.owners, strict=True):
        for old, new in zip(before, after, strict=True):
            assert new == old or old in away
        # As even as it can be where nothing is taken from anybody.
        gained = [rank for rank in left if after.count(rank) > before.count(rank)]
        assert all(after.count(rank) <= min(after.count(other) for other in left) + 1 for rank in gained)
    assert (dealt.fingerprint == placed.fingerprint) == (dealt == placed)


def test_a_file_names_all_layers_or_each() -> None:
    def read(value: Any) -> Placement:
        return Placement.parse(json.dumps(value), layers=LAYERS, num_experts=3, num_ranks=2)

    assert read({"owners": [1, 0, 1]}).owners == ((1, 0, 1),) * 3
    assert read({"owners": {"1": [0, 0, 0], "2": [1, 1, 1], "5": [0, 1, 0]}}).experts(1) == ((), (0, 1, 2), (1,))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 0, 1], 'it is no JSON object with "owners"'),
        ({"owners": {"1": [0, 0, 1]}}, "its owners are not those of the MoE layers 1 to 5"),
        ({"owners": [0, 1]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 1, 2]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 1, True]}, "layer 1 does not name one of 2 ranks for each of 3 experts"),
        ({"owners": [0, 0, 0]}, "rank 1 owns no expert"),
    ],
)
def test_a_file_that_places_nothing_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Placement.parse(json.dumps(value), layers=LAYERS, num_experts=3, num_ranks=2)
    with pytest.raises(ValueError, match="no JSON object"):
        Placement.parse("[" * 100_000, layers=LAYERS, num_experts=3, num_ranks=2)


@pytest.mark.parametrize("placed", [WHOLE, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_other_sizes_move_no_more_than_they_must(placed: Placement, size: int) -> None:
    after = placed.resized(size)
    assert after.ranks == tuple(range(size))
    before = max(placed.ranks) + 1
    for then, now in zip(placed.owners, after.owners, strict=True):
        moved = [(a, b) for a, b in zip(then, now, strict=True) if a != b]
        if size <= before:
            assert all(a >= size > b for a, b in moved), "only what has to"
            assert all(owner < size for owner in now)
        else:
            assert all(b >= before for _, b in moved), "only to ranks that come"
            counts = [now.count(rank) for rank in range(size)]
            assert min(counts[before:]) >= max(counts) - 1, counts


def test_there_and_back_again_is_even() -> None:
    back = WHOLE.resized(6).resized(3)
    assert {row.count(rank) for row in back.owners for rank in range(3)} == {4}
    assert WHOLE.resized(3) == WHOLE


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "at least 1 rank, got 0"), (13, "13 ranks for 12 experts per layer: every rank must own one")],
)
def test_sizes_that_cannot_be(size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WHOLE.resized(size)
