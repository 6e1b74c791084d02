"""Signs between ranks in addition to frames: a rank that announces a delay is awaited, a silent one is not."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import pytest
from tests.exchange.meshes import Opener, before_first, failures_of, opener
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership import liveness
from moeyard_worker.exchange.membership import mesh as mesh_module
from moeyard_worker.exchange.membership.frames import NO_LAYER, Frame, Phase, pack_tag
from moeyard_worker.exchange.membership.liveness import Signs
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh

STEP, LAYER, EPOCH = 812, 17, 4
PATIENCE = 1.0


@pytest.fixture
def meshes() -> Iterator[Opener]:
    """Open the connected meshes of one fleet, which await frames like those of GPUs."""
    with opener(epoch=EPOCH, deadline=PATIENCE, stall=HANG_SECONDS, patience=PATIENCE) as open_all:

        def open_met(world: int, **options: float) -> list[Mesh]:
            ranks = open_all(world, **options)
            assert failures_of(*(partial(mesh.gather, b"") for mesh in ranks)) == [None] * world
            for mesh in ranks:
                mesh.step = STEP
            return ranks

        yield open_met


def tag(source: int, phase: Phase = Phase.COMBINE, *, epoch: int = EPOCH) -> bytes:
    layer = LAYER if phase in (Phase.DISPATCH, Phase.COMBINE) else NO_LAYER
    return pack_tag(epoch, STEP, layer, phase, source)


def wait(mesh: Mesh, phase: Phase = Phase.COMBINE) -> list[Frame]:
    return mesh.recv_all(phase, layer=LAYER if phase in (Phase.DISPATCH, Phase.COMBINE) else None, since=perf_counter())


def named(mesh: Mesh, phase: Phase = Phase.COMBINE) -> tuple[str, float]:
    """Return the reason of a failed wait, and its seconds."""
    begun = perf_counter()
    with pytest.raises(ExchangeError) as caught:
        wait(mesh, phase)
    return str(caught.value), perf_counter() - begun


def later(seconds: float, call: Callable[[], object]) -> threading.Thread:
    """Run a call later in a peer's thread, which owns its mesh."""

    def run() -> None:
        time.sleep(seconds)
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_silent_rank_is_named_at_the_deadline(meshes: Opener) -> None:
    first, _ = meshes(2)
    reason, seconds = named(first)
    assert reason == "rank 1 silent at step 812, layer 17, combine (1.0 s)"
    assert seconds >= PATIENCE


def test_rank_that_announces_a_delay_is_awaited(meshes: Opener) -> None:
    first, second = meshes(2)
    second.send_sign(Phase.BUSY)
    thread = later(1.5 * PATIENCE, lambda: second.send(0, tag(1)))
    assert wait(first)[1] == tag(1)
    thread.join()


def test_sign_during_the_wait_extends_it(meshes: Opener) -> None:
    first, second = meshes(2)
    before_first(first, "poll", lambda _: second.send_sign(Phase.BUSY))
    thread = later(1.5 * PATIENCE, lambda: second.send(0, tag(1)))
    assert wait(first)[1] == tag(1)
    thread.join()


def test_announced_delay_has_a_limit(meshes: Opener) -> None:
    first, second = meshes(2, stall=2 * PATIENCE)
    second.send_sign(Phase.BUSY)
    reason, seconds = named(first)
    assert reason == "rank 1 silent at step 812, layer 17, combine (2.0 s)"
    assert seconds > 1.9 * PATIENCE


def test_any_other_frame_ends_the_sign(meshes: Opener) -> None:
    first, second = meshes(2)
    second.send_sign(Phase.BUSY)
    second.send(0, tag(1, Phase.DISPATCH))
    wait(first, Phase.DISPATCH)
    assert named(first)[0] == "rank 1 silent at step 812, layer 17, combine (1.0 s)"


def test_slow_rank_does_not_hide_a_silent_one(meshes: Opener) -> None:
    first, second, _ = meshes(3)
    second.send_sign(Phase.BUSY)
    assert named(first)[0] == "rank 2 silent at step 812, layer 17, combine (1.0 s)"


def test_all_silent_ranks_are_named(meshes: Opener) -> None:
    first, *_ = meshes(3)
    assert named(first)[0] == "ranks 1, 2 silent at step 812, layer 17, combine (1.0 s)"


def test_waiting_rank_gets_another_deadline(meshes: Opener) -> None:
    first, second = meshes(2)
    before_first(first, "poll", lambda _: (time.sleep(0.8 * PATIENCE), second.send_sign(Phase.WAITING)))
    reason, seconds = named(first)
    assert reason == "rank 1 silent at step 812, layer 17, combine (1.0 s)"
    assert seconds >= 1.7 * PATIENCE


