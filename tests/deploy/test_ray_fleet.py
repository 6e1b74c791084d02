"""The end of a fleet on Ray, as far as it needs no Ray."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.limits import HANG_SECONDS

from moeyard import ray_fleet
from moeyard.logs import LogConfig
from moeyard.rank import Event, FleetLost, RanksLost, Recovered, Unrecoverable
from moeyard.ray_fleet import RayFleet
from moeyard.ray_guard import STUCK_SECONDS, Guard
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.sockets import make_keys

# In a process of its own: whatever descends from one that ends its fleet ends with it.
END = """
from multiprocessing import resource_tracker

from moeyard import ray_fleet
from moeyard.logs import LogConfig
from moeyard.ray_fleet import RayFleet
from moeyard.ray_guard import STUCK_SECONDS, Guard
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.sockets import make_keys

ray_fleet.STOP_SECONDS = 1e6
resource_tracker.ensure_running()  # as a router's process does that is started
fleet = RayFleet(
    EngineConfig(model_path="/nowhere"), LogConfig(), address=None, worker_host=None, metrics_port_base=0,
    keys=make_keys(), placement=Placement.of_shards((1,), partition(2, 1)),
)
fleet.stop()
"""


def test_the_end_does_not_wait_for_what_ends_with_the_process() -> None:
    """Python's tracker of shared resources is there as long as we are; other processes get `STOP_SECONDS`."""
    subprocess.run([sys.executable, "-c", END], timeout=HANG_SECONDS, check=True)


class Played:
    """A fleet of two ranks on a private Ray that is played here; `did` is what was done to its parts, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.dead: str | None = None  # the daemon that has ended
        self.fails: Exception | None = None  # of the next start of Ray
        self.fleet = RayFleet(
            EngineConfig(model_path="/nowhere", num_workers=2), LogConfig(), address=None, worker_host=None,
            metrics_port_base=0, keys=make_keys(), placement=Placement.of_shards((1,), partition(2, 2)),
        )  # fmt: skip
        parts: Any = self.fleet
        parts._local = SimpleNamespace(
            ended=lambda: self.dead, kill=self.note("kill"), find=lambda: None, kill_stopped=lambda **given: []
        )
        parts._ranks = SimpleNamespace(
            size=2,
            starting=True,
            serving=(),
            forget=self.note("forget"),
            recover=self.recover,
            events=lambda seconds: [],
        )
        parts._places = SimpleNamespace(reserve=lambda **given: self.did.append("reserve"))
        monkeypatch.setattr(ray_fleet, "connect", self.connect)
        monkeypatch.setattr(ray_fleet.ray, "shutdown", self.note("shutdown"))

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.did.append(what)

    def connect(self, address: None, **given: Any) -> None:
        self.did.append("connect")
        if self.fails is not None:
            raise self.fails
        self.dead = None

    def recover(self, dead: Any, *, whole: bool) -> Recovered:
        self.did.append(f"recover {sorted(dead)}")
        return Recovered(ranks=(), losses=())


AGAIN = ["kill", "forget", "shutdown", "connect", "reserve"]


def test_with_the_raylet_all_ranks_are_lost_and_ray_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    assert played.fleet.events(0.0) == []
    played.dead = "raylet"
    reason = "Ray's raylet has ended, and all ranks with it"
    assert played.fleet.events(0.0) == [Event(rank=0, reason=reason), Event(rank=1, reason=reason)]
    with pytest.raises(RanksLost, match=r"^Ray's raylet has ended$") as lost:
        played.fleet.admit()
    assert lost.value.ranks == {0, 1}
    played.fleet.recover([0, 1])
    assert played.did == [*AGAIN, "recover [0, 1]"]
    assert played.fleet.events(0.0) == []


def test_without_rays_head_ranks_serve_until_one_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(monkeypatch)
    played.dead = "gcs_server"
    for _ in range(2):
        assert played.fleet.events(0.0) == []
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is said once"
    played.fleet.recover([1])
    assert played.did == [*AGAIN, "recover [1]"]
    played.fleet.recover([1])
    assert played.did[6:] == ["recover [1]"], "Ray lives"


def test_where_ray_does_not_start_again_the_fleet_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.dead, played.fails = "raylet", FleetLost("Ray cannot start: no memory")
    with pytest.raises(Unrecoverable, match=r"^Ray's raylet has ended, and Ray cannot start: no memory$"):
        played.fleet.recover([0, 1])


def test_a_call_that_a_dead_daemon_holds_up_is_told() -> None:
    """Ray waits for its head for ever. A call that looks after itself ends soon, and is no such thing."""
    told: list[str] = []
    dead: list[str] = []
    local: Any = SimpleNamespace(ended=lambda: dead[0] if dead else None, kill_stopped=lambda **given: [])
    guard = Guard(local, starting=lambda: True, serving=tuple)
    guard.on_stuck = told.append
    with guard.call():
        guard.look(0.0)
        guard.look(1000.0)
        dead.append("gcs_server")
        guard.look(1001.0)
        guard.look(1001.0 + STUCK_SECONDS)
    guard.look(1002.0 + STUCK_SECONDS)
    assert told == [], "it has ended"
    with guard.call():
        guard.look(2000.0)
        guard.look(2000.0 + STUCK_SECONDS)
        assert told == []
        guard.look(2000.1 + STUCK_SECONDS)
    assert told == ["Ray's gcs_server has ended, and Ray's own code waits for it"]
