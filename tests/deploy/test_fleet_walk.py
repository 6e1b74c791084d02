"""The fleet machine under random events: its invariants hold after each, and it ends whole or gives up."""

import random
from collections.abc import Callable

import pytest
from tests.deploy.fleet_world import World

from moeyard.fleet.messages import Failed, Silent, StandbyReady, Tick
from moeyard_router.fleet.orders import Drain, Hold
from moeyard_worker.config.worker_spec import ServedWeights

METHODS = ("setup", "load", "rebind", "connect", "prepare", "rejoin", "start", "room", "end_epoch", "progress", "seat")
METHODS += ("stage_weights", "use_weights", "discard_weights", "pause", "resume")


class Walk:
    """A random history of a fleet. Calls return in any order, or after the state that they wait for has changed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = World(
            rng.randint(1, 4),
            takeover=rng.choice(["never", "always", "auto"]),
            limit=rng.choice([1, 3, 50]),
            standby=rng.random() < 0.5,
            fixed_ports=rng.random() < 0.3,
            launch=rng.random() < 0.8,
            config={"exchange": "zmq"},
        )
        self.size_limit = 6

    def walk(self, steps: int) -> None:
        happenings: list[tuple[float, Callable[[], None]]] = [
            (30, self.call_returns),
            (12, self.tick),
            (2, self.dies),
            (0.7, self.hangs),
            (1, self.fails),
            (1, self.reports),
            (1, self.missed),
            (0.3, self.silent),
            (2, self.asked),
            (0.1, self.ray_ends),
            (0.5, self.routers),
            (0.3, lambda: self.world.event(StandbyReady(self.rng.choice([None, "no module"])))),
            (0.1, self.unplaced),
        ]
        weights, acts = zip(*happenings, strict=True)
        for act in self.rng.choices(acts, weights, k=steps):
            act()

    def come_to_rest(self) -> None:
        """Let time pass without new faults; hanging processes are detected as silent."""
        world = self.world
        world.whole = True
        for _ in range(60):
            hung = {call.process for call in world.calls.values() if not world.returns(call) and call.method != "wait"}
            world.held.clear()
            world.event(Silent(frozenset(hung & self.watched()), 60.0))
            world.event(StandbyReady(None))
            world.now += 40.0
            world.sequences, world.running = dict.fromkeys(world.sequences, 0), 0
            world.turn()

    def watched(self) -> set[int]:
        return {call.process for call in self.world.calls.values() if call.watched}

    def alive(self) -> list[int]:
        return [each.number for each in self.world.machine.ranks.members if each.number not in self.world.dead]

    def call_returns(self) -> None:
        numbers = [number for number, call in self.world.calls.items() if self.world.returns(call)]
        if numbers:
            self.world.end(self.rng.choice(numbers))
        while self.world.fenced:
            rank = self.world.fenced.pop()
            self.world.report((rank,), f"rank {rank} lost")

    def tick(self) -> None:
        self.world.now += self.rng.choice([0.1, 0.2, 5.0, 40.0])
        self.world.event(Tick())

    def dies(self) -> None:
        ranks = self.world.machine.ranks
        others = [*ranks.spares.values(), *(ranks.resizing.coming.values() if ranks.resizing else ())]
        processes = [*self.alive(), *(each.number for each in others)]
        if processes:
            process = self.rng.choice(processes)
            self.world.kill_process(process)
            if self.rng.random() < 0.7:
                rank = self.world.rank_of(process)
                self.world.report((rank,), f"rank {rank} lost at step 9")

    def hangs(self) -> None:
        self.world.held.add((self.rng.randrange(self.size_limit), self.rng.choice(METHODS)))
        if self.rng.random() < 0.5:
            self.world.held.clear()

    def fails(self) -> None:
        self.world.raises[self.rng.randrange(self.size_limit), self.rng.choice(METHODS)] = "no memory"

    def reports(self) -> None:
        size = self.world.machine.ranks.size
        named = tuple(rank for rank in range(size) if self.rng.random() < 0.3)
        self.world.report(named, "they are silent")

    def missed(self) -> None:
        self.world.misses(self.rng.randrange(self.size_limit))

    def silent(self) -> None:
        if watched := sorted(self.watched()):
            self.world.event(Silent(frozenset(self.rng.sample(watched, 1)), 60.0))

    def asked(self) -> None:
        rank = self.rng.randrange(self.size_limit)
        name = self.rng.choice(["drain", "undrain", "restart", "restart", "scale", "scale", *["weights"] * 3])
        if name == "weights":
            mode = self.rng.choice(["abort", "wait", "keep"])
            weights = ServedWeights(version=self.rng.choice(["", "b"]), directory=f"/{self.rng.randrange(9)}")
            self.world.ask(self.rng.choice(["pause", "resume", "update", "update"]), mode=mode, weights=weights)
            return
        seconds = self.rng.choice([0.0, 30.0])
        if name == "scale":
            self.world.ask("scale", size=self.rng.randint(0, self.size_limit), seconds=seconds)
        elif name == "restart" and self.rng.random() < 0.3:
            self.world.ask("restart", seconds=seconds)
        else:
            self.world.ask(name, rank, seconds=seconds)

    def ray_ends(self) -> None:
        self.world.ray_fails = "no memory" if self.rng.random() < 0.1 else None
        self.world.ray_ends(self.rng.choice(["raylet", "gcs_server"]))

    def unplaced(self) -> None:
        setups = [number for number, call in self.world.calls.items() if call.method == "setup"]
        for number in setups[:1]:
            self.world.event(Failed(number, "no place", "unplaced"))

    def routers(self) -> None:
        self.world.whole = self.rng.random() < 0.7
        self.world.sequences = dict.fromkeys(self.world.sequences, self.rng.choice([0, 3]))
        self.world.running = self.rng.choice([0, 0, 2])


@pytest.mark.parametrize("seed", range(300))
def test_fleet_ends_whole_or_gives_up(seed: int) -> None:
    walk = Walk(seed)
    world = walk.world
    walk.walk(250)
    walk.world.held.clear()
    walk.world.raises.clear()
    walk.come_to_rest()
    ranks, commands = world.machine.ranks, world.machine.commands
    assert len(world.given_up) == (world.machine.failure is not None)
    assert set(world.said) == set(world.ended), "every command must end"
    if world.machine.failure is None:
        assert world.serving == list(range(ranks.size)), "the fleet must be whole"
        assert (ranks.runs, ranks.away, ranks.forming, ranks.ray_ended) == (True, [], False, ranks.ray_ended)
        assert (ranks.spares, ranks.resizing, ranks.updating, commands.task) == ({}, None, None, None)
        assert {process.weights for process in ranks.members} == {ranks.weights}, "a fleet has one set of weights"
        lives = {process for _, process in world.made} - world.dead
        assert lives == {process.number for process in ranks.members}, "no process may be left over"
        shown = {rank for rank in world.handed[-1].drained if rank < ranks.size}
        drains = [each for each in world.orders if isinstance(each, Drain)]
        assert shown == commands.drained or drains[-1].ranks == tuple(sorted(commands.drained))
        holds = [each for each in world.orders if isinstance(each, Hold) and not each.switches]
        assert not holds or (holds[-1].mode is not None) == ranks.paused, "routers start requests unless paused"