def test_meetings_may_take_longer(meshes: Opener) -> None:
    """Each has loaded as long as it takes; without a meeting, the first plan of an epoch counts as one."""
    first, second = meshes(2)
    thread = later(1.5 * PATIENCE, lambda: second.gather(b"there"))
    assert first.gather(b"here") == [b"here", b"there"]
    thread.join()
    for mesh in (first, second):
        mesh._met = False
    thread = later(1.5 * PATIENCE, lambda: second.send(0, tag(1, Phase.PLAN)))
    assert wait(first, Phase.PLAN)[1] == tag(1, Phase.PLAN)
    thread.join()


@pytest.mark.parametrize("sign", [Phase.BUSY, Phase.WAITING])
def test_sign_is_not_a_frame(meshes: Opener, sign: Phase) -> None:
    """The due frame is found behind the sign, and nothing else treats the sign as a frame."""
    first, second = meshes(2)
    first.step = second.step = STEP - 1
    lockstep = Lockstep(first)
    second.send_sign(sign)
    while first.signs.of(1) is not sign:
        assert not lockstep.peer_started(STEP)
        assert first.arrived() == {}
    found: list[object] = []
    thread = later(0.0, lambda: found.append(Lockstep(second).agree(STEP, 3).num_tokens))
    while not lockstep.peer_started(STEP):
        first.check_peers()
    assert first.signs.of(1) is None
    assert lockstep.agree(STEP, 2).num_tokens == (2, 3)
    thread.join()
    assert found == [(2, 3)]
    # A meeting, and a failure.
    second.send_sign(sign)
    thread = later(0.0, lambda: second.gather(b"there"))
    assert first.gather(b"here") == [b"here", b"there"]
    thread.join()
    second.send_sign(sign)
    thread = later(0.0, lambda: second.fail("rank 1 out of memory"))
    assert named(first)[0] == "rank 1 out of memory"
    thread.join()


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        (tag(1, Phase.BUSY, epoch=3), "busy of rank 1, epoch 3, step 812"),
        (tag(0, Phase.BUSY), "busy of rank 0, epoch 4, step 812"),
        (tag(1, Phase.WAITING) + b"x", "waiting of rank 1, epoch 4, step 812"),
    ],
    ids=["epoch", "source", "longer"],
)
def test_sign_of_another_peer_is_a_wrong_frame(meshes: Opener, frame: bytes, found: str) -> None:
    first, second = meshes(2)
    second.send(0, frame)
    reason = named(first)[0]
    assert reason.startswith("rank 1 sent the wrong frame: expected combine of rank 1")
    assert reason.endswith(f"got {found}")
    assert first.signs.until(1) == 0.0


def test_sign_is_repeated_after_half_a_deadline_or_a_frame(meshes: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = meshes(2)
    now = [perf_counter()]
    monkeypatch.setattr(mesh_module, "perf_counter", lambda: now[0])
    said: list[int] = []
    wires = second._open_wires()
    send = wires.send

    def spy(peer: int, frame: Frame) -> bool:
        said.append(frame[3])
        return send(peer, frame)

    wires.send = spy  # type: ignore[method-assign]
    for sign in (Phase.BUSY, Phase.BUSY, Phase.WAITING, Phase.WAITING, Phase.BUSY):
        second.send_sign(sign)
    second.send(0, tag(1))
    for _ in range(2):
        second.send_sign(Phase.BUSY)
    now[0] += 0.6 * PATIENCE
    second.send_sign(Phase.BUSY)
    busy, waiting = Phase.BUSY, Phase.WAITING
    assert said == [busy, waiting, busy, Phase.COMBINE, busy, busy]


def test_sign_at_the_last_moment_counts(meshes: Opener) -> None:
    """The sign is read before a rank is named."""
    first, second = meshes(2)
    second.send_sign(Phase.BUSY)
    assert first._open_wires().poll(HANG_SECONDS)
    assert first.signs.of(1) is Phase.BUSY


def test_send_sign_never_fails(meshes: Opener) -> None:
    """Signs are sent in the middle of other work; a lost rank is named where its frame is due."""
    first, second = meshes(2)
    first.close()
    first.send_sign(Phase.BUSY)
    for _ in range(1000):
        second.send_sign(Phase.BUSY)
        second.send_sign(Phase.WAITING)
    second.fail("rank 1 has a bug")
    second.send_sign(Phase.BUSY)
    Mesh(rank=0, world_size=1).send_sign(Phase.BUSY)


def test_sign_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    signs, now = Signs(EPOCH, deadline=0.1, stall=0.3), [1.0]
    monkeypatch.setattr(liveness, "perf_counter", lambda: now[0])
    assert signs.take(1, memoryview(tag(1, Phase.WAITING)))
    assert not signs.take(2, b"mY")
    assert (signs.of(1), signs.of(2), signs.until(2)) == (Phase.WAITING, None, 0.0)
    assert signs.until(1) == 1.1
    assert signs.take(1, tag(1, Phase.BUSY))
    assert signs.allowed([1, 2], 0.1) == 0.3
    assert signs.allowed([2], 0.1) == 0.1
    now[0] = 1.35
    assert signs.of(1) is None
    assert signs.allowed([1], 0.1) == 0.3, "the earlier allowance must remain"
