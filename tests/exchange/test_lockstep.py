"""Plan frames: a rank with work starts a step, idle ranks join it, and none joins a different step."""

import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from exchange_fleet import Fleet, agree, join_when_started
from tests.exchange.meshes import connect_all
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.base import ExchangeError, PeerRows
from moeyard_worker.exchange.membership.frames import Phase, PlanFrame, encode_plan_frame, pack_tag
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape

SHAPE = ExchangeShape(num_experts=4, top_k=1, hidden=1, dtype="float32", max_tokens=1)


def connected_pair(transport: Literal["shm", "tcp"] = "shm") -> tuple[Mesh, Mesh]:
    """Return two connected ranks of this process."""
    first, second = (Mesh(rank=rank, world_size=2, epoch=1, deadline=4, transport=transport) for rank in range(2))
    assert connect_all([first, second]) == [None, None]
    return first, second


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    first, second = connected_pair()
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ends", [0, 1])
def test_frames_before_a_peers_end_are_read(ends: int, transport: Literal["shm", "tcp"]) -> None:
    """The end of a connection may overtake frames: they are still read first, and their reason is adopted."""
    for _ in range(25):
        pair = connected_pair(transport)
        reasons: list[str] = []

        def stay(mesh: Mesh = pair[1 - ends], reasons: list[str] = reasons) -> None:
            try:
                for step in range(1, 10):
                    Lockstep(mesh).agree(step, 1)
            except ExchangeError as error:
                reasons.append(str(error))

        thread = threading.Thread(target=stay)
        thread.start()
        for step in range(1, 4):
            Lockstep(pair[ends]).agree(step, 1)
        pair[ends].fail("the root cause")
        pair[ends].close()
        thread.join()
        pair[1 - ends].close()
        assert reasons == ["the root cause"]


def test_single_rank_agrees_with_itself() -> None:
    lockstep = Lockstep(Mesh(rank=0, world_size=1))
    assert lockstep.agree(0, 7, 2) == ((7,), 2, PeerRows(7, (0,), (7,)))
    assert not lockstep.peer_started(1)
    assert len(lockstep.wait_seconds) == 1


@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_idle_ranks_join_a_started_step(kind: str) -> None:
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE)
        for step, starter in enumerate((1, 0, 2)):
            for rank in range(3):
                if rank != starter:
                    fleet.start(rank, join_when_started, step, 0)
            fleet.start(starter, agree, step, 5)
            counts = tuple(5 if rank == starter else 0 for rank in range(3))
            assert [fleet.result(rank) for rank in range(3)] == [counts] * 3


@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_all_ranks_may_start_at_once(kind: str) -> None:
    with Fleet(4) as fleet:
        fleet.connect(kind, SHAPE)
        for step in range(20):
            assert fleet.call(agree, step, step) == [(step,) * 4] * 4


def test_peer_started_keeps_the_plan(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    idle, busy = Lockstep(first), []
    assert not idle.peer_started(0)
    starter = threading.Thread(target=lambda: busy.append(Lockstep(second).agree(0, 9, 3, num_prompt=4, num_rows=16)))
    starter.start()
    while not idle.peer_started(0):
        first.poll_sockets()[0].poll(1000 * HANG_SECONDS)
    assert idle.peer_started(0)
    agreed = ((0, 9), 3, PeerRows(16, (0, 4), (0, 16)))
    assert idle.agree(0, 0) == agreed, "all ranks must run the largest number of passes and rows"
    starter.join()
    assert busy == [agreed]
    assert idle.others_decode, "five of the nine rows must count as output"
    assert len(idle.wait_seconds) == 1


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            encode_plan_frame(PlanFrame(epoch=1, step=6, source=1, num_tokens=1)),
            "rank 1 plans the wrong step: expected step 5",
        ),
        (
            encode_plan_frame(PlanFrame(epoch=2, step=5, source=1, num_tokens=1)),
            "rank 1 plans the wrong step: expected step 5",
        ),
        (pack_tag(1, 5, 0, Phase.COMBINE, 1), "rank 1 sent the wrong frame between steps: expected a plan"),
    ],
    ids=["step", "epoch", "phase"],
)
def test_wrong_frame_between_steps_is_named(pair: tuple[Mesh, Mesh], frame: bytes, message: str) -> None:
    first, second = pair
    second.send(0, frame)
    first.poll_sockets()[0].poll(1000 * HANG_SECONDS)
    with pytest.raises(ExchangeError, match=message):
        Lockstep(first).peer_started(5)
    assert first.finding is not None
    assert first.finding.ranks == (1,), "the sender must be named"
    second.poll_sockets()[0].poll(1000 * HANG_SECONDS)
    with pytest.raises(ExchangeError, match=message):
        second.check_peers()


def test_plan_for_another_step_ends_the_agreement(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    second.send(0, encode_plan_frame(PlanFrame(epoch=1, step=6, source=1, num_tokens=1)))
    with pytest.raises(ExchangeError, match=r"expected plan of rank 1, epoch 1, step 5, got plan of rank 1.* step 6"):
        Lockstep(first).agree(5, 1)


def test_plan_with_a_wrong_size_is_named(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    second.send(0, encode_plan_frame(PlanFrame(epoch=1, step=5, source=1, num_tokens=1)) + b"x")
    with pytest.raises(ExchangeError, match="rank 1 sent a bad plan: a plan frame has 33 bytes, got 34"):
        Lockstep(first).agree(5, 1)
