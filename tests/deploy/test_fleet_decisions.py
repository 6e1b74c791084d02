"""Decisions of a fleet: whether survivors take experts over, how it is resized, and how often processes restart."""

from pathlib import Path
from typing import Any

import pytest

from moeyard.fleet.decisions import (
    Headroom,
    Impossible,
    ResizePlan,
    RestartBudget,
    Takeover,
    decide,
    plan_resize,
    without,
)
from moeyard.fleet.messages import FleetError
from moeyard.fleet.placing import placement_of
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.models.families import load_model_config

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"
WHOLE = Placement.of_shards((1, 2), partition(12, 3))
WITHOUT_1 = WHOLE.without([1])
SLOT = 100


def decision(mode: str = "auto", *, available: tuple[int, int] = (10_000, 10_000), **changes: Any) -> Takeover:
    """Decide for a lost rank 1 on host a: 0 and 2, on hosts a and b, would each take 4 experts of 100 bytes."""
    kept = {name: changes.pop(name, True) for name in ("all_resident", "movable", "regroups")}
    rooms = {
        rank: Headroom(available=free, slot_bytes=SLOT, **kept) for rank, free in zip((0, 2), available, strict=True)
    }
    facts: dict[str, Any] = {
        "before": WHOLE,
        "after": WITHOUT_1,
        "rooms": rooms,
        "nodes": {0: "a", 1: "a", 2: "b"},
        "kept_free": {"a": 5000},
        "read_rate": 100.0,
        "start_seconds": 5.0,
    }
    return decide(mode, **(facts | changes))


def test_survivors_take_over_with_room_and_time() -> None:
    assert decision().slots == {0: 4, 2: 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"available": (5399, 10_000)}, "rank 0 has room for 3 of 4 experts that would come"),
        ({"available": (10_000, 399)}, "rank 2 has room for 3 of 4"),
        ({"nodes": {0: "a", 1: "a", 2: "a"}, "available": (5799, 5799)}, "rank 0 has room for 3 of 4"),
        ({"start_seconds": 4.0}, "reading the experts would take 4 s, a rank starts in 4 s"),
        ({"movable": False}, "the experts of rank 0 are fixed"),
        ({"mode": "never"}, "--expert-takeover never"),
    ],
)
def test_survivors_wait_otherwise(changes: dict[str, Any], said: str) -> None:
    decided = decision(**changes)
    assert decided.slots is None
    assert decided.reason.startswith(said), decided.reason


def test_host_store_needs_no_room_and_always_forces() -> None:
    assert decision(all_resident=False, available=(0, 0), start_seconds=0.1).slots == {0: 0, 2: 0}
    assert decision("always", available=(5399, 0), start_seconds=0.1).slots == {0: 3, 2: 0}
    # An unmeasured rate is no obstacle.
    assert decision(read_rate=None, start_seconds=0.1).slots == {0: 4, 2: 4}


def test_takeover_of_fixed_experts_with_copies() -> None:
    """On GPUs experts stay, but other ranks have copies of all that the lost rank had. NVLink needs all its ranks."""
    copies = tuple(tuple((e, 2 * (e % 2)) for e, owner in enumerate(row) if owner == 1) for row in WHOLE.owners)
    whole = Placement(WHOLE.layers, WHOLE.owners, copies)
    changes: dict[str, Any] = {"before": whole, "after": whole.without([1]), "movable": False, "available": (0, 0)}
    assert decision(**changes).slots == {0: 0, 2: 0}
    waits = decision(**changes, regroups=False)
    assert (waits.slots, waits.reason) == (None, "the nvlink exchange is one of all ranks")


def test_second_loss_counts_earlier_takeovers() -> None:
    room = Headroom(available=10**9, slot_bytes=SLOT, all_resident=True, movable=True)
    reports = [{"held_bytes": 10, "loaded_bytes": 800, "seconds": {"weights": 0.1}}] * 3
    placed, slots = without(
        [1, 0],
        mode="auto",
        whole=WHOLE,
        before=WITHOUT_1,
        rooms={2: room},
        nodes=dict.fromkeys(range(3), "a"),
        reports=reports,
        start_seconds=9.0,
    )
    assert placed.ranks == (2,)
    assert slots == {2: 24 - WITHOUT_1.num_owned(2)}


def test_budget_counts_within_its_window() -> None:
    budget = RestartBudget(2, 60.0)
    assert [budget.take(t) for t in (0.0, 10.0, 59.0, 60.0, 61.0, 70.0)] == [True, True, False, True, False, True]
    assert budget.used(125.0) == 1
    assert budget.used(1000.0) == 0


