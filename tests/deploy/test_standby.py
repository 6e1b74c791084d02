"""Standby processes that replace lost ranks: which are used, and their use by a real fleet."""

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
    """The used part of the module; calls are the actors themselves."""

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
    """A standby pool that has started its processes, which are now in these states."""

    def make() -> Any:
        made.append(Actor("ready"))
        return made[-1]

    kept = Standby(make, count)
    kept.fill()
    for actor, state in zip(made, states, strict=True):
        actor.state = state
    return kept


def test_no_standby_without_the_flag(made: list[Actor]) -> None:
    assert keeping(0, made).take() is None
    assert not made


@pytest.mark.parametrize("state", ["ready", "importing"])
def test_standby_is_taken_once_and_refilled_on_request(made: list[Actor], state: str) -> None:
    kept = keeping(1, made, state)
    assert kept.take() is made[0]
    assert kept.take() is None
    kept.fill()
    kept.fill()
    assert len(made) == 2
    assert kept.take() is made[1]


@pytest.mark.parametrize("state", ["gone", "hanging"])
def test_standby_that_does_not_answer_is_not_taken(made: list[Actor], state: str) -> None:
    kept = keeping(2, made, state, "ready")
    assert kept.take() is made[1]
    assert made[0].killed
    assert not made[1].killed


def test_restart_waits_for_a_standby(made: list[Actor]) -> None:
    """The caller gets the error of a failed one, and does not wait after one was taken."""
    kept = keeping(1, made, "importing")
    assert not kept.ready()
    made[0].state = "ready"
    assert kept.ready()
    made[0].state = "gone"
    with pytest.raises(RayActorError):
        kept.ready()
    assert kept.take() is None
    assert kept.ready()


def test_all_standbys_are_ended(made: list[Actor]) -> None:
    """This also gives the next ones the current code."""
    kept = keeping(2, made, "ready", "importing")
    kept.stop()
    assert all(each.killed for each in made)
    assert kept.take() is None


@pytest.mark.slow
def test_standby_replaces_a_lost_rank(command: Callable[..., Command]) -> None:
    """The only rank is lost under a stream, which continues; another standby starts, and all stop cleanly."""
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
    (incident,) = served.incidents()
    assert list(incident["launcher"]["parts"]) == ["losses", "processes", "meeting", "experts", "rejoining"]
    served.process.terminate()
    served.check_end(0)


@pytest.mark.slow
def test_restart_waits_for_a_standby_without_room_for_two(command: Callable[..., Command]) -> None:
    """Its metrics port is in use, like a GPU's memory: a standby with current code exists before the rank ends."""
    words = ("--standby", "1", "--metrics-port-base", str(free_port()), "--served-model-name", "demo")
    served = command("serve", DEMO, "--workers", "1", "--port", "0", *words)
    served.wait_ready()
    served.wait_for(lambda: len(served.workers()) == 2)
    before = {process.pid for process in served.workers()}
    result = served.run("restart")
    assert result.returncode == 0, result
    assert "rank 0: its next process starts" in result.stderr
    served.wait_for(lambda: len(served.workers()) == 2)
    assert not before & {process.pid for process in served.workers()}, "the standby with the old code must be replaced"
    (incident,) = served.incidents()
    assert incident["planned"]
    # Importing torch took longer before the rank ended than the wait afterwards.
    ahead = incident["when"] - served.ranks()[0].create_time()
    assert incident["launcher"]["parts"]["processes"] < ahead, served.report("slow")
    served.process.terminate()
    served.check_end(0)
