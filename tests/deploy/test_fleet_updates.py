"""Updates of the weights by the fleet machine: all ranks or none, and what a lost rank loads in its place."""

from typing import Any

import pytest
from tests.deploy.fleet_world import World

from moeyard_router.fleet.orders import Hold
from moeyard_worker.config.worker_spec import AS_STARTED, ServedWeights

B = ServedWeights(version="b", directory="/models/b")


def update(world: World, weights: ServedWeights = B, mode: str = "keep") -> int:
    return world.ask("update", weights=weights, mode=mode)


def served(world: World) -> set[ServedWeights]:
    """Return the weights that the machine believes its ranks serve."""
    return {process.weights for process in world.machine.ranks.members}


def test_all_ranks_read_before_any_changes() -> None:
    world = World()
    world.held.add((2, "stage_weights"))
    asked = update(world)
    world.turns(5)
    assert asked not in world.ended
    assert served(world) == {AS_STARTED}
    assert not [each for each in world.did if each[0] == "call" and each[2] in ("use_weights", "end_epoch")]
    world.held.clear()
    assert world.finish(asked).startswith("all ranks serve version b (/models/b) after 0.0 s")
    assert world.steps == [("switch",), ("serve", 0, 1, 2), ("hold", None)]
    assert served(world) == {B}
    incident = world.handed[-1].incident or {}
    assert (incident["weight_version"], incident["planned"]) == ("b", True)
    assert [rank.report["fingerprint"] for rank in world.handed[-1].ranks] == ["of b"] * 3


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_end_before_the_change(mode: str) -> None:
    """Nothing is held while the ranks read, because that may take minutes."""
    world = World()
    world.running = 2
    world.held.add((1, "stage_weights"))
    asked = update(world, mode=mode)
    world.turns(3)
    assert world.orders[-1] != Hold(mode=mode)  # type: ignore[arg-type]
    world.held.clear()
    world.turns(3)
    assert world.orders[-1] == Hold(mode=mode)  # type: ignore[arg-type]
    assert asked not in world.ended
    world.running = 0
    assert world.finish(asked).startswith("all ranks serve")
    assert world.orders[-2:] == [Hold(mode="keep", switches=True), Hold(mode=None)]


def test_one_rank_that_refuses_stops_the_update() -> None:
    world = World()
    world.raises[1, "stage_weights"] = "/models/b/x.safetensors: truncated"
    said = world.finish(update(world))
    assert said == "2: /models/b/x.safetensors: truncated; the old weights remain in service"
    assert served(world) == {AS_STARTED}
    assert world.steps == []
    assert world.calls_of(0)[-1] == world.calls_of(2)[-1] == "discard_weights"
    assert world.finish(update(world)).startswith("all ranks serve"), "the next update must be possible"


def test_next_update_waits_for_ranks_that_still_read() -> None:
    """Two sets of weights beside the present ones would not fit into memory."""
    world = World()
    world.raises[1, "stage_weights"] = "truncated"
    world.held.add((0, "stage_weights"))
    assert world.finish(update(world)).startswith("2: truncated")
    asked = update(world)
    world.turns(3)
    assert world.calls_of(0).count("stage_weights") == 1
    world.held.clear()
    assert world.finish(asked).startswith("all ranks serve")


def test_ranks_that_read_other_files_stop_the_update() -> None:
    """A directory that is not shared, or that a trainer still writes to."""
    world = World()
    world.identities[2] = "other"
    said = world.finish(update(world))
    assert said == "1: w is not the same file for rank 2 as for rank 0; the old weights remain in service"
    assert served(world) == {AS_STARTED}


def test_rank_lost_before_the_change_gets_the_old_weights() -> None:
    world = World(takeover="never")
    world.held.add((2, "stage_weights"))
    asked = update(world)
    world.turns(3)
    world.kill(1)
    world.turns(3)
    said = world.finish(asked)
    assert said == "1: rank 1 was lost before all ranks had read the new weights; the old weights remain in service"
    assert world.specs[-1]["weights"] == AS_STARTED
    assert served(world) == {AS_STARTED}
    assert world.given_up == []


