"""More workers and fewer: what is planned, in which order it happens, and what takes it back."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.desk import Asked, Desk

from moeyard.rank import Event, FleetError, Rank, RanksLost, Recovered
from moeyard.resize_plan import Impossible, ResizePlan, plan_resize
from moeyard.takeover import Room
from moeyard.upkeep import Refused
from moeyard_router.fleet.orders import Drain
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"
SLOT = 100


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
    """From `before` ranks on one host, with two layers of 12 experts of 100 bytes."""
    whole = Placement.of_shards((1, 2), partition(12, before))
    room = Room(available=available, slot_bytes=SLOT, all_resident=all_resident, movable=movable)
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


def test_who_stays_takes_slots_for_what_comes() -> None:
    plan = planned(2)
    assert plan.placement.ranks == (0, 1)
    assert plan.slots == {0: 6, 1: 6}
    assert [(each["expert_slots"], each["held_bytes"]) for each in plan.reports] == [(12, 5600)] * 2


def test_who_comes_is_as_the_others_promise() -> None:
    plan = planned(4, before=2)
    assert (plan.slots, plan.config.num_workers, plan.config.max_model_len) == ({}, 4, 500)
    assert [(each["expert_slots"], each["held_bytes"]) for each in plan.reports] == [(6, 4400)] * 2, "slots are freed"


def test_without_room_it_is_refused_and_always_means_always() -> None:
    with pytest.raises(FleetError, match="rank 0 has room for 5 of 6 experts that would come") as refused:
        planned(2, available=1199)
    assert not isinstance(refused.value, Impossible), "another time there may be"
    plan = planned(2, available=1199, mode="always")
    assert plan.slots == {0: 5, 1: 5}
    assert [each["expert_slots"] for each in plan.reports] == [11, 11]
    # A cache that does not hold all reads what it needs.
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
def test_sizes_that_cannot_be(size: int, before: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Impossible, match=said) as refused:
        planned(size, before, **options)
    assert refused.value.exit_code == 2


class Fleet:
    """Notes in `log` what is done to it; `stages` are what it waits for, in turn, or what goes wrong."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.size = self.coming = 2
        self.begins: list[bool | Exception] = []
        self.stages: list[str | Exception | None] = []
        self.answers: list[Exception] = []  # of `resize`
        self.heard: list[list[Event]] = []

    def events(self, timeout: float) -> list[Event]:
        return self.heard.pop(0) if self.heard else []

    def end_of(self, rank: int) -> str | None:
        return None

    def begin_resize(self, size: int) -> bool:
        answer = self.begins.pop(0) if self.begins else True
        if isinstance(answer, Exception):
            raise answer
        self.log.append(("begin", size))
        self.coming = size
        return answer

    def resize_stage(self) -> str | None:
        stage = self.stages.pop(0) if self.stages else None
        if isinstance(stage, Exception):
            raise stage
        return stage

    def resize(self) -> Recovered:
        self.log.append("resize")
        if self.answers:
            raise self.answers.pop(0)
        self.size = self.coming
        return self._all()

    def end_resize(self) -> None:
        self.log.append("end")

    def recover(self, dead: Collection[int], *, whole: bool) -> Recovered:
        self.log.append(("recover", *sorted(dead)))
        return self._all()

    def _all(self) -> Recovered:
        ranks = tuple(Rank(rank=r, frontend=f"tcp://{r}", metrics_url="", report={}) for r in range(self.size))
        return Recovered(ranks=ranks, losses=())


def desk_of(size: int = 2) -> Desk[Fleet]:
    fleet = Fleet()
    fleet.size = size
    return Desk(fleet, size, held=3)


def scale(desk: Desk[Fleet], size: int, *, seconds: float = 30.0) -> Asked:
    return desk.begin(lambda said: desk.upkeep.scale(size, seconds=seconds, say=said.append))


@pytest.fixture
def desk() -> Desk[Fleet]:
    return desk_of()


