"""Lost ranks: the instructions that follow from events, and when the fleet gives up."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.deploy.fleet_world import World

from moeyard.fleet.machine import LAST_WORD_SECONDS
from moeyard.fleet.messages import Silent, Tick
from moeyard.fleet.ranks import CALL_SECONDS
from moeyard_worker.config.engine_config import STALL

ONE = [("fence", 1), ("make", 1), ("serve", 0, 1, 2)]


def waiting(**options: Any) -> World:
    """A fleet whose ranks wait for a lost one."""
    return World(takeover="never", **options)


def kill_two(world: World) -> None:
    world.kill(1, 2)


def miss(world: World) -> None:
    world.misses(2)
    world.now += LAST_WORD_SECONDS


def lose_the_replacement_too(world: World) -> None:
    """The replacement of rank 1 dies in its setup; the next one works."""
    world.held.add((1, "setup"))
    world.kill(1)
    world.turn()
    world.kill(1, noticed=False)
    world.held.clear()


def lose_another_meanwhile(world: World) -> None:
    world.held.add((1, "load"))
    world.kill(1)
    world.turn()
    world.kill(0)
    world.held.clear()


@pytest.mark.parametrize(
    ("takeover", "happens", "steps"),
    [
        ("never", lambda world: None, []),
        ("never", lambda world: world.kill(1), ONE),
        ("never", lambda world: world.report((1,), "rank 1 silent"), ONE),
        ("never", miss, [("fence", 2), ("make", 2), ("serve", 0, 1, 2)]),
        ("never", lambda world: world.report((), "the epoch has ended"), [("serve", 0, 1, 2)]),
        ("never", kill_two, [("fence", 1), ("make", 1), ("fence", 2), ("make", 2), ("serve", 0, 1, 2)]),
        (
            "always",
            lambda world: world.kill(1),
            [("fence", 1), ("make", 1), ("serve", 0, 2), ("serve", 0, 1, 2)],
        ),
        (
            "always",
            kill_two,
            [("fence", 1), ("make", 1), ("fence", 2), ("make", 2), ("serve", 0), ("serve", 0, 1), ("serve", 0, 1, 2)],
        ),
        (
            "never",
            lambda world: world.kill(0, 1, 2),
            [("fence", 0), ("make", 0), ("fence", 1), ("make", 1), ("fence", 2), ("make", 2), ("serve", 0, 1, 2)],
        ),
        ("never", lose_the_replacement_too, [("fence", 1), ("make", 1), *ONE]),
        ("always", lose_the_replacement_too, [("fence", 1), ("make", 1), ("serve", 0, 2), *ONE]),
        ("never", lose_another_meanwhile, [("fence", 1), ("make", 1), ("fence", 0), ("make", 0), ("serve", 0, 1, 2)]),
        (
            "always",
            lose_another_meanwhile,
            [
                *(("fence", 1), ("make", 1), ("serve", 0, 2)),
                *(("fence", 0), ("make", 0), ("serve", 2), ("serve", 1, 2), ("serve", 0, 1, 2)),
            ],
        ),
    ],
)
def test_instructions_of_a_loss(takeover: str, happens: Callable[[World], None], steps: list[Any]) -> None:
    world = World(takeover=takeover, limit=9)
    happens(world)
    for _ in range(3):
        world.turn()
    assert world.steps == steps
    assert world.given_up == []


def test_survivors_name_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "moeyard")
    world = waiting()
    world.ends[1] = "process 4711 has ended; 0.4 s before it had 9 GiB"
    world.kill(1)
    world.now += 2.0
    world.turn()
    incident = world.handed[-1].incident
    assert incident is not None
    assert [report["rank"] for report in incident.pop("reports")] == [0, 2]  # type: ignore[attr-defined]
    assert incident == {
        "reason": "rank 1 lost at step 9, plan",
        "lost": [{"rank": 1, "reason": "the process of rank 1 has ended", "process": world.ends[1]}],
        "seconds": 2.0,
        "parts": {"losses": 0.0, "processes": 2.0, "meeting": 0.0, "experts": 0.0, "rejoining": 0.0},
    }
    first, _, last = caplog.messages
    assert first == f"lost rank 1: the process of rank 1 has ended; replacing; rank 1: {world.ends[1]}"
    said = "the fleet is whole again 2.0 s after rank 1 lost at step 9, plan (losses 0.0 s, processes 2.0 s, "
    assert last.startswith(said)


def test_ranks_own_reason_wins_over_the_routers(caplog: pytest.LogCaptureFixture) -> None:
    world = waiting()
    world.misses(2, "worker 2 is gone: its connection broke")
    world.now += LAST_WORD_SECONDS / 2
    world.turn()
    assert world.steps == []
    world.raises[2, "wait"] = "rank 2: logits of step 7 are not finite"
    (wait,) = [n for n, call in world.calls.items() if call.method == "wait" and call.process == world.process_of(2)]
    world.end(wait)
    world.report((2,), "rank 2 lost")
    world.turn()
    assert caplog.messages[0] == "lost rank 2: rank 2: logits of step 7 are not finite; replacing"


def test_late_reports_of_routers_are_ignored() -> None:
    """The rank recovers or is absent, so their report is about its predecessor."""
    for takeover in ("never", "always"):
        world = World(takeover=takeover)
        world.held.add((1, "load"))
        world.kill(1)
        world.turn()
        world.misses(1)
        world.now += 2 * LAST_WORD_SECONDS
        world.held.clear()
        world.turn()
        world.turn()
        assert world.steps.count(("fence", 1)) == 1
    world.misses(5)
    world.now += 2 * LAST_WORD_SECONDS
    world.turn()
    assert world.steps[-1] == ("serve", 0, 1, 2)


def test_rank_lost_too_often_ends_the_fleet(caplog: pytest.LogCaptureFixture) -> None:
    world = waiting(limit=3)
    world.ends[1] = "process 4711 has ended"
    for _ in range(3):
        world.now += 10.0
        world.kill(1)
        world.turn()
    assert world.steps == [*ONE, *ONE]
    said = "rank 1 was lost 3 times in 60 s: the process of rank 1 has ended; process 4711 has ended"
    assert world.given_up == [world.machine.failure] == [said]
    assert f"the fleet has failed: {said}" in caplog.text
    world.turn()
    assert len(world.given_up) == 1


def test_losses_of_different_ranks_and_times_do_not_add_up() -> None:
    world = waiting(limit=2)
    for rank in (0, 1, 2):
        world.kill(rank)
        world.turn()
    world.now += 61.0
    world.kill(0)
    world.turn()
    assert [step for step in world.steps if step[0] == "fence"] == [("fence", rank) for rank in (0, 1, 2, 0)]
    assert world.given_up == []


@pytest.mark.parametrize(("pause", "how"), [(0.0, "in 60 s"), (100.0, "without serving in between")])
def test_failed_replacements_count(pause: float, how: str) -> None:
    """This holds even if each takes longer to fail than the window."""
    world = waiting(limit=3)
    world.held.add((1, "load"))
    world.kill(1)
    for _ in range(2):
        world.turn()
        world.now += pause
        world.kill(1, noticed=False)
    assert world.given_up == [f"rank 1 was lost 3 times {how}: worker 1 died while starting: it died"]
    assert [each for each in world.steps if each[0] == "serve"] == []


def test_serving_resets_the_count() -> None:
    world = waiting(limit=3)
    for _ in range(4):
        world.raises[1, "setup"] = "it hangs"
        world.kill(1)
        world.turn()
        world.now += 61.0
    assert world.given_up == []
    assert world.steps.count(("serve", 0, 1, 2)) == 4


def test_silent_rank_has_advice(caplog: pytest.LogCaptureFixture) -> None:
    world = waiting(limit=1)
    world.report((1,), "rank 1 silent at step 7, plan (5.0 s)")
    assert "if it was only slow, raise --step-deadline" in caplog.text


def test_failed_first_start_ends_the_fleet() -> None:
    """It ends at once with the first error; code 2 if the rank reported it, because a retry changes nothing."""
    for how, code in (("raised", 2), ("ended", 1)):
        world = waiting(launch=False)
        (number,) = [n for n, call in world.calls.items() if call.process == world.process_of(2)]
        if how == "raised":
            world.raises[2, "setup"] = "no module named torch"
            world.end(number)
        else:
            world.kill(2)
        said = {"raised": "no module named torch", "ended": "worker 2 died while starting: it died"}[how]
        assert world.given_up == [said]
        assert world.exit_codes == [code]


# Events during a recovery.


def test_rank_without_a_report_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """It hangs in its step while its heartbeats continue."""
    world = waiting()
    hung = world.process_of(0)
    world.held.add((0, "wait"))
    (wait,) = [n for n, call in world.calls.items() if call.method == "wait" and call.process == hung]
    stuck = world.calls.pop(wait)
    world.kill(1)
    world.turn()
    assert world.steps == [("fence", 1), ("make", 1)]
    world.now += STALL * 5.0 + CALL_SECONDS + 1.0
    world.turn()
    assert stuck.process in world.dead
    assert "worker 0 does not notice that the others have lost a peer" in caplog.text or world.steps[2] == ("fence", 0)
    assert world.steps[2:] == [("fence", 0), ("make", 0), ("serve", 0, 1, 2)]


def test_planned_end_waits_for_a_long_step() -> None:
    """Ranks check between steps, so a long step must kill none."""
    world = World()
    world.held |= {(0, "end_epoch")}
    world.kill(1)
    world.turn()
    assert world.steps[-1] == ("serve", 0, 2)
    world.now += 1.0
    world.turn()
    world.now += 1000.0  # the call of `end_epoch` times out, and the ranks' reports are awaited
    world.turn()
    world.now += 1000.0
    world.turn()
    assert world.steps == [("fence", 1), ("make", 1), ("serve", 0, 2)]
    world.report((), "rank 1 is back")
    world.turn()
    assert world.steps[-1] == ("serve", 0, 1, 2)


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_lost_rank_is_named_before_the_one_that_reports_it(how: str) -> None:
    """Survivors connect without rank 1, and rank 2 is lost: rank 0 reports an error first, but is healthy."""
    world = World()
    world.held.add((2, "connect"))
    world.raises[0, "connect"] = "rank 2 lost while connecting"
    world.kill(1)
    world.turn()
    if how == "ended":
        world.kill(2, noticed=False)
    else:
        world.now += 100.0
        world.event(Tick())
    world.held.clear()
    world.turn()
    world.turn()
    assert [step for step in world.steps if step[0] == "fence"] == [("fence", 1), ("fence", 2)]


def test_new_rank_is_blamed_if_none_died() -> None:
    world = waiting()
    world.raises[0, "connect"] = "rank 1 did not connect within 5 s"
    world.kill(1)
    world.turn()
    assert [step for step in world.steps if step[0] == "fence"] == [("fence", 1), ("fence", 1)]


@pytest.mark.parametrize("hangs", ["setup", "load"])
@pytest.mark.parametrize("takeover", ["never", "always"])
def test_process_that_hangs_during_startup_is_replaced(hangs: str, takeover: str) -> None:
    world = World(takeover=takeover)
    world.held.add((1, hangs))
    world.kill(1)
    world.turn()
    assert world.machine.ranks.starting
    hung = world.process_of(1)
    assert world.machine.ranks.serving == ([] if takeover == "never" else [1, 3])
    world.held.clear()
    world.event(Silent(frozenset((hung,)), 60.0))
    world.turn()
    world.turn()
    assert hung in world.dead
    incident = world.handed[-1 if takeover == "never" else -2].incident
    if takeover == "never":
        assert incident is not None
        assert incident["lost"][0]["reason"] == "rank 1 gave no sign of life for 60 s while starting"
    assert world.steps[-1] == ("serve", 0, 1, 2)
    assert not world.machine.ranks.starting


def test_loss_while_experts_are_returned_is_a_new_one() -> None:
    world = World()
    world.kill(1)
    world.held.add((0, "end_epoch"))
    world.turn()
    world.kill(2)
    world.held.clear()
    world.turn()
    world.turn()
    assert world.steps == [
        *(("fence", 1), ("make", 1), ("serve", 0, 2)),
        *(("fence", 2), ("make", 2), ("serve", 0), ("serve", 0, 1), ("serve", 0, 1, 2)),
    ]


@pytest.mark.parametrize("beside", [False, True], ids=["new process", "prepared process"])
def test_replaced_rank_loads_before_it_returns(beside: bool) -> None:
    """It dies while it is drained for its restart, and its next process has loaded nothing yet."""
    world = World(sequences=2)
    if beside:
        world.ask("restart", 1)
        world.turn()
        assert world.steps == [("make beside", 1)]
    world.kill(1)
    world.turn()
    world.turn()
    assert world.steps.count(("make", 1)) == (0 if beside else 1)
    assert world.serving == [0, 1, 2]
    calls = [each[2] for each in world.did if each[0] == "call" and each[1] == world.process_of(1)]
    assert [call for call in calls if call in ("setup", "load", "start")] == ["setup", "load", "start"]


def test_second_loss_gets_another_process() -> None:
    """A prepared process is used once."""
    world = waiting(sequences=2)
    world.ask("restart", 1)
    world.turn()
    world.kill(1)
    world.turn()
    world.kill(1)
    world.turn()
    assert world.steps[:4] == [("make beside", 1), ("fence", 1), ("serve", 0, 1, 2), ("fence", 1)]
    assert world.steps[4] == ("make", 1)


def test_changed_weights_end_the_fleet() -> None:
    """The weights with which the fleet began are no longer available."""
    world = waiting()
    world.facts[1] = {"weights": {"model.safetensors": ("another", "")}}
    world.kill(1)
    world.turn()
    (said,) = world.given_up
    assert "model.safetensors of rank 1 differs from the fleet's" in said


# GPUs of a cluster.


def seated() -> World:
    world = waiting(seats=True, launch=False)
    world.seats = {rank: ("here", 4 - rank) for rank in range(3)}
    world.settle()
    world.event(Tick())
    return world


def test_ranks_report_their_gpus_before_setup() -> None:
    """A replacement has its predecessor's GPU; if all ranks are new, nothing is known."""
    world = seated()
    assert all(world.calls_of(rank)[:2] == ["seat", "setup"] for rank in range(3))
    assert world.specs[-1]["peer_gpus"] == (4, 3, 2)
    world.kill(1)
    world.turn()
    assert world.calls_of(1)[0] == "setup"
    world.report((0, 1, 2), "all are lost")
    world.turn()
    assert all(world.calls_of(rank)[:2] == ["seat", "setup"] for rank in range(3))


