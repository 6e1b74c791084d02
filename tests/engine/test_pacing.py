"""The estimate of a step's duration from the steps before it."""

import math

import pytest

from moeyard_worker.engine.loop.pacing import Pacing
from moeyard_worker.exchange.base import PeerRows

PLANS = 0.001


def rows(*counts: int) -> PeerRows:
    return PeerRows(max(counts), counts, counts)


def ran(pacing: Pacing, peers: PeerRows, *seconds: float) -> None:
    for each in seconds:
        pacing.launched(peers, seconds=PLANS, now=0.0)
        pacing.completed(each, now=0.0)


def guess(pacing: Pacing, peers: PeerRows) -> float:
    """Return the expected seconds of a step from its launch, less planning, or -inf if the step is due at once."""
    pacing.launched(peers, seconds=PLANS, now=PLANS)
    due = pacing.due(PLANS)
    pacing.completed(None, now=0.0)
    return due + 1.5 * PLANS + 0.002


def test_due_at_once_without_measurements() -> None:
    pacing = Pacing()
    assert guess(pacing, rows(4096, 0)) == -math.inf
    ran(pacing, rows(4096, 0), 0.07)
    assert guess(pacing, rows(4096, 0)) == pytest.approx(0.07)
    # A device without a clock gives no estimate.
    other = Pacing()
    other.launched(rows(8), seconds=PLANS, now=0.0)
    other.completed(None, now=0.0)
    assert guess(other, rows(8)) == -math.inf


@pytest.mark.parametrize(
    ("asked", "share"),
    [
        (rows(4096, 0), 1.0),
        (rows(6000, 0), 1.0),
        (rows(0, 4096), 1.0),  # on either rank
        (rows(4096, 4096), 1.0),
        (rows(3072, 0), 0.75),
        (rows(1024, 1024), 0.25),
        (rows(32000, 0), 1.0),
        (rows(1000, 0), 1000 / 4096),
    ],
)
def test_new_size_gets_a_lower_bound(asked: PeerRows, share: float) -> None:
    """Prompts have any length, so two steps rarely have the same size."""
    pacing = Pacing()
    ran(pacing, rows(4096, 0), 0.08)
    assert guess(pacing, asked) == pytest.approx(0.08 * share)


def test_most_similar_steps_give_the_estimate() -> None:
    pacing = Pacing()
    for count, seconds in ((2048, 0.036), (2300, 0.040), (3900, 0.066), (4000, 0.068)):
        ran(pacing, rows(count), *[seconds] * 4)
    assert guess(pacing, rows(2060)) == pytest.approx(0.036)
    assert guess(pacing, rows(4050)) == pytest.approx(0.068)
    # The largest rank has as many rows, but the experts compute more rows in total.
    ran(pacing, rows(4000, 4000, 4000, 4000), *[0.09] * 4)
    assert guess(pacing, rows(4010, 4010, 4010, 4010)) == pytest.approx(0.09)
    assert guess(pacing, rows(4010, 0, 0, 0)) == pytest.approx(0.068)


def test_shortest_of_the_last_four_counts() -> None:
    """A step that compiled kernels took longer. Later steps replace it."""
    pacing = Pacing()
    ran(pacing, rows(512), 0.02, 1.5, 0.021, 0.03, 0.022)
    assert guess(pacing, rows(512)) == pytest.approx(0.021)


def test_decode_steps_do_not_replace_prompts() -> None:
    pacing = Pacing()
    ran(pacing, rows(8192), 0.15)
    ran(pacing, rows(8), *[0.012] * 100)
    assert guess(pacing, rows(8192)) == pytest.approx(0.15)
    assert guess(pacing, rows(8)) == pytest.approx(0.012)
    # The nearest known size gives the estimate of an unknown one.
    assert guess(pacing, rows(64)) == pytest.approx(0.012)
    assert guess(pacing, rows(3000)) == pytest.approx(0.15 * 3000 / 8192)


def test_due_time_follows_steps_in_flight() -> None:
    pacing = Pacing()
    ran(pacing, rows(1024), 0.03)
    pacing.launched(rows(1024), seconds=PLANS, now=0.0)
    pacing.launched(rows(1024), seconds=PLANS, now=0.01)
    assert pacing.due(0.01) == pytest.approx(0.059 - 1.5 * PLANS - 0.002)
    # The first step ends later than expected.
    pacing.completed(0.035, now=0.036)
    assert pacing.due(0.036) == pytest.approx(0.066 - 1.5 * PLANS - 0.002)
    # The remaining time is not worth a wait.
    assert pacing.due(0.06) == -math.inf
    pacing.clear()
    assert pacing.due(0.036) == -math.inf
