"""Drains, restarts and resizing: their order, their messages, and what stops them. Losses take precedence."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.deploy.fleet_world import World

from moeyard.fleet.messages import Failed, StandbyReady
from moeyard.fleet.ranks import CALL_SECONDS
from moeyard_router.fleet.orders import Drain


@pytest.fixture
def world() -> World:
    return World(takeover="never", sequences=2, limit=2)


def restart(world: World, *ranks: int, **fields: Any) -> int:
    return world.ask("restart", *ranks, **fields)


def drain(world: World, *ranks: int, **fields: Any) -> int:
    return world.ask("drain", *ranks, **fields)


def steps(*ranks: int, size: int = 3) -> list[Any]:
    """Return the steps of restarting these ranks."""
    each = [[("make beside", r), ("carry", r), ("leaves", r), ("fence", r), ("serve", *range(size))] for r in ranks]
    return [step for one in each for step in one]


def test_drain_finishes_requests_and_moves_the_rest(world: World) -> None:
    asked = drain(world, 1)
    world.turn()
    assert world.orders[-1] == Drain(ranks=(1,), rank=1)
    world.sequences[1] = 1
    world.now += 29.9
    world.turn()
    assert not world.orders[-1].carry
    world.now += 0.1
    assert world.finish(asked).startswith("rank 1 is drained: ")
    assert world.orders[-1] == Drain(ranks=(1,), rank=1, carry=True)
    assert world.said[asked] == [
        "rank 1 takes no new requests, and has 2",
        "rank 1: 1 of its 1 requests go on elsewhere",
    ]
    assert world.machine.commands.drained == {1}
    assert world.steps == [("carry", 1)], "a drain must replace nothing"
    assert world.finish(world.ask("undrain", 1)) == "rank 1 takes requests"
    assert world.machine.commands.drained == frozenset()
    assert world.orders[-1] == Drain(ranks=(), rank=1)


@pytest.mark.parametrize("command", [drain, restart])
@pytest.mark.parametrize("turns", [0, 1])
def test_undrain_stops_a_waiting_command(world: World, command: Callable[..., int], turns: int) -> None:
    """The rank is not drained later, when the fleet is whole again."""
    world.whole = False
    asked = command(world, 1)
    for _ in range(turns):
        world.turn()
    assert world.said[asked] == ["waiting for the fleet to be whole"] * turns
    world.ask("undrain", 1)
    world.whole = True
    assert world.finish(asked) == "1: rank 1 was given back by `moeyard undrain`; it goes on as it was"
    assert world.machine.commands.drained == frozenset()
    assert world.orders[-1] == Drain(ranks=(), rank=1)
    assert world.steps == []


def test_undrain_does_not_stop_later_commands(world: World) -> None:
    world.ask("undrain", 1)
    assert world.finish(drain(world, 1, seconds=0)).startswith("rank 1 is drained")
    assert world.machine.commands.drained == {1}


def test_ranks_are_restarted_one_by_one(world: World, caplog: pytest.LogCaptureFixture) -> None:
    asked = restart(world, seconds=0, changes={"threads": 2})
    assert world.finish(asked) == "ranks 0, 1 and 2 restarted in 0.0 s"
    assert world.steps == steps(0, 1, 2)
    assert world.machine.commands.drained == frozenset()
    incidents = [each.incident or {} for each in world.handed[1:]]
    assert [each["reason"] for each in incidents] == [f"rank {rank} is restarted" for rank in range(3)]
    assert all(each["planned"] and not each["reports"] for each in incidents), "no rank may be reported"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [spec["config"].threads for spec in world.specs[3:]] == [2, 2, 2]
    world.kill(1)
    world.turn()
    assert world.specs[-1]["config"].threads == 2, "a replacement must have the new flags"


def test_no_takeover_for_a_quick_restart() -> None:
    world = World()
    assert world.finish(restart(world, 1)) == "rank 1 restarted in 0.0 s"
    assert world.steps == [("make beside", 1), ("leaves", 1), ("fence", 1), ("serve", 0, 1, 2)]


def test_planned_restarts_are_not_a_crash_loop(world: World) -> None:
    for _ in range(5):
        assert world.finish(restart(world, 1, seconds=0)) == "rank 1 restarted in 0.0 s"
    assert world.given_up == []


def test_next_process_starts_before_the_drain(world: World) -> None:
    world.held.add((1, "setup"))
    asked = restart(world, 1, seconds=0)
    world.turn()
    world.turn()
    assert world.machine.commands.drained == frozenset()
    world.held.clear()
    assert world.finish(asked) == "rank 1 restarted in 0.0 s"


def test_failed_start_of_the_next_process_changes_nothing(world: World) -> None:
    world.raises[1, "setup"] = "no module named moeyard_worker.engine"
    said = (
        "1: the next process of rank 1 does not start: no module named moeyard_worker.engine; it goes on as it was; "
        "rank 0 restarted before"
    )
    assert world.finish(restart(world, 0, 1, seconds=0)) == said
    assert world.steps == [*steps(0), ("make beside", 1), ("end", 1)]


@pytest.mark.parametrize("standby", [False, True])
def test_old_process_ends_first_without_room_for_two(standby: bool) -> None:
    """The restart waits for a standby with the current code, if one is configured."""
    world = World(fixed_ports=True, standby=standby)
    asked = restart(world, 2)
    world.turn()
    assert ("standby",) in world.did
    assert (asked in world.ended) == (not standby)
    if standby:
        world.event(StandbyReady(None))
        assert world.finish(asked) == "rank 2 restarted in 0.0 s"
        asked = restart(world, 2)
        world.turn()
        world.event(StandbyReady("no module named torch"))
        said = "1: the next process of rank 2 does not start: no module named torch; it goes on as it was"
        assert world.finish(asked) == said
    assert world.steps == [("leaves", 2), ("fence", 2), ("make", 2), ("serve", 0, 1, 2)]


def test_failing_flags_are_reverted_and_counted(world: World) -> None:
    world.raises[1, "load"] = "--kv-memory is too small"
    asked = restart(world, 1, seconds=0, changes={"threads": 2})
    assert world.finish(asked) == "rank 1 restarted in 0.0 s"
    assert "rank 1: its new process failed; another starts with the flags as before" in world.said[asked]
    assert world.steps == [*steps(1)[:-1], ("fence", 1), ("make", 1), ("serve", 0, 1, 2)]
    assert [spec["config"].threads for spec in world.specs[3:]] == [2, 1]
    incident = world.handed[-1].incident or {"planned": True}
    assert "planned" not in incident, "the failed start must count as a loss"
    assert incident["lost"][0]["reason"] == "--kv-memory is too small"
    world.raises[1, "load"] = "and again"
    asked = restart(world, 1, seconds=0)
    said = "rank 1 was lost 2 times in 60 s: and again"
    assert world.finish(asked) == f"1: the fleet has failed: {said}"
    assert world.given_up == [said]
    assert world.finish(drain(world, 1)) == f"1: the fleet has failed: {said}"


def test_loss_takes_precedence(world: World) -> None:
    """After another rank's loss the drain continues; after its own loss the rank has its new process."""
    asked = restart(world, 1)
    world.turns(2)
    world.kill(0)
    world.turn()
    assert world.steps[1:] == [("fence", 0), ("make", 0), ("serve", 0, 1, 2)]
    assert world.handed[-1].drained == {1}
    world.whole = False
    world.now += 60.0
    world.turn()
    assert ("carry", 1) not in world.did, "the command must wait for the fleet"
    world.whole = True
    world.kill(1)
    assert world.finish(asked) == "rank 1 restarted in 60.0 s"
    assert "rank 1 was lost, and is replaced" in world.said[asked]
    assert ("leaves", 1) not in world.did
    assert world.machine.commands.drained == frozenset(), "a restart must leave nothing drained"


