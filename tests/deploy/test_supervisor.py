"""Ranks that are lost: replaced, also those lost meanwhile, and given up when that does not help."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from moeyard.rank import Event, FleetError, Rank, RanksLost, Recovered, Unrecoverable
from moeyard.restart_budget import RestartBudget
from moeyard.supervisor import Supervisor


def loss(rank: int, *lost: int, reason: str = "rank 1 lost at step 9, plan") -> Event:
    """A survivor's word."""
    return Event(rank=rank, reason=reason, loss={"rank": rank, "ranks": lost, "reason": reason, "steps": 9})


class Fleet:
    """Says the `heard` events, notes what it is told to replace, and answers with the `answers` in turn."""

    def __init__(self) -> None:
        self.heard: list[list[Event]] = []
        self.replaced: list[set[int]] = []
        self.answers: list[Exception] = []
        self.losses: tuple[dict[str, Any], ...] = ()
        self.ends: dict[int, str] = {}

    def end_of(self, rank: int) -> str | None:
        return self.ends.get(rank)

    def events(self, timeout: float) -> list[Event]:
        return self.heard.pop(0) if self.heard else []

    def recover(self, dead: Collection[int], *, whole: bool) -> Recovered:
        assert not whole, "nobody asked for it"
        self.replaced.append(set(dead))
        if self.answers:
            raise self.answers.pop(0)
        ranks = tuple(Rank(rank=r, frontend=f"tcp://{r}", metrics_url="", report={}) for r in range(3))
        return Recovered(ranks=ranks, losses=self.losses, seconds={"processes": 0.25})


class Desk:
    """A supervisor with everything about it; `turn` is one round of its thread."""

    def __init__(self, limit: int = 3) -> None:
        self.now = 100.0
        self.fleet = Fleet()
        self.handed: list[dict[str, Any]] = []
        self.given_up: list[str] = []
        self.supervisor = Supervisor(
            self.fleet,
            replace=self._replace,
            give_up=self.given_up.append,
            limit=limit,
            window=60.0,
            clock=lambda: self.now,
        )

    def _replace(self, ranks: Sequence[Rank], incident: dict[str, Any]) -> None:
        assert [rank.rank for rank in ranks] == [0, 1, 2]
        self.handed.append(incident)

    def turn(self, *events: Event) -> None:
        self.fleet.heard.append(list(events))
        incident = self.supervisor.listen()
        if incident is not None:
            self.supervisor.recover(incident)


def test_budget_counts_within_its_window() -> None:
    budget = RestartBudget(2, 60.0)
    assert [budget.take(t) for t in (0.0, 10.0, 59.0, 60.0, 61.0, 70.0)] == [True, True, False, True, False, True]
    assert budget.used(125.0) == 1
    assert budget.used(1000.0) == 0


def test_nothing_happens_where_nobody_is_lost() -> None:
    desk = Desk()
    desk.turn()
    assert desk.fleet.replaced == []


