"""What the launcher does with the actors of ranks, on a Ray that is played here: calls return what the test says."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError

from moeyard import ray_calls, ray_member, ray_ranks, ray_resizes, spares
from moeyard.rank import Event, RanksLost
from moeyard.ray_places import Seats
from moeyard.ray_resizes import ResizableRanks
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition

RANKS = 3
WHOLE = Placement.of_shards((1, 2), partition(12, RANKS))
REPORT = {"max_model_len": 64, "expert_slots": 8, "held_bytes": 10, "loaded_bytes": 10, "seconds": {"weights": 0.1}}


class Ref:
    """The result of a call, which may still be to come."""

    def __init__(self, value: Any = None, *, done: bool = True) -> None:
        self.value, self.done = value, done

    def end(self, value: Any) -> None:
        self.value, self.done = value, True


class Actor:
    """One rank's process: `calls` are the methods that were called; `waiting` is the last `wait`."""

    def __init__(self, rank: int, seat: tuple[str, int] = ("here", 0)) -> None:
        self.rank, self.seat_now, self.calls, self.waiting = rank, seat, list[str](), Ref(done=False)
        self.says: dict[str, Ref] = {}  # in place of what a method would return

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Ref:
            self.calls.append(name)
            if name == "wait":
                self.waiting = Ref(done=False)
                return self.waiting
            if name == "setup" and args[0].get("seat", self.seat_now) != self.seat_now:
                return Ref({"moved": str(self.seat_now)})
            return self.says.get(name) or Ref(self._answer(name))

        return SimpleNamespace(remote=remote)

    def _answer(self, name: str) -> Any:
        place = {"node": "here", "pid": 2**22 + 1 + self.rank, "began": 0.0, "seconds": {"imports": 0.1}, "weights": {}}
        doors = {"frontend": f"tcp://{id(self)}", "metrics_url": "", "mesh": {}}
        room = {"available": 10**9, "slot_bytes": 1, "all_resident": True, "movable": True}
        answers = {"setup": {**doors, **place}, "rebind": doors, "load": REPORT, "progress": (1, 1), "room": room}
        answers["seat"] = self.seat_now
        if name in ("start", "rejoin") and "load" not in self.calls:
            return RayError("start comes after load")
        return answers.get(name)


class Ray:
    """What is used of the module."""

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
        actor.calls.append("killed")

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


class Fleet:
    """Three ranks that serve; `actors` are all that were made for each, the latest last."""

    def __init__(self, seats: Seats | None = None) -> None:
        self.actors: dict[int, list[Actor]] = {rank: [] for rank in range(RANKS)}
        self.node = "here"
        self.ranks = ResizableRanks(
            EngineConfig(model_path="m", num_workers=RANKS),
            make=self.make,
            spec=lambda config, rank, epoch, placement: {} if seats is None else {"seat": seats.of(rank)},
            placement=WHOLE,
            takeover="always",
            seats=seats,
        )
        self.ranks.launch(lambda done, total: None)

    def make(self, rank: int) -> Actor:
        self.actors[rank].append(Actor(rank, (self.node, len(self.node) - rank)))
        return self.actors[rank][-1]

    def lose(self, rank: int) -> None:
        """Its process has ended, and the others tell of it."""
        loss = {"ranks": (rank,), "reason": f"rank {rank} lost", "steps": 5}
        for made in self.actors.values():
            made[0].waiting.end(RayActorError() if made[0].rank == rank else loss)

    def events(self, count: int) -> list[Event]:
        return [event for _ in range(count) for event in self.ranks.events(0.0)]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ray_calls, ray_member, ray_ranks, ray_resizes, spares):
        monkeypatch.setattr(module, "ray", Ray())
    monkeypatch.setattr(ray_member, "fence_process", lambda node, pid, began: None)


@pytest.fixture
def fleet(played: None) -> Fleet:
    return Fleet()


@pytest.mark.usefixtures("played")
def test_ranks_tell_their_gpus_before_any_is_set_up() -> None:
    """One that comes in another's place has its GPU; of ranks that all come anew nothing is known."""
    seats = Seats()
    fleet = Fleet(seats)
    assert seats.peer_gpus == (4, 3, 2)
    assert all(made[0].calls[:2] == ["seat", "setup"] for made in fleet.actors.values())
    fleet.lose(1)
    fleet.events(RANKS)
    fleet.ranks.recover([1])
    assert fleet.actors[1][1].calls[0] == "setup"
    fleet.ranks.recover([0, 1, 2])
    assert all(made[-1].calls[:2] == ["seat", "setup"] for made in fleet.actors.values())


