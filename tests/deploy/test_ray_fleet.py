"""The adapter between the fleet machine and Ray, on a fake Ray whose calls return the test's values."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError
from tests.limits import HANG_SECONDS

from moeyard.fleet.messages import FleetError, FleetLost, Refused
from moeyard.fleet.ray import fleet as adapter
from moeyard.fleet.ray import places
from moeyard.fleet.ray.fleet import ASK_SECONDS, FIRST_SIGN_SECONDS, SIGN_SECONDS, RayFleet
from moeyard.fleet.ray.processes import STUCK_SECONDS, Guard, LocalRay
from moeyard.fleet.routers import RouterProcesses
from moeyard.logs import LogConfig
from moeyard.signals import Interrupts
from moeyard_router.fleet.orders import Drain
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.sockets import make_keys

# In its own process, because a stopping fleet ends all descendants.
END = """
from multiprocessing import resource_tracker

from moeyard.fleet.ray import fleet as adapter
from moeyard.logs import LogConfig
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.sockets import make_keys

adapter.STOP_SECONDS = 1e6
resource_tracker.ensure_running()  # as a router's process does that is started
fleet = adapter.RayFleet(
    EngineConfig(model_path="/nowhere"), LogConfig(), address=None, worker_host=None, metrics_port_base=0,
    keys=make_keys(), placement=Placement.of_shards((1,), partition(2, 1)),
)
fleet.stop()
"""
# Ray's shutdown never returns, nor does the one that Ray runs at Python's exit.
STUCK_END = """
import atexit
import sys
import threading
from types import SimpleNamespace

from moeyard import entry


def hang():
    threading.Event().wait()


def run():
    try:
        exec(sys.argv[1])
    finally:
        adapter.LEAVE_SECONDS = 0.1
        adapter.ray.shutdown = hang
        atexit.register(hang)
        fleet.stop()
    return int(sys.argv[2])