def test_more_workers_load_first(desk: Desk[Fleet]) -> None:
    desk.fleet.stages = ["starting rank 2, rank 3", "starting rank 2, rank 3", "loading the experts of rank 3", None]
    asked = scale(desk, 4)
    for _ in range(3):
        desk.turn()
    assert desk.fleet.log == [("begin", 4)], "all serve as before"
    desk.now += 9.0
    desk.turn()
    assert asked.end() == "4 workers in place of 2, after 9.0 s"
    assert desk.fleet.log == [("begin", 4), ("paused", 4), "resize", "end"]
    assert asked.said == [
        "starting rank 2, rank 3", "loading the experts of rank 3", "going on with 4 workers, 0.0 s without steps",
    ]  # fmt: skip
    [(count, incident)] = desk.handed
    assert (count, incident["planned"], incident["lost"]) == (4, True, [])
    assert all(not order.ranks for order in desk.orders), "nobody was drained"
    with pytest.raises(Refused, match="there is no rank 4; this server has ranks 0, 1, 2 and 3"):
        desk.upkeep.undrain(4)
    assert desk.upkeep.undrain(3) == "rank 3 takes requests"


def test_fewer_are_drained_while_the_others_read() -> None:
    desk = desk_of(4)
    desk.fleet.stages = ["reading experts at rank 0", None, None, None]
    asked = scale(desk, 2)
    desk.turn()
    assert desk.upkeep.drained == {2, 3}
    assert desk.orders[-1] == Drain(ranks=(2, 3), rank=3)
    desk.held[2] = 1
    desk.turn()
    assert ("carry", 2) not in desk.fleet.log
    desk.now += 30.0
    desk.turn()
    assert str(asked.end()) == "2 workers in place of 4, after 30.0 s"
    assert desk.fleet.log == [("begin", 2), ("carry", 2), ("carry", 3), ("paused", 2), "resize", "end"]
    assert asked.said == [
        "reading experts at rank 0", "ranks 2 and 3 take no new requests, and have 6",
        "4 of 4 requests go on at ranks that stay", "going on with 2 workers, 0.0 s without steps",
    ]  # fmt: skip
    assert desk.orders[-1] == Drain(ranks=(2, 3), rank=0, size=2)
    assert desk.upkeep.drained == frozenset()
    # A router that has not heard yet says that one of them is lost.
    desk.supervisor.lost(3, "worker 3 is gone")
    desk.turn()
    assert "recover" not in str(desk.fleet.log)


def test_who_is_read_for_goes_on_being_served_until_all_is_read() -> None:
    desk = desk_of(4)
    desk.fleet.stages = ["reading experts at rank 0"] * 3
    asked = scale(desk, 2, seconds=0.0)
    for _ in range(3):
        desk.turn()
    assert not any(order.carry for order in desk.orders), "their requests run as long as they can"
    desk.turn()
    assert not isinstance(asked.end(), Refused)


@pytest.mark.parametrize(
    ("size", "begins", "stages", "said", "code"),
    [
        (4, [Impossible("4 ranks for 3 experts")], [], "4 ranks for 3 experts", 2),
        (4, [FleetError("4 workers need one CPU each")], [], "4 workers need one CPU each", 1),
        (4, [], ["starting rank 2", RanksLost([2], "worker 2 died while starting: oom")], "worker 2 died", 1),
        (1, [], [None, FleetError("rank 0: model.safetensors has changed")], "has changed", 1),
    ],
)
def test_what_goes_wrong_before_the_switch_changes_nothing(
    desk: Desk[Fleet], size: int, begins: list[Any], stages: list[Any], said: str, code: int
) -> None:
    desk.fleet.begins, desk.fleet.stages = begins, stages
    asked = scale(desk, size)
    desk.turn()
    desk.turn()
    end = asked.end()
    assert isinstance(end, Refused)
    assert said in str(end)
    assert str(end).endswith("; the fleet goes on with 2 workers")
    assert end.exit_code == code
    assert desk.fleet.log[-1] == "end", "who was to come is ended"
    assert "resize" not in desk.fleet.log
    assert desk.upkeep.drained == frozenset()
    assert desk.orders[-1] == Drain(ranks=(), rank=0)
    assert not isinstance(Asked(lambda said: desk.upkeep.undrain(1)).end(), Refused), "it is over"