@pytest.mark.usefixtures("played")
def test_ranks_whose_node_was_lost_tell_their_gpus_anew() -> None:
    """They are heard of and replaced one by one, and come to another node, where their setup finds that they have."""
    seats = Seats()
    fleet = Fleet(seats)
    for made in fleet.actors.values():
        made[0].waiting.end(RayActorError())
    fleet.node = "there"
    rounds, recovered = [frozenset([0])], None
    while recovered is None and len(rounds) < 9:
        try:
            recovered = fleet.ranks.recover(rounds[-1])
        except RanksLost as lost:
            rounds.append(lost.ranks)
    assert rounds == [{0}, {1}, {2}, {0, 1, 2}]
    assert seats.peer_gpus == (5, 4, 3)
    assert recovered is not None
    assert [rank.rank for rank in recovered.ranks if rank.frontend] == [0, 1, 2]


@pytest.mark.parametrize("prepared", [False, True], ids=["made anew", "its next process was ready"])
def test_a_rank_that_others_replace_loads_before_it_is_back(fleet: Fleet, prepared: bool) -> None:
    """It dies while it is drained for its restart: what was set up to take its place has loaded nothing yet."""
    if prepared:
        fleet.ranks.prepare(1, {}, fleet.make(1))
        assert fleet.ranks.spares.prepared(1, fleet.ranks.weights)
    fleet.lose(1)
    assert {event.rank for event in fleet.events(RANKS)} == {0, 1, 2}
    recovered = fleet.ranks.recover([1])
    assert recovered is not None
    assert [rank.rank for rank in recovered.ranks if rank.frontend] == [0, 2]
    assert fleet.events(1) == [], "it is set up, and loads"
    assert [event.ready for event in fleet.events(1)] == [True]
    for made in (fleet.actors[0], fleet.actors[2]):
        made[0].waiting.end({"ranks": (), "reason": "rank 1 is back", "steps": 9})
    back = fleet.ranks.admit()
    assert back is not None
    assert [rank.rank for rank in back.ranks if rank.frontend] == [0, 1, 2]
    (successor,) = fleet.actors[1][1:]
    assert [call for call in successor.calls if call in ("setup", "load", "start")] == ["setup", "load", "start"]


def complaint(words: str) -> RayTaskError:
    """What a call raises whose process lives and has raised something itself."""
    error = RayTaskError.__new__(RayTaskError)
    Exception.__init__(error, words)
    error.cause = ValueError(words)
    return error


def away(fleet: Fleet) -> None:
    """Rank 1 is lost, and has loaded again."""
    fleet.lose(1)
    fleet.events(RANKS)
    fleet.ranks.recover([1])
    while not any(event.ready for event in fleet.events(1)):
        pass