exec(sys.argv[3].partition("fleet.stop()")[0])
entry.load = lambda module: SimpleNamespace(main=run)
sys.exit(entry.main())
"""
RANKS = 3
REPORT = {"max_model_len": 64, "expert_slots": 8, "held_bytes": 10, "loaded_bytes": 10, "seconds": {"weights": 0.1}}
FIRST_PID = 2**22 + 1  # no process has such a number


def test_stop_does_not_wait_for_the_resource_tracker() -> None:
    """Python's resource tracker lives as long as the process; other processes get `STOP_SECONDS`."""
    subprocess.run([sys.executable, "-c", END], timeout=HANG_SECONDS, check=True)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("", 130), ("raise SystemExit(2)", 2)], ids=["served", "interrupted", "failed"]
)
def test_stop_does_not_wait_for_ray(end: str, code: int) -> None:
    """A cluster's GCS may be stopped or gone. The exit code is that of the command."""
    command = [sys.executable, "-c", STUCK_END, end, str(code), END]
    done = subprocess.run(command, timeout=HANG_SECONDS, check=False, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == "Ray has not answered for 0.1 s; moeyard serve ends without it\n"


class Ref:
    """The result of a call, which may be pending."""

    def __init__(self, value: Any = None, *, done: bool = True) -> None:
        self.value, self.done = value, done

    def end(self, value: Any) -> None:
        self.value, self.done = value, True


class Actor:
    """A process: `calls` are the methods called on it; `waiting` is the last `wait`."""

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.rank, self.calls, self.waiting = number, rank, list[str](), Ref(done=False)
        self.says: dict[str, Ref] = {}  # in place of a method's result

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Ref:
            method = args[0] if name == "do" else name
            self.calls.append(method)
            if method == "wait":
                self.waiting = Ref(done=False)
                return self.waiting
            return self.says.get(method) or Ref(self._answer(method))

        return SimpleNamespace(remote=remote)

    def _answer(self, name: str) -> Any:
        place = {"node": "here", "pid": FIRST_PID + self.number, "began": 3}
        doors = {"frontend": f"tcp://{self.number}", "metrics_url": "", "mesh": {}}
        room = {"available": 10**9, "slot_bytes": 1, "all_resident": True, "movable": True}
        setup = {**doors, **place, "seconds": {"imports": 0.1}, "weights": {}}
        answers = {"setup": setup, "rebind": doors, "load": REPORT, "progress": (1, 1), "room": room, "alive": place}
        return answers.get(name)


class Ray:
    """The used part of the module."""

    def __init__(self) -> None:
        self.killed: list[Actor] = []

    def wait(self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float) -> tuple[list[Ref], list[Ref]]:
        done = [ref for ref in refs if ref.done][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def shutdown(self) -> None:
        pass


class Routers:
    """Records the calls of the launcher, and has no sequences."""

    def __init__(self) -> None:
        self.handed: list[list[int]] = []
        self.orders: list[Drain] = []
        self.given_up: list[str] = []

    def hand_over(self, ranks: Any, drained: Any, incident: Any) -> None:
        self.handed.append([rank.rank for rank in ranks if rank.frontend])

    def ordered(self, order: Drain) -> int:
        self.orders.append(order)
        return 0

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)


class PlayedFleet:
    """A fleet that serves. `actors` lists all actors by rank, the latest last."""

    def __init__(self, patch: pytest.MonkeyPatch, *, device: str = "cpu", **options: Any) -> None:
        self.now, self.dead, self.ray = 0.0, "", Ray()
        self.actors: dict[int, list[Actor]] = {rank: [] for rank in range(RANKS)}
        self.made, self.fenced, self.starts = 0, list[int](), list[Exception | None]()
        patch.setattr(adapter, "ray", self.ray)
        patch.setattr(places, "ray", self.ray)
        patch.setattr(adapter, "connect", self._connect)
        patch.setattr(adapter, "fence_process", lambda node, pid, began: self.fenced.append(pid))
        patch.setattr(adapter, "kill_process", lambda pid, began: self.fenced.append(pid))
        patch.setattr(adapter.time, "sleep", lambda seconds: None)
        self.fleet = RayFleet(
            EngineConfig(model_path="m", num_workers=RANKS, device=device),
            LogConfig(),
            **{
                **{"address": None, "worker_host": None, "metrics_port_base": 0, "keys": make_keys()},
                **{"placement": Placement.of_shards((1, 2), partition(12, RANKS)), "takeover": "always"},
                **{"clock": lambda: self.now, **options},
            },
        )
        self.parts: Any = self.fleet
        self.parts._local = SimpleNamespace(
            ended=lambda: self.dead or None, find=lambda: None, kill=lambda: None, kill_stopped=lambda **given: []
        )
        self.parts._places = SimpleNamespace(
            reserve=lambda **given: None,
            actor=self.make,
            give_back_from=lambda first: None,
            gpus=0,
            extend=lambda ranks, size: None,
        )
        self.parts._standby._make = self.make
        self.parts.guard.watch = lambda: None
        self.routers = Routers()
        self.progress: list[tuple[int, int]] = []

    def start(self) -> "PlayedFleet":
        self.fleet.start(lambda done, total: self.progress.append((done, total)), stage=print, interrupts=Interrupts())
        self.parts._routers = self.routers
        return self

    def make(self, rank: int = -1, *, beside: bool = False) -> Actor:
        self.made += 1
        actor = Actor(self.made, rank)
        self.actors.setdefault(rank, []).append(actor)
        return actor

    def _connect(self, address: None, **given: Any) -> None:
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error
        self.dead = ""

    def lose(self, rank: int) -> None:
        """End a rank's process; the others report it."""
        for made in self.actors.values():
            if made and not made[-1].waiting.done:
                loss = {"rank": made[-1].rank, "ranks": (rank,), "reason": f"rank {rank} lost", "steps": 5}
                made[-1].waiting.end(RayActorError() if made[-1].rank == rank else loss)

    def until(self, *handed: list[int]) -> None:
        """Run turns until routers got these ranks, after all earlier ones."""
        count = len(self.routers.handed)
        for _ in range(200):
            if len(self.routers.handed) >= count + len(handed):
                break
            self.fleet.turn()
        assert self.routers.handed[count:] == list(handed)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedFleet:
    return PlayedFleet(monkeypatch, limit=9).start()


def test_start_reports_progress(played: PlayedFleet) -> None:
    assert played.progress[-1] == (RANKS, RANKS)
    assert [made[0].calls[0] for made in played.actors.values()] == ["setup"] * RANKS
    assert played.parts._patience == SIGN_SECONDS


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RayActorError(), FleetLost, "worker 1 died while starting: "),
        (RayError("no such thing"), FleetLost, "Ray could not run worker 1: no such thing"),
        ("bad checkpoint", FleetError, "bad checkpoint"),
    ],
    ids=["died", "ray", "said"],
)
def test_failed_start_raises(
    monkeypatch: pytest.MonkeyPatch, error: Exception | str, kind: type[Exception], said: str
) -> None:
    played = PlayedFleet(monkeypatch)
    make = played.make

    def failing(rank: int, *, beside: bool = False) -> Actor:
        actor = make(rank, beside=beside)
        if rank == 1:
            actor.says["load"] = Ref(remote_error(error) if isinstance(error, str) else error)
        return actor

    played.parts._places.actor = failing
    with pytest.raises(kind, match=f"^{said}") as raised:
        played.start()
    assert type(raised.value) is kind


