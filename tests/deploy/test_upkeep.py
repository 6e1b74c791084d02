"""Drains and restarts of ranks: their order, what is told of them, what stops them, and that losses go first."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from tests.deploy.desk import Asked, Desk

from moeyard.rank import Event, FleetError, Rank, RanksLost, Recovered
from moeyard.upkeep import Refused
from moeyard_router.fleet.orders import Drain


class Fleet:
    """Notes what is done to it in `log`; `beside`: next processes can start before the old ones have ended."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.beside = True
        self.starting: list[bool | Exception] = []  # what `prepared` says, in turn
        self.answers: list[Exception] = []  # of `recover`
        self.heard: list[list[Event]] = []
        self.whole: bool | None = None  # whether nobody was to take over

    def prepare(self, rank: int, changes: Mapping[str, Any]) -> bool:
        self.log.append(("prepare", rank, dict(changes)))
        return self.beside

    def prepared(self, rank: int) -> bool:
        said = self.starting.pop(0) if self.starting else True
        if isinstance(said, Exception):
            raise said
        return said

    def abandon(self, rank: int) -> None:
        self.log.append(("abandon", rank))

    def events(self, timeout: float) -> list[Event]:
        return self.heard.pop(0) if self.heard else []

    def end_of(self, rank: int) -> str | None:
        return None

    def recover(self, dead: Collection[int], *, whole: bool) -> Recovered:
        self.whole = whole
        self.log.append(("recover", *sorted(dead)))
        if self.answers:
            raise self.answers.pop(0)
        ranks = tuple(Rank(rank=r, frontend=f"tcp://{r}", metrics_url="", report={}) for r in range(3))
        return Recovered(ranks=ranks, losses=({"reason": "rank 1 lost at step 9, plan"},))


@pytest.fixture
def desk() -> Desk[Fleet]:
    return Desk(Fleet(), 3, held=2, limit=2)


def restart(desk: Desk[Fleet], *ranks: int, seconds: float = 30.0, **changes: Any) -> Asked:
    return desk.begin(lambda said: desk.upkeep.restart(ranks, seconds=seconds, changes=changes, say=said.append))


def drain(desk: Desk[Fleet], rank: int, *, seconds: float = 30.0) -> Asked:
    return desk.begin(lambda said: desk.upkeep.drain(rank, seconds=seconds, say=said.append))


def test_a_drain_lets_what_runs_end_and_carries_the_rest(desk: Desk[Fleet]) -> None:
    asked = drain(desk, 1)
    desk.turn()
    assert desk.orders[-1] == Drain(ranks=(1,), rank=1)
    desk.held[1] = 1
    desk.now += 29.9
    desk.turn()
    assert not desk.orders[-1].carry
    desk.now += 0.1
    desk.turn()
    assert desk.orders[-1] == Drain(ranks=(1,), rank=1, carry=True)
    assert str(asked.end()).startswith("rank 1 is drained: ")
    assert asked.said == ["rank 1 takes no new requests, and has 2", "rank 1: 1 of its 1 requests go on elsewhere"]
    assert desk.upkeep.drained == {1}
    assert [each[0] for each in desk.fleet.log] == ["carry"], "nothing is replaced"


def test_undrain_gives_it_back(desk: Desk[Fleet]) -> None:
    asked = drain(desk, 1, seconds=0)
    desk.turn()
    asked.end()
    assert desk.upkeep.undrain(1) == "rank 1 takes requests"
    desk.turn()
    assert desk.upkeep.drained == frozenset()
    assert desk.orders[-1] == Drain(ranks=(), rank=1)


@pytest.mark.parametrize("command", [drain, restart])
def test_undrain_also_stops_what_waits_for_the_fleet(desk: Desk[Fleet], command: Callable[..., Asked]) -> None:
    """Said last, it holds: the rank is not taken away as soon as the fleet is whole again."""
    desk.whole = False
    asked = command(desk, 1)
    desk.turn()
    assert asked.thread.is_alive()
    desk.upkeep.undrain(1)
    desk.turn()
    desk.whole = True
    for _ in range(3):
        desk.turn()
    assert "rank 1 was given back by `moeyard undrain`" in str(asked.end())
    assert desk.upkeep.drained == frozenset()
    assert desk.orders[-1] == Drain(ranks=(), rank=1)
    assert ("recover", 1) not in desk.fleet.log


def test_undrain_stops_nothing_that_is_asked_for_after_it(desk: Desk[Fleet]) -> None:
    desk.upkeep.undrain(1)
    asked = drain(desk, 1, seconds=0)
    desk.turn()
    assert not isinstance(asked.end(), Refused)
    assert desk.upkeep.drained == {1}


def test_one_rank_after_the_other_is_restarted(desk: Desk[Fleet], caplog: pytest.LogCaptureFixture) -> None:
    asked = restart(desk, seconds=0, threads=2)
    for _ in range(3):
        desk.turn()
    assert asked.end() == "ranks 0, 1 and 2 restarted in 0.0 s"
    steps = [[("prepare", r, {"threads": 2}), ("carry", r), ("leaves", r), ("recover", r)] for r in range(3)]
    assert desk.fleet.log == [step for each in steps for step in each]
    assert desk.upkeep.drained == frozenset()
    assert [incident["reason"] for _, incident in desk.handed] == [f"rank {rank} is restarted" for rank in range(3)]
    assert desk.fleet.whole, "nobody takes over who is back in a moment"
    assert all(incident["planned"] and not incident["reports"] for _, incident in desk.handed), "nobody is to blame"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_restarts_on_purpose_are_no_crash_loop(desk: Desk[Fleet]) -> None:
    for _ in range(5):
        asked = restart(desk, 1, seconds=0)
        desk.turn()
        assert not isinstance(asked.end(), Refused)
    assert desk.given_up == []


