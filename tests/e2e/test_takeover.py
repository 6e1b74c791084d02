"""Experts move between ranks: survivors take over from a dead rank and give back, and fleets grow and shrink. No
request ends, and every answer stays the same.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import engine_config
from tests.e2e.test_recovery import DEADLINE, PROMPTS, ROUTED, kill, results, sampling, submit_all
from tests.fleet import Client, Fleet, ProcessPool, first_placement, start_fleet

from moeyard_worker.config.placement import Placement

RANKS = 3


def submit_requests(fleet: Fleet, tokens: int) -> Client:
    """Submit all requests over the current ranks and wait for this number of tokens."""
    client, ranks = fleet.client, fleet.placement.ranks
    client.answers.clear()
    for i, prompt in enumerate(PROMPTS):
        client.submit(ranks[i % len(ranks)], f"r{i}", prompt, **sampling(i))
    client.wait_for(lambda: sum(len(a.token_ids) for a in client.answers.values()) >= tokens)
    return client


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mla", {}),
        ("mla", {"async_scheduling": True, "expert_slots": 4}),
        ("mla", {"exchange": "zmq-tcp", "expert_policy": "lru"}),
        ("fp8", {}),
        ("int4", {"expert_slots": 4}),
        ("fp4", {"prefill_chunk": 128}),
    ],
    ids=["plain", "deep", "tcp", "fp8", "int4", "fp4"],
)
def test_survivors_take_over_and_give_back(
    processes: ProcessPool, checkpoints: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    """One rank is lost, then a second one while the first is away. Both come back while requests run."""
    options = {"prefill_chunk": 16, **options}
    config = engine_config(checkpoints[kind], num_workers=RANKS, step_deadline=DEADLINE, **ROUTED, **options)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = results(client.wait())
        submit_requests(fleet, 40)
        kill(fleet, 1)
        fleet.take_over([1])
        client.carry_over([1], to=[0, 2])
        client.wait_for(lambda: sum(len(a.token_ids) for a in client.answers.values()) >= 200)
        kill(fleet, 0)
        losses = fleet.take_over([0])
        assert [loss["ranks"] for loss in losses] == [(0,)]
        client.carry_over([0], to=[2])
        assert results(client.wait()) == expected
        # The survivor has all experts. Two ranks join it while it decodes.
        submit_requests(fleet, 30)
        fleet.start_again([0, 1])
        fleet.move_to(fleet.whole)
        assert results(client.wait()) == expected
        submit_requests(fleet, 0)
        assert results(client.wait()) == expected
        client.hello()
        client.wait_for(lambda: len(client.snapshots) == RANKS)
        assert {s.world_size for s in client.snapshots.values()} == {RANKS}


def test_loss_during_takeover_starts_another(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """The successor is lost halfway through reading the experts, and again while it gives them back."""
    config = engine_config(checkpoints["gqa"], num_workers=RANKS, step_deadline=DEADLINE, **ROUTED)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = results(client.wait())
        submit_requests(fleet, 40)
        kill(fleet, 1)
        losses = [fleet.ranks[rank].call("wait") for rank in (0, 2)]
        placed = fleet.placement.without([1])
        mesh = [fleet.ranks[rank].call("rebind", 5, placed)["mesh"] for rank in (0, 2)]
        for rank in (0, 2):
            fleet.ranks[rank].send("connect", mesh)
        assert [fleet.ranks[rank].result() for rank in (0, 2)] == [None, None]
        assert fleet.ranks[0].call("prepare", placed, 1000) > 0
        kill(fleet, 2)
        # Rank 0 has not begun the epoch, so it needs no end: it gets the next one.
        fleet.begin_epoch(placed.without([2]), losses)
        client.carry_over([1, 2], to=[0])
        assert results(client.wait()) == expected
        submit_requests(fleet, 40)
        fleet.start_again([1])
        fleet.ranks[0].call("end_epoch", "rank 1 is back")
        losses = [fleet.ranks[0].call("wait")]
        assert losses[0]["ranks"] == ()
        kill(fleet, 1)
        fleet.begin_epoch(fleet.placement, losses)
        assert results(client.wait()) == expected


@pytest.mark.slow
def test_takeover_from_copies_reads_nothing(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """All experts of rank 1 have a copy on another rank, so its loss needs no reads."""
    config = engine_config(checkpoints["gqa"], num_workers=RANKS, step_deadline=DEADLINE, **ROUTED)
    whole = first_placement(config)
    copies = tuple(tuple((e, 2 * (e % 2)) for e, owner in enumerate(row) if owner == 1) for row in whole.owners)
    with start_fleet(processes, config, Placement(whole.layers, whole.owners, copies)) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = results(client.wait())
        submit_requests(fleet, 40)
        kill(fleet, 1)
        losses = [fleet.ranks[rank].call("wait") for rank in (0, 2)]
        placed = fleet.placement.without([1])
        assert not placed.copies
        assert [fleet.ranks[rank].call("prepare", placed, 0) for rank in (0, 2)] == [0, 0]
        fleet.begin_epoch(placed, losses, room=0)
        client.carry_over([1], to=[0, 2])
        assert results(client.wait()) == expected


@pytest.mark.slow
def test_fleets_grow_and_shrink(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """Two of four ranks leave and come back. Their requests continue on the others, with experts in slots."""
    config = engine_config(checkpoints["mla"], num_workers=4, expert_slots=3, step_deadline=DEADLINE, **ROUTED)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet)
        expected = results(client.wait())
        submit_requests(fleet, 60)
        two = Placement(fleet.whole.layers, tuple(tuple(owner // 2 for owner in row) for row in fleet.whole.owners))
        fleet.move_to(two)
        client.carry_over([2, 3], to=[0, 1])
        assert results(client.wait()) == expected
        assert fleet.ranks[0].call("counters")
        for rank in (2, 3):
            fleet.ranks[rank].call("stop")
        submit_requests(fleet, 60)
        fleet.start_again([2, 3])
        fleet.move_to(fleet.whole)
        assert results(client.wait()) == expected
