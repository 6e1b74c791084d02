"""Experts move between ranks: survivors take a dead rank's over and give them back, fleets grow and shrink. No request
ends, and every answer is what it would have been.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import engine_config
from tests.e2e.test_recovery import DEADLINE, PROMPTS, kill, sampling, submit_all, told
from tests.fleet import Client, Fleet, ProcessPool, first_placement, start_fleet

from moeyard_worker.config.placement import Placement

RANKS = 3


def begin(fleet: Fleet, tokens: int) -> Client:
    """All requests anew, on whom is there; until so many tokens were told."""
    client, ranks = fleet.client, fleet.placement.ranks
    client.answers.clear()
    for i, prompt in enumerate(PROMPTS):
        client.submit(ranks[i % len(ranks)], f"r{i}", prompt, **sampling(i))
    client.wait_for(lambda: sum(len(a.token_ids) for a in client.answers.values()) >= tokens)
    return client


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True, "expert_slots": 4}, {"exchange": "zmq-tcp", "expert_policy": "lru"}],
    ids=["plain", "deep", "tcp"],
)
def test_survivors_take_over_and_give_back(
    processes: ProcessPool, checkpoints: dict[str, Path], options: dict[str, Any]
) -> None:
    """One rank is lost, then a second one while the first's is away; both come back, while requests run."""
    config = engine_config(checkpoints["mla"], num_workers=RANKS, step_deadline=DEADLINE, prefill_chunk=16, **options)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = told(client.wait())
        begin(fleet, 40)
        kill(fleet, 1)
        fleet.take_over([1])
        client.carry_over([1], to=[0, 2])
        client.wait_for(lambda: sum(len(a.token_ids) for a in client.answers.values()) >= 200)
        kill(fleet, 0)
        losses = fleet.take_over([0])
        assert [loss["ranks"] for loss in losses] == [(0,)]
        client.carry_over([0], to=[2])
        assert told(client.wait()) == expected
        # Alone it has all experts; two ranks join it in the midst of decoding.
        begin(fleet, 30)
        fleet.start_again([0, 1])
        fleet.move_to(fleet.whole)
        assert told(client.wait()) == expected
        begin(fleet, 0)
        assert told(client.wait()) == expected
        client.hello()
        client.wait_for(lambda: len(client.snapshots) == RANKS)
        assert {s.world_size for s in client.snapshots.values()} == {RANKS}


def test_a_loss_on_the_way_is_another_takeover(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """Who was to take over is lost when it has read half of it, and when it gives back what it took."""
    config = engine_config(checkpoints["gqa"], num_workers=RANKS, step_deadline=DEADLINE)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = told(client.wait())
        begin(fleet, 40)
        kill(fleet, 1)
        losses = [fleet.ranks[rank].call("wait") for rank in (0, 2)]
        placed = fleet.placement.without([1])
        met = [fleet.ranks[rank].call("rebind", 5, placed)["mesh"] for rank in (0, 2)]
        for rank in (0, 2):
            fleet.ranks[rank].send("connect", met)
        assert [fleet.ranks[rank].result() for rank in (0, 2)] == [None, None]
        assert fleet.ranks[0].call("prepare", placed, 1000) > 0
        kill(fleet, 2)
        # Rank 0 has not begun the epoch, so nobody tells it: it is given another.
        fleet.begin_epoch(placed.without([2]), losses)
        client.carry_over([1, 2], to=[0])
        assert told(client.wait()) == expected
        begin(fleet, 40)
        fleet.start_again([1])
        fleet.ranks[0].call("end_epoch", "rank 1 is back")
        losses = [fleet.ranks[0].call("wait")]
        assert losses[0]["ranks"] == ()
        kill(fleet, 1)
        fleet.begin_epoch(fleet.placement, losses)
        assert told(client.wait()) == expected


@pytest.mark.slow
def test_who_has_a_copy_takes_over_without_reading(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """All experts of rank 1 lie with another rank too: nobody reads any when it is lost, and answers are the same."""
    config = engine_config(checkpoints["gqa"], num_workers=RANKS, step_deadline=DEADLINE)
    whole = first_placement(config)
    copies = tuple(tuple((e, 2 * (e % 2)) for e, owner in enumerate(row) if owner == 1) for row in whole.owners)
    with start_fleet(processes, config, Placement(whole.layers, whole.owners, copies)) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = told(client.wait())
        begin(fleet, 40)
        kill(fleet, 1)
        losses = [fleet.ranks[rank].call("wait") for rank in (0, 2)]
        placed = fleet.placement.without([1])
        assert not placed.copies
        assert [fleet.ranks[rank].call("prepare", placed, 0) for rank in (0, 2)] == [0, 0]
        fleet.begin_epoch(placed, losses, room=0)
        client.carry_over([1], to=[0, 2])
        assert told(client.wait()) == expected


@pytest.mark.slow
def test_fleets_grow_and_shrink(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """Two of four ranks leave, whose requests go on at the others, and come back; experts in slots or not."""
    config = engine_config(checkpoints["mla"], num_workers=4, expert_slots=3, step_deadline=DEADLINE)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = told(client.wait())
        begin(fleet, 60)
        two = Placement(fleet.whole.layers, tuple(tuple(owner // 2 for owner in row) for row in fleet.whole.owners))
        fleet.move_to(two)
        client.carry_over([2, 3], to=[0, 1])
        assert told(client.wait()) == expected
        assert fleet.ranks[0].call("counters")
        for rank in (2, 3):
            fleet.ranks[rank].call("stop")
        begin(fleet, 60)
        fleet.start_again([2, 3])
        fleet.move_to(fleet.whole)
        assert told(client.wait()) == expected