def remote_error(words: str) -> RayTaskError:
    """Return the error of a call whose process lives and has raised an exception itself."""
    error = RayTaskError.__new__(RayTaskError)
    Exception.__init__(error, words)
    error.cause = ValueError(words)
    return error


def test_lost_rank_is_fenced_and_replaced(played: PlayedFleet) -> None:
    played.lose(1)
    played.until([0, 2])
    for rank in (0, 2):
        played.actors[rank][0].says["end_epoch"] = Ref(done=False)
    for _ in range(9):
        played.fleet.turn()
    assert played.fenced == [FIRST_PID + 2]
    assert played.ray.killed == [played.actors[1][0]]
    for rank in (0, 2):
        played.actors[rank][0].waiting.end({"rank": rank, "ranks": (), "reason": "rank 1 is back", "steps": 9})
    played.actors[0][0].says["end_epoch"].end(None)
    played.until([0, 1, 2])
    assert [call for call in played.actors[1][1].calls if call in ("setup", "load", "start")] == [
        *("setup", "load", "start")
    ]


def test_launcher_files_that_run_for_one_lost_rank(played: PlayedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most eight, named in docs/architecture.md."""
    root = str(Path(adapter.__file__).parents[2])
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code: CodeType = frame.f_code
        if code.co_filename.startswith(root):
            files.add(code.co_filename.removeprefix(root))

    routers: Any = RouterProcesses.__new__(RouterProcesses)
    routers._tell = SimpleNamespace(send=lambda message: played.routers.handed.append([0, 2]))
    routers._telling = threading.RLock()
    played.parts._routers = routers
    real: Any = places.Places(EngineConfig(model_path="m", num_workers=RANKS), local=True)
    real._remote_class = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda: played.make(1)))
    monkeypatch.setattr(places, "PlacementGroupSchedulingStrategy", lambda *args, **given: None)
    played.parts._places, played.parts._local = real, LocalRay()
    played.lose(1)
    sys.setprofile(note)
    try:
        played.until([0, 2])
    finally:
        sys.setprofile(None)
    named = {"machine.py", "ranks.py", "decisions.py", "messages.py", "routers.py"}
    named |= {f"ray/{name}.py" for name in ("fleet", "places", "processes")}
    assert files == {f"/fleet/{name}" for name in named}
    assert len(files) <= 8


def test_liveness_checks(played: PlayedFleet) -> None:
    """A starting process is asked a second after each answer, and is lost if it does not answer for too long."""
    make = played.make
    sign = Ref(done=False)

    def hanging(rank: int, *, beside: bool = False) -> Actor:
        actor = make(rank, beside=beside)
        actor.says["setup"] = Ref(done=False)
        if len(played.actors[rank]) == 2:
            actor.says["alive"] = sign
        return actor

    played.parts._places.actor = hanging
    played.lose(1)
    played.until([0, 2])
    hung = played.actors[1][1]
    played.fleet.turn()
    assert hung.calls == ["setup", "alive"]
    played.now += SIGN_SECONDS
    played.fleet.turn()
    sign.end({"node": "here", "pid": 4711, "began": 3})
    for _ in range(3):
        played.fleet.turn()
    assert hung.calls == ["setup", "alive", "alive"], "the process must be asked again after its answer"
    sign.done = False
    played.now += ASK_SECONDS
    for _ in range(3):
        played.fleet.turn()
    played.now += SIGN_SECONDS + 1.0
    played.fleet.turn()
    assert played.fenced[1:] == [4711], "the answer names the process to kill"
    assert FIRST_SIGN_SECONDS > SIGN_SECONDS


# Ray 2.60 about an actor whose host was lost before its process began, and about a process that has ended.
NEVER_RAN = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n\tip: 10.77.0.11\n"
    "The actor died because its node has died. Node Id: e8df\n"
    "The actor never ran - it was cancelled before it started running."
)
RAN = "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n\tpid: 94"


class WaitingFleet:
    """A fleet in a cluster. Rank 1 is lost, and its next processes stay silent.

    pending: whether Ray cannot start them, as its GCS says; None: the GCS does not answer.
    asked: the questions to it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pending: bool | None = True
        self.asked: list[Future[bool]] = []
        patch.setattr(adapter, "check_reachable", lambda address: None)
        patch.setattr(adapter, "ask_pending", self.ask)
        self.played = PlayedFleet(patch, limit=3, address="head:6379").start()
        self.make, self.played.parts._places.actor = self.played.make, self.silent
        self.played.lose(1)
        self.played.until([0, 2])
        self.played.fleet.turn()

    def ask(self, _actor: Actor) -> Future[bool]:
        self.asked.append(Future())
        if self.pending is not None:
            self.asked[-1].set_result(self.pending)
        return self.asked[-1]

    def silent(self, rank: int, *, beside: bool = False) -> Actor:
        actor = self.make(rank, beside=beside)
        actor.says = {"setup": Ref(done=False), "alive": Ref(done=False)}
        return actor

    def wait(self) -> None:
        self.played.now += SIGN_SECONDS + 1.0
        for _ in range(3):
            self.played.fleet.turn()

    def end(self, said: str) -> None:
        """End the latest process."""
        self.played.actors[1][-1].says["setup"].end(RayActorError(error_msg=said))
        for _ in range(3):
            self.played.fleet.turn()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> WaitingFleet:
    return WaitingFleet(monkeypatch)


def test_rank_waits_for_a_lost_host_of_a_cluster(waiting: WaitingFleet, caplog: pytest.LogCaptureFixture) -> None:
    """Others serve meanwhile, and the wait does not use up the rank's restarts."""
    played = waiting.played
    for _ in range(4):
        waiting.wait()
        waiting.end(NEVER_RAN)
    assert caplog.text.count("rank 1 waits for a host") == 8
    assert len(played.actors[1]) == 6
    last = played.actors[1][-1]
    last.says["setup"].end(last._answer("setup"))
    for _ in range(5):
        played.fleet.turn()
    for rank in (0, 2):
        back = {"rank": rank, "ranks": (), "reason": "rank 1 is back", "steps": 9}
        played.actors[rank][0].waiting.end(back)
    played.until([0, 1, 2])


def test_process_that_has_begun_is_lost_after_its_silence(waiting: WaitingFleet) -> None:
    """It gets all of the time, even if Ray started it late."""
    waiting.wait()
    waiting.pending = False
    waiting.wait()
    assert len(waiting.played.actors[1]) == 2
    waiting.wait()
    assert len(waiting.played.actors[1]) == 3


def test_fleet_goes_on_while_rays_gcs_does_not_answer(waiting: WaitingFleet) -> None:
    """The fleet asks once, waits for the answer in its turns, and carries out commands meanwhile."""
    played, waiting.pending = waiting.played, None
    for _ in range(3):
        waiting.wait()
    assert len(waiting.asked) == 1
    assert len(played.actors[1]) == 2, "nobody knows that its process has begun"
    played.fleet.lost(1, "worker 1 is gone")
    played.fleet.turn()
    assert played.fleet.failure is None
    assert not played.fleet.state().ended
    waiting.asked[0].set_result(False)
    waiting.wait()
    assert len(played.actors[1]) == 2, "its time begins with the answer"
    waiting.wait()
    assert len(played.actors[1]) == 3


def test_question_about_an_actor_waits_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own call has no time limit. With a stopped GCS it did not return within 45 s (Ray 2.60)."""
    answers = threading.Event()

    def actors(_actor: str) -> dict[str, str]:
        answers.wait(HANG_SECONDS)
        return {"State": "PENDING_CREATION"}

    monkeypatch.setattr(places, "state", SimpleNamespace(actors=actors))
    asked = places.ask_pending(SimpleNamespace(_actor_id=b"\1"))
    assert not asked.done()
    answers.set()
    assert asked.result(HANG_SECONDS)


class StuckRay:
    """A cluster whose GCS answers once `answers` is set. `groups` are the reserved places."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers, self.groups, self.freed = threading.Event(), list[Any](), threading.Event()
        patch.setattr(places, "ray", SimpleNamespace(cluster_resources=self.resources))
        patch.setattr(places, "placement_group", self.reserve)
        patch.setattr(places, "remove_placement_group", self.remove)
        self.places = places.Places(EngineConfig(model_path="m", num_workers=2), local=False)

    def resources(self) -> dict[str, float]:
        assert self.answers.wait(HANG_SECONDS)
        return {"CPU": 3.0}

    def reserve(self, bundles: Any, **given: Any) -> object:
        self.groups.append(object())
        return self.groups[-1]

    def remove(self, group: object) -> None:
        self.groups.remove(group)
        self.freed.set()


def test_scale_up_is_refused_while_rays_gcs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused scale-up keeps no place, even if the GCS answers later."""
    stuck = StuckRay(monkeypatch)
    monkeypatch.setattr(places, "GCS_SECONDS", 0.1)
    with pytest.raises(RayError, match=r"^Ray's GCS has not answered for 0\.1 s"):
        stuck.places.extend((2,), 3)
    stuck.answers.set()
    assert stuck.freed.wait(HANG_SECONDS)
    assert stuck.groups == []
    monkeypatch.setattr(places, "GCS_SECONDS", HANG_SECONDS)
    assert stuck.places.extend((2, 3), 4) == "4 workers need one CPU each, the Ray cluster has 3; use fewer --workers"
    assert stuck.places.extend((2,), 3) is None
    assert len(stuck.groups) == 1


def test_start_can_be_interrupted_while_rays_gcs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = StuckRay(monkeypatch)
    interrupts = Interrupts()
    interrupts.count = 1
    with pytest.raises(KeyboardInterrupt):
        stuck.places.reserve(wait=0.0, stage=print, check=interrupts.check)
    stuck.answers.set()


def test_process_that_ran_uses_up_a_restart(waiting: WaitingFleet) -> None:
    for _ in range(3):
        waiting.end(RAN)
    assert waiting.played.fleet.failure is not None
    assert waiting.played.fleet.failure.startswith("rank 1 was lost 3 times")


def test_ray_is_restarted(played: PlayedFleet) -> None:
    """The old ranks are killed by process number, because Ray may not answer."""
    played.fenced.clear()
    calls = [len(made[0].calls) for made in played.actors.values()]
    played.dead = "raylet"
    played.until([0, 1, 2])
    assert played.fenced == [FIRST_PID + 1 + rank for rank in range(RANKS)]
    assert [len(made[0].calls) for made in played.actors.values()] == calls
    played.dead = "gcs_server"
    for _ in range(3):
        played.fleet.turn()
    assert len(played.routers.handed) == 1, "ranks must serve without Ray's head"
    played.lose(0)
    played.until([0, 1, 2])
    assert [len(made) for made in played.actors.values()] == [3, 3, 3]
    played.dead, played.starts = "raylet", [FleetLost("Ray cannot start: no memory")]
    for _ in range(3):
        played.fleet.turn()
    said = "Ray's raylet has ended, and all ranks with it; Ray's raylet has ended, and Ray cannot start: no memory"
    assert played.routers.given_up == [said] == [played.fleet.failure]
    assert played.fleet.state().ended
    with pytest.raises(Refused, match="the fleet has failed"):
        played.fleet.command("undrain", print, ranks=(1,))


def test_reports_of_routers_are_about_earlier_ranks(played: PlayedFleet) -> None:
    played.lose(1)
    played.until([0, 2])
    played.fleet.lost(1, "worker 1 is gone")
    for _ in range(3):
        played.fleet.turn()
    played.now += 60.0
    played.fleet.turn()
    assert len(played.fenced) == 1


@pytest.fixture
def serving(played: PlayedFleet) -> Iterator[PlayedFleet]:
    """A fleet whose thread runs."""
    played.fleet.serve(played.parts._routers)
    yield played
    played.fleet.guard.stopping.set()


def test_commands_come_from_other_threads(serving: PlayedFleet) -> None:
    said: list[str] = []
    last = serving.fleet.command("drain", said.append, ranks=(1,), seconds=1.0)
    assert last.startswith("rank 1 is drained")
    assert said == ["rank 1 takes no new requests, and has 0"]
    assert serving.fleet.command("undrain", said.append, ranks=(1,)) == "rank 1 takes requests"
    with pytest.raises(Refused, match="there is no rank 9") as refused:
        serving.fleet.command("restart", said.append, ranks=(9,), seconds=1.0)
    assert refused.value.exit_code == 2
    serving.parts._close("the server is stopping")
    with pytest.raises(Refused, match="the server is stopping"):
        serving.fleet.command("drain", said.append, ranks=(0,))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_next_standby_starts_at_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On CPUs it would slow the recovery."""
    played = PlayedFleet(monkeypatch, device=device, standby=1, takeover="never").start()
    (standby,) = played.actors[-1]
    standby.says["setup"] = Ref(done=False)
    played.lose(1)
    for _ in range(20):
        played.fleet.turn()
    assert len(played.actors[-1]) == (2 if device == "cuda" else 1)
    standby.says["setup"].end(standby._answer("setup"))
    played.until([0, 1, 2])
    played.fleet.turn()
    assert len(played.actors[-1]) == 2


@pytest.mark.parametrize("state", ["ready", "gone"])
def test_standby_replaces_a_lost_rank(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    played = PlayedFleet(monkeypatch, standby=1, takeover="never").start()
    (standby,) = played.actors[-1]
    if state == "gone":
        standby.says["warm"] = Ref(RayActorError())
    played.lose(1)
    played.until([0, 1, 2])
    assert ("start" in standby.calls) == (state == "ready")
    played.fleet.turn()
    assert len(played.actors[-1]) == 2, "another standby must start"


def test_call_blocked_by_a_dead_daemon_is_reported() -> None:
    """Ray waits for its head for ever. A call that ends on its own soon does not count."""
    reports: list[str] = []
    dead: list[str] = []
    local: Any = SimpleNamespace(ended=lambda: dead[0] if dead else None, kill_stopped=lambda **given: [])
    guard = Guard(local, starting=lambda: True, serving=tuple)
    guard.on_stuck = reports.append
    with guard.call():
        guard.look(0.0)
        guard.look(1000.0)
        dead.append("gcs_server")
        guard.look(1001.0)
        guard.look(1001.0 + STUCK_SECONDS)
    guard.look(1002.0 + STUCK_SECONDS)
    assert reports == [], "the call ended in time"
    with guard.call():
        guard.look(2000.0)
        guard.look(2000.0 + STUCK_SECONDS)
        assert reports == []
        guard.look(2000.1 + STUCK_SECONDS)
    assert reports == ["Ray's gcs_server has ended, and Ray's own code waits for it"]