@pytest.mark.parametrize("method", ["use_weights", "rebind", "connect", "rejoin"])
def test_rank_lost_in_the_change_gets_the_new_weights(method: str) -> None:
    """From the end of the old epoch on there is no way back: no rank may serve the old weights again."""
    world = World(takeover="never")
    world.held.add((1, method))
    asked = update(world)
    world.turns(4)
    assert asked not in world.ended
    world.kill(1, noticed=method == "rejoin")
    world.held.clear()
    assert world.finish(asked).startswith("all ranks serve")
    assert world.specs[-1]["weights"] == B
    assert served(world) == {B}
    assert (world.handed[-1].incident or {})["weight_version"] == "b"
    # Survivors that have changed do not change twice.
    for rank in (0, 2):
        assert world.calls_of(rank).count("use_weights") == 1
    world.kill(0)
    world.turns(2)
    assert world.specs[-1]["weights"] == B, "a later loss must not bring the old weights back"


def test_rank_that_fails_in_the_change_is_replaced() -> None:
    """A file that cannot be read any more leaves a mixture on that rank, which must not serve."""
    world = World(takeover="never")
    world.raises[2, "use_weights"] = "/models/b/x.safetensors: was written to since it was checked"
    assert world.finish(update(world)).startswith("all ranks serve")
    assert ("fence", 2) in world.steps
    assert world.specs[-1]["weights"] == B
    assert served(world) == {B}


def test_fleet_falls_by_name_if_the_new_weights_are_gone() -> None:
    world = World(takeover="never", limit=2)
    world.held.add((1, "use_weights"))
    asked = update(world)
    world.turns(4)
    world.kill(1, noticed=False)
    world.held.clear()
    world.raises[1, "setup"] = "/models/b: no such directory"
    world.turns(2)
    assert world.given_up
    assert "/models/b: no such directory" in world.given_up[0]
    assert world.ended[asked].exit_code == 1


def test_pause_resume_and_update_between() -> None:
    world = World()
    world.running = 1
    asked = world.ask("pause", mode="wait")
    world.turns(3)
    assert asked not in world.ended
    assert world.finish(world.ask("resume")) == "resumed"
    assert world.finish(asked) == "1: the pause was given up by /resume"
    assert world.orders[-1] == Hold(mode=None)
    assert world.finish(world.ask("pause", mode="keep")) == "paused"
    assert world.finish(world.ask("pause", mode="keep")) == "paused", "a second pause changes nothing"
    assert world.calls_of(0).count("pause") == 1
    assert world.finish(update(world, mode="wait")).startswith("all ranks serve"), "an update must not wait in a pause"
    assert world.orders[-1] == Hold(mode="keep", switches=True), "the pause must go on"
    world.kill(1)
    world.turns(3)
    assert "pause" in world.calls_of(1), "a new process must pause, too"
    assert world.finish(world.ask("resume")) == "resumed"
    assert world.orders[-1] == Hold(mode=None)


def test_versions() -> None:
    world = World()
    for expected in ("1", "2"):
        assert f"version {expected} " in world.finish(update(world, ServedWeights(version="", directory="/models/b")))
    asked = world.finish(update(world, ServedWeights(version="2", directory="/models/c")))
    assert asked == "2: other weights have the weight_version '2'; choose another name"
    asked = world.finish(update(world, ServedWeights(version="default", directory="/models/c")))
    assert asked == "2: other weights have the weight_version 'default'; choose another name"
    assert world.finish(update(world, ServedWeights(version="4", directory="/models/c"))).startswith("all ranks")
    assert "version 5 " in world.finish(update(world, ServedWeights(version="", directory="/models/b")))


def test_checksums_of_all_ranks() -> None:
    world = World()
    answer: Any = {"a": "1"}
    world.checksums = answer
    assert world.finish(world.ask("checksum")) == '[{"a": "1"}, {"a": "1"}, {"a": "1"}]'