def planned(
    size: int,
    before: int = 4,
    *,
    available: int = 10_000,
    mode: str = "auto",
    all_resident: bool = True,
    movable: bool = True,
    slots: int = 1000,
    **flags: Any,
) -> ResizePlan:
    """Plan from `before` ranks on one host, with two layers of 12 experts of 100 bytes."""
    whole = Placement.of_shards((1, 2), partition(12, before))
    room = Headroom(available=available, slot_bytes=SLOT, all_resident=all_resident, movable=movable)
    report = {"max_model_len": 512, "expert_slots": slots, "held_bytes": 5000}
    return plan_resize(
        size,
        whole=whole,
        config=EngineConfig(**{"model_path": "x", "num_workers": before, "exchange": "zmq", **flags}),
        rooms=dict.fromkeys(range(before), room),
        nodes=dict.fromkeys(range(before), "a"),
        reports=[report, {**report, "max_model_len": 500}, *[report] * (before - 2)][:before],
        mode=mode,
    )


def test_remaining_ranks_add_slots() -> None:
    plan = planned(2)
    assert plan.placement.ranks == (0, 1)
    assert plan.slots == {0: 6, 1: 6}
    assert [(each["expert_slots"], each["held_bytes"]) for each in plan.reports] == [(12, 5600)] * 2


def test_new_ranks_match_the_promised_limits() -> None:
    plan = planned(4, before=2)
    assert (plan.slots, plan.config.num_workers, plan.config.max_model_len) == ({}, 4, 500)
    assert [(each["expert_slots"], each["held_bytes"]) for each in plan.reports] == [(6, 4400)] * 2, "slots are free"


def test_resizing_without_room_is_refused_unless_forced() -> None:
    with pytest.raises(FleetError, match="rank 0 has room for 5 of 6 experts that would come") as refused:
        planned(2, available=1199)
    assert not isinstance(refused.value, Impossible), "the refusal must not be final"
    plan = planned(2, available=1199, mode="always")
    assert plan.slots == {0: 5, 1: 5}
    assert [each["expert_slots"] for each in plan.reports] == [11, 11]
    # A cache that does not hold all experts reads what it needs.
    assert [each["expert_slots"] for each in planned(2, available=0, all_resident=False, slots=4).reports] == [4, 4]


@pytest.mark.parametrize(("flags", "most"), [({"expert_slots": 8}, 8), ({"expert_memory": 799}, 7)])
def test_flags_bound_the_slots(flags: dict[str, int], most: int) -> None:
    plan = planned(2, **flags)
    assert plan.slots == {0: most - 6, 1: most - 6}
    assert [each["expert_slots"] for each in plan.reports] == [most, most]


@pytest.mark.parametrize(
    ("size", "before", "options", "said"),
    [
        (13, 2, {}, "13 ranks for 12 experts per layer: every rank must own one"),
        (4, 2, {"movable": False, "record_routing": "x"}, "rank 0 cannot move: --record-routing is of one shard"),
        (2, 4, {"movable": False, "device": "cuda"}, "the experts of rank 0 cannot move: not on cuda"),
        (2, 1, {"exchange": "auto"}, "a fleet that began with one worker has no exchange between workers"),
        (2, 1, {"device": "cuda:1"}, "is one GPU"),
    ],
)
def test_impossible_sizes(size: int, before: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Impossible, match=said) as refused:
        planned(size, before, **options)
    assert refused.value.exit_code == 2


def test_strategies_place_experts() -> None:
    model = load_model_config(DEMO)
    for said, shards in {
        "linear": (range(11), range(11, 22), range(22, 32)),
        "round_robin": (range(0, 32, 3), range(1, 32, 3), range(2, 32, 3)),
    }.items():
        placed = placement_of(said, model, 3)
        assert [placed.experts(rank) for rank in range(3)] == [(tuple(s),) * len(model.moe_layers) for s in shards]
        with pytest.raises(ValueError, match="33 ranks for 32 experts"):
            placement_of(said, model, 33)


def test_a_file_places_experts(tmp_path: Path) -> None:
    model = load_model_config(DEMO)
    file = tmp_path / "placement.json"
    file.write_text('{"owners": %s}' % [e % 2 for e in range(model.num_experts)])
    assert placement_of(str(file), model, 2).experts(1)[0] == tuple(range(1, model.num_experts, 2))
    with pytest.raises(ValueError, match=r"--expert-placement .*: layer 1 does not name one of 1 ranks"):
        placement_of(str(file), model, 1)
    with pytest.raises(ValueError, match=r"--expert-placement .*: No such file or directory"):
        placement_of(str(tmp_path / "none"), model, 2)
    file.write_bytes(b"\xff" * 10)
    with pytest.raises(ValueError, match="--expert-placement"):
        placement_of(str(file), model, 2)
