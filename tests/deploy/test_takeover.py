"""When survivors take a dead rank's experts over, and what the launcher then does."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from moeyard.placing import placement_of
from moeyard.rank import Event, Rank, RanksLost, Recovered, Unrecoverable
from moeyard.supervisor import Supervisor
from moeyard.takeover import Room, Takeover, decide, without
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.models.families import load_model_config

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"
WHOLE = Placement.of_shards((1, 2), partition(12, 3))
WITHOUT_1 = WHOLE.without([1])
SLOT = 100


def asked(mode: str = "auto", *, available: tuple[int, int] = (10_000, 10_000), **changes: Any) -> Takeover:
    """Rank 1 is lost: 0 and 2, on hosts a and b, would each take 4 experts of 100 bytes; rank 1 was on a."""
    kept = {name: changes.pop(name, True) for name in ("all_resident", "movable", "regroups")}
    rooms = {rank: Room(available=free, slot_bytes=SLOT, **kept) for rank, free in zip((0, 2), available, strict=True)}
    facts: dict[str, Any] = {
        "before": WHOLE, "after": WITHOUT_1, "rooms": rooms, "nodes": {0: "a", 1: "a", 2: "b"},
        "kept_free": {"a": 5000}, "read_rate": 100.0, "start_seconds": 5.0,
    }  # fmt: skip
    return decide(mode, **(facts | changes))


def test_with_room_and_time_they_take_over() -> None:
    assert asked().slots == {0: 4, 2: 4}


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
def test_otherwise_they_wait(changes: dict[str, Any], said: str) -> None:
    decided = asked(**changes)
    assert decided.slots is None
    assert decided.reason.startswith(said), decided.reason


def test_a_host_store_needs_no_room_and_always_means_always() -> None:
    assert asked(all_resident=False, available=(0, 0), start_seconds=0.1).slots == {0: 0, 2: 0}
    assert asked("always", available=(5399, 0), start_seconds=0.1).slots == {0: 3, 2: 0}
    # A rate that nobody has measured hinders nobody.
    assert asked(read_rate=None, start_seconds=0.1).slots == {0: 4, 2: 4}


def test_fixed_experts_do_if_nobody_needs_others() -> None:
    """On GPUs, where experts stay: all that the lost rank had lies elsewhere too. NVLink wants all its ranks."""
    copies = tuple(tuple((e, 2 * (e % 2)) for e, owner in enumerate(row) if owner == 1) for row in WHOLE.owners)
    whole = Placement(WHOLE.layers, WHOLE.owners, copies)
    changes: dict[str, Any] = {"before": whole, "after": whole.without([1]), "movable": False, "available": (0, 0)}
    assert asked(**changes).slots == {0: 0, 2: 0}
    waits = asked(**changes, regroups=False)
    assert (waits.slots, waits.reason) == (None, "the nvlink exchange is one of all ranks")


def test_a_second_loss_counts_what_was_taken_over() -> None:
    room = Room(available=10**9, slot_bytes=SLOT, all_resident=True, movable=True)
    reports = [{"held_bytes": 10, "loaded_bytes": 800, "seconds": {"weights": 0.1}}] * 3
    placed, slots = without(
        [1, 0], mode="auto", whole=WHOLE, before=WITHOUT_1, rooms={2: room}, nodes=dict.fromkeys(range(3), "a"),
        reports=reports, start_seconds=9.0,
    )  # fmt: skip
    assert placed.ranks == (2,)
    assert slots == {2: 24 - WITHOUT_1.num_owned(2)}


class Fleet:
    """Of three ranks: `recover` says who is away then, `admit` that nobody is."""

    def __init__(self) -> None:
        self.heard: list[list[Event]] = []
        self.calls: list[str] = []
        self.answers: list[Any] = []

    def events(self, timeout: float) -> list[Event]:
        return self.heard.pop(0) if self.heard else []

    def end_of(self, rank: int) -> str | None:
        return None

    def recover(self, dead: Collection[int], *, whole: bool) -> Recovered | None:
        assert not whole, "nobody asked for it"
        self.calls.append(f"recover {sorted(dead)}")
        return self._answer()

    def admit(self) -> Recovered | None:
        self.calls.append("admit")
        return self._answer()

    def _answer(self) -> Recovered | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is None else recovered(*answer)


def recovered(*away: int) -> Recovered:
    ranks = tuple(Rank(rank=r, frontend="" if r in away else f"tcp://{r}", metrics_url="", report={}) for r in range(3))
    return Recovered(ranks=ranks, losses=({"ranks": (), "reason": "rank 1 is back"},))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def supervisor(fleet: Fleet) -> Supervisor:
    return Supervisor(
        fleet,
        replace=lambda ranks, incident: fleet.calls.append(f"serve {[r.rank for r in ranks if r.frontend]}"),
        give_up=fleet.calls.append,
        limit=3,
        clock=lambda: 0.0,
    )


def turn(supervisor: Supervisor, fleet: Fleet, *events: Event) -> None:
    """A round of its thread."""
    fleet.heard.append(list(events))
    supervisor.turn()


def test_who_is_ready_joins(supervisor: Supervisor, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.answers = [(1,), ()]
    turn(supervisor, fleet, Event(rank=1, reason="gone"))
    turn(supervisor, fleet)
    turn(supervisor, fleet, Event(rank=1, reason="rank 1 has loaded its experts", ready=True))
    turn(supervisor, fleet)
    assert fleet.calls == ["recover [1]", "serve [0, 2]", "admit", "serve [0, 1, 2]"]
    assert "the fleet serves without rank 1 0.0 s after" in caplog.text
    assert "the fleet is whole again 0.0 s after rank 1 is back" in caplog.text


def test_what_the_router_says_late_of_a_rank_that_is_away_harms_nobody(supervisor: Supervisor, fleet: Fleet) -> None:
    fleet.answers = [(1,), (), (2,)]
    turn(supervisor, fleet, Event(rank=1, reason="gone"))
    supervisor.lost(1, "worker 1 is gone")
    turn(supervisor, fleet)
    turn(supervisor, fleet, Event(rank=1, reason="", ready=True))
    supervisor.lost(2, "worker 2 is gone")
    turn(supervisor, fleet)
    assert fleet.calls == ["recover [1]", "serve [0, 2]", "admit", "serve [0, 1, 2]", "recover [2]", "serve [0, 1]"]


def test_who_fails_while_it_is_away_is_made_again(supervisor: Supervisor, fleet: Fleet) -> None:
    """The others' epoch goes on, and the router hears nothing; too often, and it ends the fleet all the same."""
    fleet.answers = [(1,), None]
    for reason in ("gone", "worker 1 died while starting", "worker 1 died while starting"):
        turn(supervisor, fleet, Event(rank=1, reason=reason))
    assert fleet.calls == [
        "recover [1]", "serve [0, 2]", "recover [1]",
        "rank 1 was lost 3 times in 60 s: worker 1 died while starting",
    ]  # fmt: skip


def test_a_loss_while_experts_are_given_back_is_another(supervisor: Supervisor, fleet: Fleet) -> None:
    fleet.answers = [(1,), RanksLost([2], "rank 2 lost after step 9"), (1, 2)]
    turn(supervisor, fleet, Event(rank=1, reason="gone"))
    turn(supervisor, fleet, Event(rank=1, reason="", ready=True))
    assert fleet.calls == ["recover [1]", "serve [0, 2]", "admit", "recover [2]", "serve [0]"]


def test_where_experts_cannot_be_given_back_any_more_it_ends(supervisor: Supervisor, fleet: Fleet) -> None:
    """Ray's head may be lost while a rank is away: all have stopped by then, and nobody would tell them to go on."""
    fleet.answers = [(1,), Unrecoverable("gcs_server has ended")]
    turn(supervisor, fleet, Event(rank=1, reason="gone"))
    turn(supervisor, fleet, Event(rank=1, reason="", ready=True))
    assert fleet.calls == ["recover [1]", "serve [0, 2]", "admit", "gcs_server has ended"]
    assert supervisor.failure == "gcs_server has ended"


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