def test_undrain_ends_a_restart_before_its_switch(world: World) -> None:
    asked = restart(world, 1)
    world.turn()
    world.ask("undrain", 1)
    assert world.finish(asked) == "1: rank 1 was given back by `moeyard undrain`; it goes on as it was"
    assert (world.machine.commands.drained, world.steps[-1]) == (frozenset(), ("end", 1))


def test_refused_commands(world: World) -> None:
    for rank in (-1, 3):
        said = f"2: there is no rank {rank}; this server has ranks 0, 1 and 2"
        assert world.finish(drain(world, rank)) == said
    asked = drain(world, 0)
    world.now += 7.0
    said = "1: busy: rank 0 is being drained, for 7 s; wait for its end"
    assert world.finish(restart(world, 1)) == said
    world.sequences = dict.fromkeys(world.sequences, 0)
    world.finish(asked)
    world.finish(drain(world, 1))
    assert world.finish(drain(world, 2)).startswith("2: no other rank than 2 takes requests")


# Resizing.


def resized(size: int, **options: Any) -> World:
    return World(size, **{"takeover": "never", "sequences": 3, **options})


def scale(world: World, size: int, **fields: Any) -> int:
    return world.ask("scale", size=size, **fields)


def test_new_workers_load_before_the_switch() -> None:
    world = resized(2)
    world.held |= {(3, "load"), (2, "setup")}
    asked = scale(world, 4)
    world.turns(3)
    world.held.remove((2, "setup"))
    world.turns(2)
    assert world.steps == [("reserve", 2, 3), ("make", 2), ("make", 3)], "all ranks must serve as before"
    world.held.clear()
    world.now += 9.0
    assert world.finish(asked) == "4 workers in place of 2, after 9.0 s"
    assert world.steps[3:] == [("pause", 4), ("serve", 0, 1, 2, 3), ("end",)]
    assert world.said[asked] == [
        "starting rank 2, rank 3",
        "starting rank 2",
        "loading the experts of rank 2, rank 3",
        "loading the experts of rank 3",
        "going on with 4 workers, 0.0 s without steps",
    ]
    incident = world.handed[-1].incident or {}
    assert (incident["planned"], incident["lost"]) == (True, [])
    assert all(not order.ranks for order in world.orders), "no rank may be drained"
    assert "this server has ranks 0, 1, 2 and 3" in world.finish(world.ask("undrain", 4))
    assert world.finish(world.ask("undrain", 3)) == "rank 3 takes requests"
    world.kill(3)
    world.turn()
    assert world.serving == [0, 1, 2, 3]