def test_a_planned_end_waits_for_a_step_however_long(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look between steps: none is to be killed because a step is long."""
    away(fleet)
    clock = [0.0]
    monkeypatch.setattr(ray_ranks.time, "monotonic", lambda: clock[0])

    def check() -> None:
        if clock[0] < 1000.0:
            clock[0] += 100.0
        else:
            for rank in (0, 2):
                fleet.actors[rank][0].waiting.end({"ranks": (), "reason": "rank 1 is back", "steps": 9})

    fleet.ranks.check = check
    back = fleet.ranks.admit()
    assert back is not None
    assert [rank.rank for rank in back.ranks if rank.frontend] == [0, 1, 2]
    assert "killed" not in [*fleet.actors[0][0].calls, *fleet.actors[2][0].calls]


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_who_is_gone_is_named_before_who_misses_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Survivors meet without rank 1, and rank 2 is lost meanwhile: rank 0 says so first, and is sound."""
    first, third = fleet.actors[0][0], fleet.actors[2][0]
    first.says["connect"] = Ref(complaint("rank 2 lost while connecting"))
    third.says["connect"] = Ref(done=False)
    clock = [0.0]
    monkeypatch.setattr(ray_ranks.time, "monotonic", lambda: clock[0])

    def check() -> None:
        clock[0] += 1.0
        if "connect" in third.calls and how == "ended":
            third.says["connect"].end(RayActorError())

    fleet.ranks.check = check
    fleet.lose(1)
    fleet.events(RANKS)
    with pytest.raises(RanksLost) as lost:
        fleet.ranks.recover([1])
    assert lost.value.ranks == {2}


def test_a_prepared_process_takes_its_place_once(fleet: Fleet) -> None:
    """A rank that is lost again gets another process, not the one that it had."""
    spare = fleet.make(1)
    fleet.ranks.prepare(1, {}, spare)
    assert fleet.ranks.spares.take(1) is not None
    assert fleet.ranks.spares.take(1) is None


class Clock:
    """Seconds that a test sets, in which processes that start are asked for signs of life."""

    def __init__(self, fleet: Fleet) -> None:
        self.now = 0.0
        fleet.ranks._call.signs.clock = self

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("hangs", ["setup", "load"])
def test_a_process_that_hangs_while_it_starts_is_replaced(
    fleet: Fleet, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for rank 1, which neither comes nor answers. Its place says which process is to be killed."""
    clock, place = Clock(fleet), {"node": "here", "pid": 4711, "began": 3}
    make, fenced = fleet.ranks._make, list[tuple[Any, ...]]()
    monkeypatch.setattr(ray_member, "fence_process", lambda *process: fenced.append(process))

    def hanging(rank: int) -> Actor:
        actor = make(rank)
        actor.says[hangs] = Ref(done=False)
        actor.says["alive"] = Ref(place)
        return actor

    def check() -> None:
        clock.now += 2.0
        if clock.now > 20.0:
            fleet.actors[1][1].says["alive"] = Ref(done=False)

    fleet.ranks._make, fleet.ranks.check = hanging, check
    fleet.lose(1)
    fleet.events(RANKS)
    with pytest.raises(RanksLost, match=r"^rank 1 gave no sign of life for 60 s while starting$") as lost:
        fleet.ranks.recover([1], whole=True)
    assert lost.value.ranks == {1}
    assert clock.now == pytest.approx(20.0 + ray_calls.SIGN_SECONDS, abs=6.0), "it answered until then"
    fleet.ranks._make, fleet.ranks.check = make, lambda: None
    fenced.clear()
    recovered = fleet.ranks.recover([1], whole=True)
    assert recovered is not None
    assert [rank.rank for rank in recovered.ranks if rank.frontend] == [0, 1, 2]
    assert [pid for _, pid, _ in fenced] == [4711 if hangs == "setup" else 2**22 + 2]


def test_a_process_that_hangs_while_others_serve_is_lost(fleet: Fleet) -> None:
    clock = Clock(fleet)
    make = fleet.ranks._make

    def hanging(rank: int) -> Actor:
        actor = make(rank)
        actor.says |= {"setup": Ref(done=False), "alive": Ref(done=False)}
        return actor

    fleet.ranks._make = hanging
    fleet.lose(1)
    fleet.events(RANKS)
    assert fleet.ranks.recover([1]) is not None, "the others take over"
    assert fleet.ranks.starting
    assert fleet.ranks.serving == {2**22 + 1, 2**22 + 3}
    assert fleet.events(1) == []
    clock.now += ray_calls.SIGN_SECONDS + 1.0
    (event,) = fleet.events(1)
    assert (event.rank, event.ready) == (1, False)
    assert "no sign of life" in event.reason


def test_when_ray_has_ended_all_ranks_are_made_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old ones are killed by their numbers: nothing is asked of a Ray that does not answer."""
    killed: list[int] = []
    monkeypatch.setattr(ray_member, "kill_process", lambda pid, began: killed.append(pid))
    fleet.ranks.prepare(2, {}, fleet.make(2))
    calls = {rank: len(made[0].calls) for rank, made in fleet.actors.items()}
    fleet.ranks.forget()
    assert killed == [2**22 + 1 + rank for rank in range(RANKS)]
    assert fleet.ranks.end_of(1) is None
    assert fleet.ranks.events(0.0) == []
    recovered = fleet.ranks.recover([1])
    assert recovered is not None
    assert [rank.rank for rank in recovered.ranks if rank.frontend] == [0, 1, 2]
    assert {rank: len(made[0].calls) for rank, made in fleet.actors.items()} == calls
    assert all("start" in made[-1].calls for made in fleet.actors.values())
