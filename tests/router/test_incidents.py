"""The records of what befell a fleet, at its end."""

import asyncio

from tests.router.test_fleet import config

from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics

REASON = "rank 0 was lost three times in 60 s"


def records(*events):
    """What is told of a fleet that these befell, one after the other."""

    async def play():
        fleet = Fleet(config(), RouterMetrics("m"))
        fleet.start()
        for event in events:
            event(fleet)
            fleet.validate()
        fleet.close()
        assert fleet.admission.incidents.open is None
        return fleet.admission.incidents.latest()

    return asyncio.run(play())


def lose(fleet):
    fleet._lose(1, "worker 1 is gone")


def give_up(fleet):
    fleet.give_up(REASON)


def test_giving_up_is_told_even_if_nothing_was_heard_before():
    """Whoever gives up may know of a loss before the router does."""
    (told,) = records(give_up)
    assert (told["state"], told["planned"], told["ranks"]) == ("failed", False, [])
    assert told["reason"] == told["failure"] == REASON
    assert [report["reason"] for report in told["reports"]] == [REASON]


def test_giving_up_ends_what_is_open():
    (told,) = records(lose, give_up)
    assert (told["state"], told["ranks"], told["failure"]) == ("failed", [1], REASON)
    assert told["reason"] == "worker 1 is gone"
    assert [report["reason"] for report in told["reports"]] == ["worker 1 is gone", REASON]


def test_what_is_heard_later_is_not_another():
    (told,) = records(give_up, lose, give_up)
    assert told["failure"] == REASON


def test_the_end_of_a_router_is_no_incident():
    assert records() == []
    (told,) = records(lose)
    assert told["failure"] == "the router has stopped"
