"""Sleep by the fleet machine: all ranks in one epoch or none, and what a lost rank does in its place."""

import pytest
from tests.deploy.fleet_world import World

from moeyard_router.fleet.orders import Hold
from moeyard_worker.config.worker_spec import ServedWeights

B = ServedWeights(version="b", directory="/models/b")


def asleep(world: World) -> set[int]:
    """The levels at which ranks sleep, as far as the machine knows."""
    return {process.asleep for process in world.machine.ranks.members}


def sleep(world: World, level: int = 1, mode: str = "keep") -> str:
    return world.finish(world.ask("sleep", level=level, mode=mode))


def wake(world: World) -> str:
    return world.finish(world.ask("wake"))


def test_all_ranks_sleep_and_wake_in_one_epoch() -> None:
    world = World()
    assert sleep(world) == "asleep at level 1, all ranks have freed 3 MiB"
    assert asleep(world) == {1}
    assert world.orders[-2:] == [Hold(mode="keep"), Hold(mode="keep", switches=True, asleep=1)]
    assert sleep(world) == "asleep at level 1"
    assert sleep(world, 2) == "asleep at level 2, all ranks have freed 6 MiB"
    assert asleep(world) == {2}
    assert wake(world).startswith("awake after")
    assert asleep(world) == {0}
    assert world.orders[-2:] == [Hold(mode="keep", switches=True, asleep=2), Hold(mode=None, asleep=0)]
    assert wake(world) == "awake"
    assert all((each.incident or {})["planned"] for each in world.handed[1:])


def test_running_requests_are_a_refusal() -> None:
    world = World()
    world.running = 2
    assert sleep(world) == "1: 2 requests run; pause the server or end them before it sleeps"
    assert world.orders[-1] == Hold(mode=None)
    assert asleep(world) == {0}
    asked = world.ask("sleep", level=1, mode="abort")
    world.turns(3)
    assert asked not in world.ended
    world.running = 0
    assert world.finish(asked).startswith("asleep")


def test_paused_server_keeps_its_requests_and_stays_paused() -> None:
    world = World()
    world.finish(world.ask("pause", mode="keep"))
    world.running = 2
    assert sleep(world).startswith("asleep")
    assert wake(world).startswith("awake")
    assert world.orders[-1] == Hold(mode="keep", asleep=0)
    assert world.machine.ranks.paused


@pytest.mark.parametrize("method", ["check_sleep", "check_wake"])
def test_one_rank_that_refuses_stops_all(method: str) -> None:
    world = World()
    if method == "check_wake":
        sleep(world)
    before, world.raises[1, method] = asleep(world), "rank 1 has no room"
    assert (wake if before == {1} else sleep)(world) == "1: rank 1 has no room"
    assert asleep(world) == before
    assert (wake if before == {1} else sleep)(world).startswith(("awake", "asleep"))


@pytest.mark.parametrize("takeover", ["never", "always"])
@pytest.mark.parametrize("method", ["sleep", "rebind", "connect", "rejoin"])
def test_rank_lost_while_the_fleet_falls_asleep_sleeps_in_its_next_process(method: str, takeover: str) -> None:
    """Survivors have given their memory back, so they take no experts over."""
    world = World(takeover=takeover)
    world.held.add((1, method))
    asked = world.ask("sleep", level=2, mode="keep")
    world.turns(4)
    assert asked not in world.ended
    world.kill(1, noticed=method == "rejoin")
    world.held.clear()
    assert world.finish(asked).startswith("asleep at level 2")
    assert asleep(world) == {2}
    for rank in (0, 2):
        assert world.calls_of(rank).count("sleep") == 1


def test_commands_of_sleep_do_not_answer_for_one_that_still_runs() -> None:
    world = World()
    world.held.add((1, "sleep"))
    first = world.ask("sleep", level=2, mode="keep")
    world.turns(4)
    for name, more in (("wake", {}), ("sleep", {"level": 1, "mode": "keep"})):
        assert "busy" in world.finish(world.ask(name, **more))
    world.held.clear()
    assert world.finish(first).startswith("asleep at level 2")


def test_sleeping_ranks_take_no_experts_over() -> None:
    world = World()
    sleep(world)
    before = len(world.calls_of(1))
    world.kill(0)
    world.turns(6)
    calls = world.calls_of(1)[before:]
    assert "rejoin" in calls
    assert not {"room", "prepare"} & set(calls), calls


def test_rank_lost_while_the_fleet_sleeps_and_wakes() -> None:
    world = World(takeover="never")
    sleep(world)
    world.kill(0)
    world.turns(3)
    assert asleep(world) == {1}
    world.held.add((2, "wake"))
    asked = world.ask("wake")
    world.turns(4)
    world.kill(2, noticed=False)
    world.held.clear()
    assert world.finish(asked).startswith("awake")
    assert asleep(world) == {0}


def test_weights_may_change_meanwhile_and_other_commands_may_not() -> None:
    world = World()
    sleep(world, 2)
    assert world.finish(world.ask("update", weights=B, mode="wait")).startswith("all ranks serve")
    assert asleep(world) == {2}
    for name, size in (("restart", 0), ("scale", 2), ("checksum", 0)):
        assert world.finish(world.ask(name, size=size)) == f"1: the server sleeps; wake it up before a {name}"
    assert world.finish(world.ask("pause", mode="keep")) == "paused"
    assert world.finish(world.ask("resume")) == "resumed"
    assert wake(world).startswith("awake")