def test_leaving_ranks_are_drained_while_others_read() -> None:
    world = resized(4)
    world.held.add((0, "prepare"))
    asked = scale(world, 2)
    world.turns(2)
    assert world.machine.commands.drained == {2, 3}
    assert world.orders[-1] == Drain(ranks=(2, 3), rank=3)
    world.sequences[2] = 1
    world.turn()
    assert ("carry", 2) not in world.did
    world.now += 30.0
    world.turn()
    assert ("carry", 2) not in world.did, "requests must run as long as possible"
    world.held.clear()
    assert world.finish(asked) == "2 workers in place of 4, after 30.0 s"
    assert world.steps == [
        *(("carry", 2), ("carry", 3), ("pause", 2), ("serve", 0, 1)),
        ("end", 2, 3),
    ]
    assert world.said[asked] == [
        "reading experts at rank 0, rank 1",
        "ranks 2 and 3 take no new requests, and have 6",
        "reading experts at rank 0",
        "4 of 4 requests go on at ranks that stay",
        "going on with 2 workers, 0.0 s without steps",
    ]
    assert world.machine.commands.drained == frozenset()
    # A router that has not heard of the change reports one of them as lost.
    world.misses(3)
    world.now += 9.0
    world.turn()
    assert world.steps[-1] == ("end", 2, 3)


@pytest.mark.parametrize(
    ("size", "goes_wrong", "said"),
    [
        (13, {}, "2: 13 ranks for 12 experts per layer: every rank must own one"),
        (4, {"lacks": "4 workers need one CPU each"}, "1: 4 workers need one CPU each"),
        (4, {"raises": {(2, "setup"): "port 9002 is taken"}}, "2: port 9002 is taken"),
        (4, {"kill": 2}, "1: worker 2 died while starting: it died"),
        (4, {"kill": 3, "held": {(3, "progress")}}, "1: worker 3 died while starting: it died"),
        (4, {"held": {(3, "progress")}}, "1: worker 3 has loaded its experts, and does not answer any more"),
        (4, {"unplaced": "no place for rank 2, rank 3"}, "1: no place for rank 2, rank 3"),
        (1, {"raises": {(0, "prepare"): "model.safetensors has changed"}}, "2: model.safetensors has changed"),
    ],
)
def test_failure_before_the_switch_changes_nothing(size: int, goes_wrong: dict[str, Any], said: str) -> None:
    world = resized(2)
    world.raises, world.lacks = goes_wrong.get("raises", {}), goes_wrong.get("lacks")
    starts = "kill" in goes_wrong or "unplaced" in goes_wrong
    world.held = goes_wrong.get("held", {(None, "setup")} if starts else set())
    asked = scale(world, size)
    world.turns(5)
    if "kill" in goes_wrong:
        resizing = world.machine.ranks.resizing
        assert resizing is not None
        world.kill_process(resizing.coming[goes_wrong["kill"]].number)
    if "unplaced" in goes_wrong:
        (setup,) = [number for number, call in world.calls.items() if world.rank_of(call.process) == 2]
        world.event(Failed(setup, goes_wrong["unplaced"], "unplaced"))
    world.now += CALL_SECONDS + 1.0
    assert world.finish(asked) == f"{said}; the fleet goes on with 2 workers"
    assert ("pause", size) not in world.did
    assert len(world.handed) == 1
    made = {process for rank, process in world.made if rank >= 2}
    assert made <= world.dead, "new ranks must be ended"
    assert world.machine.commands.drained == frozenset()
    assert world.orders[-1] == Drain(ranks=(), rank=0)