def test_ranks_of_a_lost_node_report_their_gpus_again() -> None:
    """They are reported and replaced one by one on another node, where their setup finds that their GPUs changed."""
    world = seated()
    world.seats = {rank: ("there", 5 - rank) for rank in range(3)}
    world.held.add((None, "room"))
    world.kill(0)
    for rank in (1, 2):
        world.kill(rank, noticed=False)
    world.turn()
    assert world.specs[-1]["peer_gpus"] == (5, 4, 3)
    assert world.serving == [0, 1, 2]


def test_peers_are_on_one_node() -> None:
    world = seated()
    world.seats = {0: ("here", 3), 1: ("there", 1), 2: ("here", 0)}
    world.report((0, 1, 2), "all are lost")
    world.turn()
    assert world.specs[-1]["peer_gpus"] == ()


# Ray.


def test_loss_of_the_raylet_restarts_ray_and_all_ranks() -> None:
    world = waiting()
    world.ray_ends("raylet")
    world.turn()
    assert world.steps == [("start ray",), ("make", 0), ("make", 1), ("make", 2), ("serve", 0, 1, 2)]
    incident = world.handed[-1].incident
    assert incident is not None
    assert incident["reason"] == "Ray's raylet has ended, and all ranks with it"
    world.turn()
    assert len(world.steps) == 5


