"""Processes that wait for the place of a rank that is lost: which are taken, and that a real fleet takes them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from tests.deploy.test_serve import (
    DEMO,
    LONG_ANSWER,
    Command,
    answer,
    command,
    free_port,
    get,
    stream_of,
    text_of,
)

from moeyard.fleet.ray import places
from moeyard.fleet.ray.places import Standby

__all__ = ["command"]  # the fixture


class Actor:
    """A process that is `importing`, `ready`, or `gone`."""

    def __init__(self, state: str) -> None:
        self.state, self.killed = state, False
        self.warm = SimpleNamespace(remote=lambda: self)


class Ray:
    """The used part of the module, on calls that are the actors themselves."""

    def wait(self, calls: list[Actor], *, timeout: float) -> tuple[list[Actor], list[Actor]]:
        return [each for each in calls if each.state != "importing"], []

    def get(self, calls: Actor | list[Actor], timeout: float | None = None) -> None:
        for each in calls if isinstance(calls, list) else [calls]:
            if each.state != "ready":
                raise RayActorError if each.state == "gone" else GetTimeoutError

    def kill(self, actor: Actor) -> None:
        actor.killed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    monkeypatch.setattr(places, "ray", Ray())
    return []


def keeping(count: int, made: list[Actor], *states: str) -> Standby:
    """One that has started as many as it keeps, and what has become of these."""

    def make() -> Any:
        made.append(Actor("ready"))
        return made[-1]

    kept = Standby(make, count)
    kept.fill()
    for actor, state in zip(made, states, strict=True):
        actor.state = state
    return kept


def test_none_where_none_is_kept(made: list[Actor]) -> None:
    assert keeping(0, made).take() is None
    assert not made


@pytest.mark.parametrize("state", ["ready", "importing"])
def test_one_is_taken_once_and_another_started_when_that_is_asked_for(made: list[Actor], state: str) -> None:
    kept = keeping(1, made, state)
    assert kept.take() is made[0]
    assert kept.take() is None
    kept.fill()
    kept.fill()
    assert len(made) == 2
    assert kept.take() is made[1]


@pytest.mark.parametrize("state", ["gone", "hanging"])
def test_one_that_answers_no_more_is_not_taken(made: list[Actor], state: str) -> None:
    kept = keeping(2, made, state, "ready")
    assert kept.take() is made[1]
    assert made[0].killed
    assert not made[1].killed


def test_who_restarts_a_rank_waits_for_it(made: list[Actor]) -> None:
    """And hears of one that cannot; one that was taken meanwhile keeps nobody."""
    kept = keeping(1, made, "importing")
    assert not kept.ready()
    made[0].state = "ready"
    assert kept.ready()
    made[0].state = "gone"
    with pytest.raises(RayActorError):
        kept.ready()
    assert kept.take() is None
    assert kept.ready()


def test_all_are_ended(made: list[Actor]) -> None:
    """Also so that those that come next have other code."""
    kept = keeping(2, made, "ready", "importing")
    kept.stop()
    assert all(each.killed for each in made)
    assert kept.take() is None


@pytest.mark.slow
def test_a_lost_rank_is_followed_by_who_waited(command: Callable[..., Command]) -> None:
    """The only one, under a stream, which goes on; then another waits, and all end in good order."""
    served = command("serve", DEMO, "--workers", "1", "--standby", "1", "--port", "0")
    served.wait_ready()
    served.wait_for(lambda: len(served.workers()) == 2)
    expected, rank = answer(served), served.ranks()[0]
    (waiting,) = (process for process in served.workers() if process != rank)
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        rank.kill()
        assert text_of([first, *lines]) == expected
    served.wait_for(lambda: len(served.workers()) == 2)
    assert served.ranks() == {0: waiting}
    (incident,) = get(f"{served.url}/v1/fleet/incidents").json()["incidents"]
    assert list(incident["launcher"]["parts"]) == ["losses", "processes", "meeting", "experts", "rejoining"]
    served.process.terminate()
    served.check_end(0)


@pytest.mark.slow
def test_a_restart_waits_for_it_where_two_cannot_be(command: Callable[..., Command]) -> None:
    """A port of its own is taken, as a GPU's memory is: one with the code of now is there before the rank is ended."""
    words = ("--standby", "1", "--metrics-port-base", str(free_port()), "--served-model-name", "demo")
    served = command("serve", DEMO, "--workers", "1", "--port", "0", *words)
    served.wait_ready()
    served.wait_for(lambda: len(served.workers()) == 2)
    before = {process.pid for process in served.workers()}
    told = served.run("restart")
    assert told.returncode == 0, told
    assert "rank 0: its next process starts" in told.stderr
    served.wait_for(lambda: len(served.workers()) == 2)
    assert not before & {process.pid for process in served.workers()}, "the one that waited had the code of before"
    (incident,) = get(f"{served.url}/v1/fleet/incidents").json()["incidents"]
    assert incident["planned"]
    # It had longer to import torch before the rank was ended than anybody waited for it afterwards.
    ahead = incident["when"] - served.ranks()[0].create_time()
    assert incident["launcher"]["parts"]["processes"] < ahead, served.report("slow")
    served.process.terminate()
    served.check_end(0)