@pytest.mark.parametrize("lost", [None, 1, 2])
def test_failure_in_the_switch_is_recovered(lost: int | None) -> None:
    world = resized(2)
    world.held.add((None, "connect"))
    asked = scale(world, 3)
    world.turns(6)
    assert world.steps[-1] == ("pause", 3)
    if lost is None:
        world.raises[2, "connect"] = "rank 2 cannot connect"
    else:
        world.kill(lost, noticed=False)
    world.held.clear()
    reason = "rank 2 cannot connect" if lost is None else f"worker {lost} died while starting: it died"
    assert world.finish(asked) == f"1: {reason}; the fleet goes on with 2 workers"
    assert ("fence", 2) in world.did
    ends = [("fence", 2), ("fence", 1)] if lost == 1 else [("fence", 2)]
    assert [each for each in world.steps if each[0] == "fence"] == ends
    assert world.serving == [0, 1]
    incident = world.handed[-1].incident or {}
    assert [each["rank"] for each in incident["lost"]] == ([1] if lost == 1 else [])
    assert "planned" not in incident
    assert world.finish(scale(world, 2)) == "there are 2 workers already"


@pytest.mark.parametrize(("before", "size"), [(2, 4), (4, 2)])
def test_loss_takes_precedence_over_resizing(before: int, size: int) -> None:
    """New ranks continue to load. The experts that others have read must be read again."""
    world = resized(before, sequences=0)
    world.held |= {(2, "load"), (0, "prepare")}
    asked = scale(world, size)
    world.turns(3)
    world.held.remove((0, "prepare"))
    world.kill(1)
    world.whole = False
    world.turn()
    world.turn()
    assert world.handed[-1].drained == set(range(size, before)), "routers must get the drained ranks"
    assert ("pause", size) not in world.did, "the command must wait for the fleet"
    world.whole = True
    world.held.clear()
    assert world.finish(asked).startswith(f"{size} workers in place of {before}")
    assert world.serving == list(range(size))
    reads = [each for each in world.did if each[0] == "call" and each[2] == "prepare" and each[1] == 1]
    assert len(reads) >= (2 if size < before else 1), "the experts must be read again"


def test_scaling_to_the_current_size_cancels() -> None:
    world = resized(2)
    world.held.add((2, "setup"))
    asked = scale(world, 3)
    world.turns(2)
    said = "1: busy: the fleet is to have 3 workers, for 0 s; wait for its end"
    assert world.finish(scale(world, 4)) == said
    assert world.finish(scale(world, 2)) == "2 workers, as before: going on with 3 is given up"
    assert world.finish(asked) == "1: given up; the fleet goes on with 2 workers"
    assert world.steps == [("reserve", 2), ("make", 2), ("end", 2)]


def test_resizing_waits_for_reads_in_progress() -> None:
    world = resized(4)
    world.held.add((0, "prepare"))
    asked = scale(world, 2)
    world.turns(2)
    world.finish(scale(world, 4))
    world.finish(asked)
    asked = scale(world, 3, seconds=0.0)
    world.turns(3)
    assert world.machine.ranks.resizing is None
    world.held.clear()
    assert world.finish(asked).startswith("3 workers in place of 4")


def test_undrain_keeps_a_leaving_rank() -> None:
    world = resized(3)
    asked = scale(world, 2)
    world.turns(3)
    assert world.finish(world.ask("undrain", 2), turns=0) == "rank 2 takes requests"
    said = "1: rank 2 was given back by `moeyard undrain`; the fleet goes on with 3 workers"
    assert world.finish(asked) == said
    assert (world.machine.commands.drained, world.orders[-1].ranks) == (frozenset(), ())


def test_one_rank_must_accept_requests() -> None:
    world = resized(2)
    assert world.finish(drain(world, 0, seconds=0)).startswith("rank 0 is drained")
    assert world.finish(scale(world, 1)).startswith("2: none of rank 0 takes requests")
    assert world.finish(scale(world, 0)).startswith("2: a fleet has one worker at least")
    assert world.finish(scale(world, 3)).startswith("3 workers in place of 2")
    assert world.machine.commands.drained == {0}, "a drained rank must stay drained"


def test_new_ranks_end_with_ray() -> None:
    world = resized(2)
    world.held.add((2, "setup"))
    asked = scale(world, 3)
    world.turns(2)
    world.ray_ends("raylet")
    world.turn()
    assert world.finish(asked).startswith("1: Ray has ended, and the new ranks with it")
    assert world.serving == [0, 1]