def test_ranks_serve_without_rays_head_until_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    world = waiting()
    world.ray_ends("gcs_server")
    world.turn()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert world.steps == []
    for command in ("restart", "scale"):
        number = world.ask(command, *((1,) if command == "restart" else ()), size=2)
        assert "Ray's gcs_server has ended" in world.finish(number)
    world.did.clear()
    world.kill(1)
    world.turn()
    assert world.steps == [("start ray",), ("make", 0), ("make", 1), ("make", 2), ("serve", 0, 1, 2)]
    world.kill(1)
    world.turn()
    assert world.steps[5:] == ONE, "Ray must be running"


def test_ray_that_ends_during_a_recovery_is_restarted() -> None:
    for daemon, takeover in (("raylet", "never"), ("gcs_server", "never"), ("gcs_server", "always")):
        world = World(takeover=takeover)
        world.held.add((1, "load"))
        world.kill(1)
        world.turn()
        world.ray_ends(daemon)
        world.held.clear()
        world.turn()
        world.turn()
        assert world.steps[-5:] == [("start ray",), ("make", 0), ("make", 1), ("make", 2), ("serve", 0, 1, 2)]


def test_fleet_gives_up_if_ray_does_not_restart() -> None:
    world = waiting()
    world.ray_fails = "Ray cannot start: no memory"
    world.ray_ends("raylet")
    world.turn()
    said = "Ray's raylet has ended, and all ranks with it; Ray's raylet has ended, and Ray cannot start: no memory"
    assert world.given_up == [said]