@pytest.mark.parametrize("lost", [(), (1,)])
def test_what_goes_wrong_in_the_switch_is_recovered_from(desk: Desk[Fleet], lost: tuple[int, ...]) -> None:
    desk.fleet.answers = [RanksLost(lost, "rank 2 did not answer within 25.0 s")]
    asked = scale(desk, 3)
    desk.turn()
    end = asked.end()
    assert str(end) == "rank 2 did not answer within 25.0 s; the fleet goes on with 2 workers"
    assert isinstance(end, Refused)
    assert end.exit_code == 1
    assert desk.fleet.log == [("begin", 3), ("paused", 3), "resize", ("recover", *lost), "end"]
    [(count, incident)] = desk.handed
    assert count == 2
    assert incident["reason"] == "rank 2 did not answer within 25.0 s"
    assert [each["rank"] for each in incident["lost"]] == list(lost)
    assert "planned" not in incident
    assert desk.upkeep.scale(2, seconds=1.0, say=print) == "there are 2 workers already"


def test_a_loss_goes_first() -> None:
    """What comes goes on loading; what was read has to be read again."""
    for before, size in (2, 4), (4, 2):
        desk = desk_of(before)
        desk.held = dict.fromkeys(range(4), 0)
        desk.fleet.stages = ["it takes its time"]
        asked = scale(desk, size)
        desk.turn()
        desk.turn(Event(rank=1, reason="gone"))
        assert desk.fleet.log[1:] == [("recover", 1)] + (["end"] if size < before else [])
        assert desk.upkeep.drained == set(range(size, before)), "which the routers are told with the new rank"
        desk.whole = False
        desk.turn()
        assert "resize" not in desk.fleet.log, "it waits for the fleet"
        desk.whole = True
        desk.turn()
        assert not isinstance(asked.end(), Refused)
        assert desk.fleet.log.count(("begin", size)) == (2 if size < before else 1)


def test_the_same_size_gives_up_what_was_begun(desk: Desk[Fleet]) -> None:
    desk.fleet.stages = ["starting rank 2"] * 2
    asked = scale(desk, 3)
    desk.turn()
    with pytest.raises(Refused, match="busy: the fleet is to have 3 workers, for 0 s; wait for its end"):
        desk.upkeep.scale(4, seconds=1.0, say=print)
    assert desk.upkeep.scale(2, seconds=1.0, say=print) == "2 workers, as before: going on with 3 is given up"
    desk.turn()
    assert str(asked.end()) == "given up; the fleet goes on with 2 workers"
    assert desk.fleet.log == [("begin", 3), "end"]


def test_undrain_of_one_that_leaves_keeps_it() -> None:
    desk = desk_of(3)
    asked = scale(desk, 2)
    desk.turn()
    assert desk.upkeep.undrain(2) == "rank 2 takes requests"
    desk.turn()
    assert str(asked.end()) == "rank 2 was given back by `moeyard undrain`; the fleet goes on with 3 workers"
    assert (desk.upkeep.drained, desk.orders[-1].ranks) == (frozenset(), ())


def test_somebody_must_take_requests(desk: Desk[Fleet]) -> None:
    drain = Asked(lambda said: desk.upkeep.drain(0, seconds=0.0, say=said.append))
    while not desk.upkeep.drained:
        desk.turn()
    assert not isinstance(drain.end(), Refused)
    with pytest.raises(Refused, match="none of rank 0 takes requests") as refused:
        desk.upkeep.scale(1, seconds=1.0, say=print)
    assert refused.value.exit_code == 2
    asked = scale(desk, 3)
    desk.turn()
    assert not isinstance(asked.end(), Refused)
    assert desk.upkeep.drained == {0}, "whom somebody drained stays drained"


def test_the_end_of_the_server_is_told(desk: Desk[Fleet]) -> None:
    asked = scale(desk, 3)
    desk.supervisor.stop()
    assert str(asked.end()) == "the server is stopping"
