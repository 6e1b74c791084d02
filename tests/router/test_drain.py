"""Retry-After: from the rate at which sequences ended, within its bounds."""

import pytest

from moeyard_router.fleet.capacity import LEAST, MOST, UNKNOWN, WINDOW, DrainRate, retry_after


def steady(per_second: float, seconds: float, *, start: float = 100.0) -> DrainRate:
    rate = DrainRate(start)
    for i in range(1, round(per_second * seconds) + 1):
        rate.left(start + i / per_second)
    return rate


@pytest.mark.parametrize("seconds", [2.0, 10.0, 300.0])
@pytest.mark.parametrize("per_second", [2.0, 50.0])
def test_steady_rate_for_any_observation_time(per_second: float, seconds: float) -> None:
    measured = steady(per_second, seconds).per_second(100.0 + seconds)
    assert measured == pytest.approx(per_second, rel=0.3 if per_second * seconds < 10 else 0.05)


def test_a_rate_falls_when_nothing_ends() -> None:
    rate = steady(10.0, 300.0)
    assert rate.per_second(400.0 + WINDOW) == pytest.approx(10.0 / 2.718, rel=0.02)
    assert rate.per_second(400.0 + 20 * WINDOW) < 1e-6


def test_token_amounts_count() -> None:
    rate = DrainRate(0.0)
    for second in range(1, 121):
        rate.left(float(second), 1000.0)
    assert rate.per_second(120.0) == pytest.approx(1000.0, rel=0.05)


def test_nothing_has_ended_yet() -> None:
    assert DrainRate(5.0).per_second(5.0) == 0.0
    assert DrainRate(5.0).per_second(50.0) == 0.0


@pytest.mark.parametrize(
    ("missing", "per_second", "seconds"),
    [(10, 2.0, 5.0), (1, 100.0, LEAST), (1000, 1.0, MOST), (1, 0.0, UNKNOWN), (3, 1e-9, UNKNOWN)],
)
def test_retry_after(missing: float, per_second: float, seconds: float) -> None:
    assert retry_after(missing, per_second) == seconds
