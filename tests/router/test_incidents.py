"""Incident records at the end of a fleet."""

import asyncio

from tests.router.test_fleet import config

from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics

REASON = "rank 0 was lost three times in 60 s"


def records(*events):
    """Return the incident records of a fleet after these events, in order."""

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


def test_giving_up_is_recorded_without_an_earlier_event():
    """The caller may know of a loss before the router does."""
    (record,) = records(give_up)
    assert (record["state"], record["planned"], record["ranks"]) == ("failed", False, [])
    assert record["reason"] == record["failure"] == REASON
    assert [report["reason"] for report in record["reports"]] == [REASON]


def test_giving_up_closes_the_open_incident():
    (record,) = records(lose, give_up)
    assert (record["state"], record["ranks"], record["failure"]) == ("failed", [1], REASON)
    assert record["reason"] == "worker 1 is gone"
    assert [report["reason"] for report in record["reports"]] == ["worker 1 is gone", REASON]


def test_later_events_open_no_incident():
    (record,) = records(give_up, lose, give_up)
    assert record["failure"] == REASON


def test_router_exit_is_not_an_incident():
    assert records() == []
    (record,) = records(lose)
    assert record["failure"] == "the router has stopped"
