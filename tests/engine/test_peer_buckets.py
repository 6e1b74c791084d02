"""Which captured step runs with peers: it depends on a rank's own rows and on the most rows of any rank."""

from itertools import product

import pytest

from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.steps.graphs import smallest
from moeyard_worker.engine.steps.sizes import with_agreed_rows, with_peers

ROWS, WIDTHS, PROMPTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64), (8, 32, 128, 160), (64, 512, 2048, 8192)
OWN = [StepSize(sequences=rows, width=width) for rows, width in product(ROWS, WIDTHS)]
OWN += [
    StepSize(prompt=prompt, sequences=rows, width=160, chunks=16)
    for prompt, rows in product(PROMPTS, (0, 64))
    if prompt <= 2048 or not rows
]
MOST = 8192


def captured(own: list[StepSize]) -> dict[StepSize, StepSize]:
    """Return the sizes as the graph runner stores them, smallest first."""
    buckets = sorted(with_peers(own), key=lambda size: size.order)
    assert len(set(buckets)) == len(buckets)
    return {bucket: bucket for bucket in buckets}


@pytest.fixture(scope="module")
def graphs() -> dict[StepSize, StepSize]:
    return captured(OWN)


SIZES = [StepSize(width=0)]
SIZES += [StepSize(sequences=rows, width=width) for rows in (1, 3, 8, 9, 50, 64) for width in (1, 9, 140)]
SIZES += [
    StepSize(prompt=prompt, sequences=rows, width=9, chunks=2) for prompt in (5, 64, 300, 2048) for rows in (0, 7, 64)
]
SIZES += [StepSize(prompt=5000, width=9, chunks=2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_peer_load_has_a_captured_step(size: StepSize, graphs: dict[StepSize, StepSize]) -> None:
    # The size that a rank announces before it knows of its peers.
    own = smallest(graphs, size, 0)
    assert own is not None
    for others in (0, 1, 2, 8, 12, 16, 17, 64, 65, 128, 512, 513, 2048, 2112, 2113, MOST):
        most = max(own.rows, others)
        found = smallest(graphs, size, max(1, most))
        assert found is not None, f"{size} beside {others}"
        assert found.holds(size)
        assert found.rows <= max(1, most) <= found.peers, f"{found} beside {others}"
        assert bool(found.rows) == bool(size.rows)


def test_single_rank_gets_no_room_for_peers(graphs: dict[StepSize, StepSize]) -> None:
    for rows in ROWS:
        found = smallest(graphs, StepSize(sequences=rows, width=8), rows)
        assert found is not None
        assert (found.rows, found.peers, found.width) == (rows, rows, 8)


def test_peer_with_nine_rows_costs_some_room(graphs: dict[StepSize, StepSize]) -> None:
    eight, nine = StepSize(sequences=8, width=8), StepSize(sequences=9, width=8)
    brought = smallest(graphs, nine, 0)
    assert brought is not None
    assert brought.rows == 12
    found = smallest(graphs, eight, 12)
    assert found is not None
    assert (found.rows, found.peers) == (8, 16)


def test_decode_rows_with_a_mixed_peer_get_exact_room(
    graphs: dict[StepSize, StepSize],
) -> None:
    found = smallest(graphs, StepSize(sequences=8, width=8), 2048 + 64)
    assert found is not None
    assert (found.rows, found.peers) == (8, 2048 + 64)


def test_larger_steps_run_eager(graphs: dict[StepSize, StepSize]) -> None:
    for size in SIZES:
        assert smallest(graphs, size, MOST + 1) is None


def test_few_buckets_for_few_rows() -> None:
    own = [StepSize(sequences=rows, width=4) for rows in (1, 2)]
    assert {(b.rows, b.peers) for b in captured(own)} == {(0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}


def test_number_of_captured_steps_is_bounded(graphs: dict[StepSize, StepSize]) -> None:
    """Each capture lengthens the start."""
    assert len(graphs) < 3 * len(OWN)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 12, 16, 17, 48, 64])
def test_ranks_agree_on_the_room_for_peers(most: int) -> None:
    """Exchanged rows have one size for any rows and tables of the ranks, including none."""
    sizes = (1, 4, 16, 64)
    own = [bucket for bucket in OWN if not bucket.prompt]
    graphs = {b: b for b in sorted(with_agreed_rows(own, sizes), key=lambda size: size.order)}
    room = next(each for each in sizes if each >= most)
    for rows, width in [(0, 0), *product(range(1, most + 1), (1, 8, 9, 160))]:
        size = StepSize(sequences=rows, width=width)
        padded = smallest(graphs, size, 0)
        assert padded is not None
        found = smallest(graphs, size, max(most, padded.rows))
        assert found is not None
        assert (found.rows, found.holds(size)) == (padded.rows, True)
        assert found.peers == next(each for each in sizes if each >= max(most, padded.rows))
        assert found.peers == room or padded.rows > room
    assert smallest(graphs, StepSize(sequences=1, width=8), 65) is None
