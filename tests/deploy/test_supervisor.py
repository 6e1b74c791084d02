"""A worker that ends: started again while there is a restart left, then failed for good, whoever noticed first."""

from collections.abc import Callable

import pytest

from moeyard.rank import Rank
from moeyard.supervisor import RestartBudget, Supervisor

NEW = [Rank(rank=0, frontend="tcp://new", metrics_url="http://new", report={})]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Notes what it was told; `refusals` are what the next restarts say."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusals: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def restart(self) -> list[Rank]:
        self.calls.append("restart")
        if self.refusals:
            raise ValueError(self.refusals.pop(0))
        return NEW


class Desk:
    """A supervisor with everything about it."""

    def __init__(self, num_workers: int = 1, limit: int = 2) -> None:
        self.clock, self.fleet = Clock(), Fleet()
        self.replaced: list[list[Rank]] = []
        self.then: list[Callable[[], None]] = []
        self.supervisor = Supervisor(
            self.fleet,
            num_workers=num_workers,
            replace=self._replace,
            budget=RestartBudget(limit, 60.0),
            clock=self.clock,
        )

    def _replace(self, ranks: list[Rank], then: Callable[[], None]) -> None:
        self.replaced.append(ranks)
        self.then.append(then)


def test_budget_counts_within_its_window() -> None:
    budget = RestartBudget(2, 60.0)
    assert [budget.take(t) for t in (0.0, 10.0, 59.0, 60.0, 61.0, 70.0)] == [True, True, False, True, False, True]
    assert budget.used(125.0) == 1
    assert budget.used(1000.0) == 0


def test_a_worker_that_ends_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.supervisor.ended(0, "rank 0: logits of step 9 are not finite: request r1")
    assert desk.fleet.calls == ["restart"]
    assert desk.replaced == [NEW]
    assert desk.supervisor.failure is None
    first, second, third = caplog.messages
    assert first == "worker 0 ended: rank 0: logits of step 9 are not finite: request r1"
    assert second == "starting worker 0 again (1 of 2 in 1 min)"
    assert third.startswith("worker 0 is there again after ")


def test_a_worker_that_the_router_has_lost_is_ended_first(caplog: pytest.LogCaptureFixture) -> None:
    """It may be there and silent; its end is noticed and named by what the router said."""
    desk = Desk()
    desk.supervisor.failed("worker 0 at tcp://old is gone: its connection broke")
    assert desk.fleet.calls == ["kill"]
    desk.supervisor.ended(0, "The actor died unexpectedly")
    assert desk.fleet.calls == ["kill", "restart"]
    assert "worker 0 ended: worker 0 at tcp://old is gone" in caplog.text


def test_the_router_may_be_late() -> None:
    """What it says of the old worker must not end the new one, until it has that."""
    desk = Desk()
    desk.supervisor.ended(0, "fault")
    desk.supervisor.failed("worker 0 is gone")
    assert desk.fleet.calls == ["restart"]
    desk.then[0]()
    desk.supervisor.failed("worker 0 is gone once more")
    assert desk.fleet.calls == ["restart", "kill"]


def test_too_many_restarts_leave_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(limit=2)
    for number in range(3):
        desk.supervisor.ended(0, f"fault {number}")
        for then in desk.then:
            then()
    assert desk.fleet.calls == ["restart", "restart"]
    assert desk.supervisor.failure == "fault 2"
    assert "the fleet failed: fault 2; restart moeyard serve" in caplog.text
    caplog.clear()
    # The router says so too; it is said once, and nothing is killed that could tell more.
    desk.supervisor.failed("worker 0 failed: fault 2")
    assert desk.fleet.calls == ["restart", "restart"]
    assert caplog.messages == []


def test_restarts_come_back_with_time() -> None:
    desk = Desk(limit=1)
    desk.supervisor.ended(0, "fault")
    desk.then[0]()
    desk.clock.now += 61.0
    desk.supervisor.ended(0, "fault")
    assert desk.fleet.calls == ["restart", "restart"]
    assert desk.supervisor.failure is None


def test_a_start_that_fails_takes_a_restart_too(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(limit=2)
    desk.fleet.refusals = ["no memory", "still no memory"]
    desk.supervisor.ended(0, "fault")
    assert desk.fleet.calls == ["restart", "restart"]
    assert desk.supervisor.failure == "worker 0 could not be started again: still no memory"
    assert desk.replaced == []
    assert "could not be started again: no memory" in caplog.text


def test_one_of_several_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(num_workers=2)
    desk.supervisor.ended(1, "killed")
    desk.supervisor.failed("rank 1 silent at step 7")
    assert desk.fleet.calls == []
    assert desk.supervisor.failure == "rank 1 silent at step 7"
    err = caplog.text
    assert "worker 1 ended: killed" in err
    assert "the fleet failed: rank 1 silent at step 7; if it was only slow, raise --step-deadline" in err