def test_whoever_ended_is_replaced_and_named_by_the_survivors(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    told = loss(0, 1).loss
    assert told is not None
    desk.fleet.losses = (told,)
    desk.turn(Event(rank=1, reason="the process of rank 1 has ended"))
    assert desk.fleet.replaced == [{1}]
    (incident,) = desk.handed
    assert incident == {
        "reason": "rank 1 lost at step 9, plan",
        "lost": [{"rank": 1, "reason": "the process of rank 1 has ended", "process": None}],
        "seconds": 0.0,
        "reports": [told],
        "parts": {"processes": 0.25},
    }
    first, second = caplog.messages
    assert first == "lost rank 1: the process of rank 1 has ended; replacing"
    assert second == "the fleet is whole again 0.0 s after rank 1 lost at step 9, plan (processes 0.2 s)"


def test_a_rank_that_peers_miss_is_replaced_though_its_process_is_there() -> None:
    desk = Desk()
    desk.turn(loss(0, 1), loss(2, 1))
    assert desk.fleet.replaced == [{1}]


def test_a_rank_that_the_router_misses_is_replaced() -> None:
    desk = Desk()
    desk.supervisor.lost(2, "worker 2 does not answer")
    desk.turn()
    assert desk.fleet.replaced == [{2}]
    assert desk.handed[0]["reason"] == "worker 2 does not answer"


def test_what_a_rank_says_itself_names_its_end_though_the_router_was_first(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.supervisor.lost(2, "worker 2 is gone: its connection broke")
    desk.fleet.heard = [[], [Event(rank=2, reason="rank 2: logits of step 7 are not finite")]]
    incident = desk.supervisor.listen()
    assert incident is not None
    desk.supervisor.recover(incident)
    assert desk.handed[0]["reason"] == "rank 2: logits of step 7 are not finite"
    assert caplog.messages[0] == "lost rank 2: rank 2: logits of step 7 are not finite; replacing"
    assert desk.fleet.heard == []


def test_ranks_lost_meanwhile_are_replaced_too(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.fleet.answers = [RanksLost([0], "worker 0 did not answer within 20 s"), RanksLost([0, 2], "no memory")]
    desk.turn(Event(rank=1, reason="gone"))
    assert desk.fleet.replaced == [{1}, {0}, {0, 2}]
    assert [each["rank"] for each in desk.handed[0]["lost"]] == [0, 1, 2]
    assert len(desk.handed) == 1
    assert "lost rank 0, rank 2: gone; replacing" in caplog.text


def test_what_the_router_said_of_those_that_were_replaced_is_forgotten() -> None:
    desk = Desk()
    recover = desk.fleet.recover

    def late(dead: Collection[int], *, whole: bool) -> Recovered:
        desk.supervisor.lost(1, "worker 1 is gone")
        return recover(dead, whole=whole)

    desk.fleet.recover = late  # type: ignore[method-assign]
    desk.turn(Event(rank=1, reason="gone"))
    desk.turn()
    assert desk.fleet.replaced == [{1}]


def test_the_same_rank_lost_too_often_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(limit=3)
    for number in range(3):
        desk.now += 10.0
        desk.turn(Event(rank=1, reason=f"fault {number}"))
    assert desk.fleet.replaced == [{1}, {1}]
    assert desk.given_up == [desk.supervisor.failure] == ["rank 1 was lost 3 times in 60 s: fault 2"]
    assert "the fleet has failed: rank 1 was lost 3 times in 60 s: fault 2" in caplog.text


def test_different_ranks_and_time_do_not_add_up() -> None:
    desk = Desk(limit=2)
    for rank in (0, 1, 2):
        desk.turn(Event(rank=rank, reason="gone"))
    desk.now += 61.0
    desk.turn(Event(rank=0, reason="gone"))
    assert desk.fleet.replaced == [{0}, {1}, {2}, {0}]
    assert desk.given_up == []


def test_replacements_that_fail_count() -> None:
    desk = Desk(limit=3)
    desk.fleet.answers = [RanksLost([1], "no memory"), RanksLost([1], "still no memory")]
    desk.turn(Event(rank=1, reason="gone"))
    assert desk.given_up == ["rank 1 was lost 3 times in 60 s: still no memory"]
    assert desk.handed == []


def test_replacements_that_take_long_to_fail_count() -> None:
    """Each hangs for longer than the window."""
    desk = Desk(limit=3)
    recover = desk.fleet.recover

    def late(dead: Collection[int], *, whole: bool) -> Recovered:
        desk.now += 100.0
        return recover(dead, whole=whole)

    desk.fleet.recover = late  # type: ignore[method-assign]
    desk.fleet.answers = [RanksLost([1], "rank 1 gave no sign of life"), RanksLost([1], "rank 1 gave no sign of life")]
    desk.turn(Event(rank=1, reason="gone"))
    assert desk.given_up == ["rank 1 was lost 3 times without serving in between: rank 1 gave no sign of life"]
    assert desk.handed == []


def test_one_that_has_served_begins_again() -> None:
    desk = Desk(limit=3)
    for _ in range(4):
        desk.fleet.answers = [RanksLost([1], "it hangs")]
        desk.turn(Event(rank=1, reason="gone"))
        desk.now += 61.0
    assert desk.given_up == []
    assert len(desk.handed) == 4


def test_silence_has_advice(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(limit=1)
    desk.turn(loss(0, 1, reason="rank 1 silent at step 7, plan (5.0 s)"))
    assert "if it was only slow, raise --step-deadline" in caplog.text


def test_a_fleet_that_is_being_stopped_is_left_alone() -> None:
    desk = Desk()
    desk.fleet.answers = [FleetError("the fleet is being stopped")]
    desk.turn(Event(rank=1, reason="gone"))
    assert desk.handed == []
    assert desk.given_up == []


def test_where_nothing_can_be_replaced_it_ends_at_once() -> None:
    desk = Desk()
    desk.fleet.answers = [Unrecoverable("Ray's gcs_server has ended, and without it no rank can be started")]
    desk.turn(Event(rank=1, reason="gone"))
    said = "gone; Ray's gcs_server has ended, and without it no rank can be started"
    assert desk.given_up == [desk.supervisor.failure] == [said]


def test_how_a_process_ended_is_told_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(limit=2)
    desk.fleet.ends = {1: "process 4711 has ended; 0.4 s before it had 9 GiB"}
    desk.turn(Event(rank=1, reason="gone"))
    assert desk.handed[0]["lost"] == [{"rank": 1, "reason": "gone", "process": desk.fleet.ends[1]}]
    assert caplog.messages[0] == f"lost rank 1: gone; replacing; rank 1: {desk.fleet.ends[1]}"
    desk.turn(Event(rank=1, reason="gone again"))
    assert desk.given_up == [f"rank 1 was lost 2 times in 60 s: gone again; {desk.fleet.ends[1]}"]
