"""A Ray that starts slowly or never, played without daemons."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray._private import services

from moeyard.fleet.messages import FleetLost
from moeyard.fleet.ray import start
from moeyard.fleet.ray.config import LOCAL_ENVIRONMENT, START_SECONDS
from moeyard.fleet.ray.start import connect, when_registered


class Slow:
    """A node that registers after `seconds`, on a clock that only waiting moves."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.said: list[str] = []

    def ask(self, *_: str) -> str:
        if self.now < self.seconds:
            raise RuntimeError("no node info")
        return "node"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, alive: Callable[[], bool] = lambda: True) -> Any:
        return when_registered(self.ask, alive=alive, stage=self.said.append, clock=lambda: self.now, sleep=self.sleep)


def test_slow_start_is_awaited_and_reported_once() -> None:
    quick = Slow(20.0)
    assert (quick.wait(), quick.said) == ("node", [])
    slow = Slow(START_SECONDS - 1)
    assert slow.wait() == "node"
    assert len(slow.said) == 1
    assert f"waiting for it, up to {START_SECONDS:.0f} s" in slow.said[0]


def test_endless_start_has_advice() -> None:
    with pytest.raises(FleetLost, match=r"^Ray has not started after 18\d s: .*end what else runs.*; see /\S+logs$"):
        Slow(float("inf")).wait()
    dead = Slow(float("inf"))
    with pytest.raises(FleetLost, match=r"^Ray cannot start: its raylet has ended; .*`moeyard doctor`"):
        dead.wait(alive=lambda: dead.now < 1)
    assert dead.now < 2


def test_ray_init_waits_inside_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's loop gives up after 30 s, but its query does not return before the node exists."""
    slow = Slow(60.0)
    monkeypatch.setattr(services, "get_node", slow.ask)
    monkeypatch.setattr(start, "raylet_lives", lambda: True)
    monkeypatch.setattr(start.time, "monotonic", lambda: slow.now)
    monkeypatch.setattr(start, "run_apart", lambda call: call())
    waits = when_registered.__kwdefaults__
    monkeypatch.setitem(waits, "sleep", slow.sleep)
    monkeypatch.setitem(waits, "clock", lambda: slow.now)
    found = []
    monkeypatch.setattr(ray, "init", lambda **_: found.append(services.get_node("address", "id")))
    connect(None, num_workers=1, stage=slow.said.append)
    assert found == ["node"]
    assert len(slow.said) == 1
    assert services.get_node == slow.ask
    assert float(LOCAL_ENVIRONMENT["RAY_gcs_server_port_wait_time_s"]) == START_SECONDS


@pytest.mark.parametrize(
    ("address", "says"),
    [(None, "Ray cannot start: The current node timed out.*; see /"), ("host:1", "cannot join Ray at host:1: The cur")],
)
def test_any_error_of_ray_is_one_line(address: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nTraceback of many lines")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(start, "run_apart", lambda call: call())
    with pytest.raises(FleetLost, match=f"^{says}") as raised:
        connect(address, num_workers=1, stage=lambda _: None)
    assert len(str(raised.value).splitlines()) == 1