def test_nothing_is_taken_away_before_the_next_process_has_started(desk: Desk[Fleet]) -> None:
    desk.fleet.starting = [False, False]
    asked = restart(desk, 1, seconds=0)
    desk.turn()
    desk.turn()
    assert desk.upkeep.drained == frozenset()
    desk.turn()
    assert not isinstance(asked.end(), Refused)


def test_a_next_process_that_cannot_start_leaves_the_rank_as_it_was(desk: Desk[Fleet]) -> None:
    desk.fleet.starting = [True, FleetError("no module named moeyard_worker.engine")]
    asked = restart(desk, 0, 1, seconds=0)
    desk.turn()
    desk.turn()
    end = asked.end()
    assert isinstance(end, Refused)
    assert end.exit_code == 1
    assert str(end) == (
        "the next process of rank 1 does not start: no module named moeyard_worker.engine; it goes on as it was; "
        "rank 0 restarted before"
    )
    assert desk.fleet.log[-2:] == [("prepare", 1, {}), ("abandon", 1)]


def test_without_room_for_two_the_old_one_ends_first(desk: Desk[Fleet]) -> None:
    desk.fleet.beside = False
    desk.fleet.starting = [FleetError("it is not asked")]
    asked = restart(desk, 2, seconds=0)
    desk.turn()
    assert not isinstance(asked.end(), Refused)


def test_new_flags_that_fail_are_taken_back_and_counted_from_then_on(desk: Desk[Fleet]) -> None:
    desk.fleet.answers = [RanksLost([1], "--kv-memory is too small")]
    asked = restart(desk, 1, seconds=0, kv_memory=1)
    desk.turn()
    assert not isinstance(asked.end(), Refused)
    assert "rank 1: its new process failed; another starts with the flags as before" in asked.said
    assert desk.fleet.log[-3:] == [("recover", 1), ("abandon", 1), ("recover", 1)]
    desk.fleet.answers = [RanksLost([1], "and again"), RanksLost([1], "and again")]
    asked = restart(desk, 1, seconds=0)
    desk.turn()
    assert isinstance(asked.end(), Refused)
    assert desk.given_up == ["rank 1 was lost 2 times in 60 s: and again"]


def test_a_loss_goes_first(desk: Desk[Fleet]) -> None:
    """Of another rank: the drain goes on behind it. Of the rank itself: it has its new process."""
    asked = restart(desk, 1)
    desk.turn()
    desk.turn(Event(rank=0, reason="gone"))
    assert desk.fleet.log[-1] == ("recover", 0)
    assert desk.upkeep.drained == {1}, "which the routers are told with the new rank"
    desk.whole = False
    desk.now += 60.0
    desk.turn()
    assert ("carry", 1) not in desk.fleet.log, "it waits for the fleet"
    desk.whole = True
    desk.turn(Event(rank=1, reason="gone"))
    end = asked.end()
    assert not isinstance(end, Refused)
    assert "rank 1 was lost, and is replaced" in asked.said
    assert ("leaves", 1) not in desk.fleet.log
    desk.turn()
    assert desk.upkeep.drained == frozenset(), "a restart leaves nothing drained"


def test_undrain_ends_a_restart_that_has_not_replaced_yet(desk: Desk[Fleet]) -> None:
    asked = restart(desk, 1)
    desk.turn()
    desk.upkeep.undrain(1)
    desk.turn()
    end = asked.end()
    assert isinstance(end, Refused)
    assert str(end) == "rank 1 was given back by `moeyard undrain`; it goes on as it was"
    assert (desk.upkeep.drained, desk.fleet.log[-1]) == (frozenset(), ("abandon", 1))


def test_what_is_refused(desk: Desk[Fleet]) -> None:
    for rank in (-1, 3):
        with pytest.raises(Refused, match=r"there is no rank -?\d; this server has ranks 0, 1 and 2") as refused:
            desk.upkeep.drain(rank, seconds=1, say=print)
        assert refused.value.exit_code == 2
    asked = drain(desk, 0)
    desk.now += 7.0
    with pytest.raises(Refused, match="busy: rank 0 is being drained, for 7 s; wait for its end") as refused:
        desk.upkeep.restart([1], seconds=1, changes={}, say=print)
    assert refused.value.exit_code == 1
    desk.held = {0: 0, 1: 0, 2: 0}
    desk.turn()
    asked.end()
    second = drain(desk, 1)
    desk.turn()
    second.end()
    with pytest.raises(Refused, match="no other rank than 2 takes requests") as refused:
        desk.upkeep.drain(2, seconds=1, say=print)
    assert refused.value.exit_code == 2


def test_the_end_of_the_server_is_told(desk: Desk[Fleet]) -> None:
    asked = drain(desk, 0)
    desk.supervisor.stop()
    assert str(asked.end()) == "the server is stopping"
    with pytest.raises(Refused, match="the server is stopping"):
        desk.upkeep.drain(0, seconds=1, say=print)
