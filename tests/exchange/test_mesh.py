"""Strict frames and named failures, with all ranks of a mesh in one process."""

import contextlib
import functools
import os
import select
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import msgpack
import pytest
import zmq
from tests.exchange.meshes import Opener, before_first, connect_all, failures_of, opener
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.agreement import SETTLED, Agreement, Finding, PoisonFrame, encode_poison
from moeyard_worker.exchange.membership.frames import (
    NO_LAYER,
    Handshake,
    Phase,
    Tag,
    encode_handshake,
    encode_tag,
    pack_tag,
)
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.rendezvous import MeshEndpoint
from moeyard_worker.exchange.membership.shared_files import SharedFile

STEP, LAYER, EPOCH = 812, 17, 4


@pytest.fixture
def meshes() -> Iterator[Opener]:
    """Open the meshes of one fleet (connected by default), and close them all at the end."""
    with opener(deadline=30.0, epoch=EPOCH, slab_bytes=4096) as open_all:

        def open_in_step(world_size: int, *, connected: bool = True, **options: object) -> list[Mesh]:
            ranks = open_all(world_size, connected=connected, **options)
            for mesh in ranks if connected else ():
                mesh.step = STEP
            return ranks

        yield open_in_step


def receive(mesh: Mesh, phase: Phase = Phase.COMBINE) -> list[bytes]:
    return [bytes(frame) for frame in mesh.recv_all(phase, layer=LAYER, since=perf_counter())]


def tag(source: int, *, epoch: int = EPOCH, step: int = STEP, layer: int = LAYER, phase: int = Phase.COMBINE) -> bytes:
    return pack_tag(epoch, step, layer, phase, source)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_frames_arrive_by_rank_and_in_order(meshes: Opener, transport: str) -> None:
    ranks = meshes(3, transport=transport)
    for peer in (2, 1):
        ranks[peer].send(0, tag(peer, phase=Phase.DISPATCH) + b"first %d" % peer)
        ranks[peer].send(0, tag(peer) + b"second %d" % peer)
    assert [frame[20:] for frame in receive(ranks[0], Phase.DISPATCH)] == [b"", b"first 1", b"first 2"]
    assert [frame[20:] for frame in receive(ranks[0])] == [b"", b"second 1", b"second 2"]


OLD_NEWS = PoisonFrame(round=SETTLED, finding=Finding(step=1, place=0, ranks=(2,), reason="old news"))
WRONG = {
    "stale_step": (tag(1, step=811), "combine of rank 1, epoch 4, step 811, layer 17"),
    "step_ahead": (tag(1, step=813), "combine of rank 1, epoch 4, step 813, layer 17"),
    "layer": (tag(1, layer=18), "combine of rank 1, epoch 4, step 812, layer 18"),
    "phase": (tag(1, phase=Phase.DISPATCH), "dispatch of rank 1, epoch 4, step 812, layer 17"),
    "epoch": (tag(1, epoch=3), "combine of rank 1, epoch 3, step 812, layer 17"),
    "source": (tag(2), "combine of rank 2, epoch 4, step 812, layer 17"),
    "plan": (tag(1, phase=Phase.PLAN, layer=NO_LAYER), "plan of rank 1, epoch 4, step 812"),
    "short": (b"mY", "no frame: a frame of 2 bytes, a tag has 20"),
    "noise": (b"x" * 64, "no frame: a frame starts with b'mY', got b'xx'"),
    "poison_of_other_epoch": (
        encode_poison(Tag(epoch=3, step=1, layer=None, phase=Phase.POISON, source=1), OLD_NEWS),
        "poison of rank 1, epoch 3, step 1",
    ),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("frame", "found"), WRONG.values(), ids=WRONG)
def test_wrong_frame_is_named_on_every_rank(meshes: Opener, transport: str, frame: bytes, found: str) -> None:
    ranks = meshes(3, transport=transport)
    ranks[1].send(0, frame)
    expected = f"rank 1 sent the wrong frame: expected combine of rank 1, epoch 4, step 812, layer 17, got {found}"
    assert failures_of(*(functools.partial(receive, mesh) for mesh in ranks)) == [expected] * 3
    with pytest.raises(ExchangeError, match="wrong frame"):
        ranks[0].send(1, tag(0))


def test_duplicate_frame_is_named(meshes: Opener) -> None:
    ranks = meshes(2)
    for _ in range(2):
        ranks[1].send(0, tag(1, phase=Phase.DISPATCH))
    receive(ranks[0], Phase.DISPATCH)
    with pytest.raises(ExchangeError, match=r"expected combine of rank 1, .*, got dispatch of rank 1"):
        receive(ranks[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_silence_is_named_at_the_deadline(meshes: Opener, transport: str) -> None:
    ranks = meshes(4, transport=transport, deadline=1.0)
    ranks[1].send(0, tag(1))
    ranks[2].send(0, tag(2))
    start = perf_counter()
    with pytest.raises(ExchangeError) as raised:
        receive(ranks[0])
    assert str(raised.value) == "rank 3 silent at step 812, layer 17, combine (1.0 s)"
    assert perf_counter() - start >= 1.0
    # No rank answered: each absent one adopts the settled finding later.
    for other in ranks[1:]:
        wait_for_event(other)
        with pytest.raises(ExchangeError, match=r"^rank 3 silent at step 812, layer 17, combine \(1.0 s\)$"):
            other.check_peers()


def test_all_silent_ranks_are_named(meshes: Opener) -> None:
    ranks = meshes(4, deadline=1.0)
    ranks[2].send(0, tag(2))
    with pytest.raises(ExchangeError, match=r"^ranks 1, 3 silent at step 812, layer 17, combine \(1.0 s\)$"):
        receive(ranks[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_frames_sent_before_a_loss_count(meshes: Opener, transport: str) -> None:
    ranks = meshes(3, transport=transport, deadline=2.0)
    for peer in (1, 2):
        ranks[peer].send(0, tag(peer))
    ranks[1].close()
    receive(ranks[0])
    wait_until_lost(ranks[0], 1)
    with pytest.raises(ExchangeError, match=r"^rank 1 lost after step 812$"):
        ranks[0].check_peers()
    with pytest.raises(ExchangeError, match=r"^rank 1 lost after step 812$"):
        ranks[0].recv_all(Phase.PLAN, layer=None, since=perf_counter())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_send_to_a_lost_peer_is_named(meshes: Opener, transport: str) -> None:
    ranks = meshes(2, transport=transport)
    ranks[0].close()
    wait_for_event(ranks[1])
    with pytest.raises(ExchangeError, match=r"^rank 0 lost at step 812, layer 17, combine$"):
        send_many(ranks[1])


def send_many(mesh: Mesh) -> None:
    """Send more than any queue holds, because the event of an end may precede the queue's."""
    for _ in range(1000):
        mesh.send(0, tag(mesh.rank))


def wait_for_event(mesh: Mesh) -> None:
    """Block like an idle engine."""
    poller = zmq.Poller()
    for end in mesh.poll_sockets():
        poller.register(end, zmq.POLLIN)
    assert poller.poll(1000 * HANG_SECONDS), "no event"


def test_first_reason_reaches_all_ranks_and_stays(meshes: Opener) -> None:
    ranks = meshes(3)
    reason = "rank 1 out of memory at step 812"

    def wait(mesh: Mesh) -> None:
        wait_for_event(mesh)
        mesh.check_peers()

    calls = [functools.partial(wait, ranks[0]), lambda: ranks[1].fail(reason), functools.partial(wait, ranks[2])]
    assert failures_of(*calls) == [reason, None, reason]
    assert ranks[1].fail("something later") == reason
    assert failures_of(*(mesh.check_peers for mesh in ranks)) == [reason] * 3


def wait_until_lost(mesh: Mesh, *peers: int) -> None:
    """Wait until the end of a connection is seen, so that waits for the peer's frame find it lost."""
    wires = mesh._wires
    assert wires is not None
    while not wires.lost.keys() >= set(peers):
        assert wires.poll(HANG_SECONDS), "no event"


PLACES = [(None, Phase.PLAN), (1, Phase.DISPATCH), (1, Phase.COMBINE), (0, Phase.COMBINE), (3, Phase.DISPATCH)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("world_size", "victims", "expected"),
    [
        (3, (2,), "rank 2 lost at step 812, plan"),
        (5, (0,), "rank 0 lost at step 812, layer 0, combine"),
        (5, (3, 4), "rank 3 lost at step 812, plan"),
        (8, (1, 7), "rank 1 lost at step 812, plan"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_crossing_findings_settle_on_one(
    meshes: Opener, transport: str, world_size: int, victims: tuple[int, ...], expected: str
) -> None:
    """Each survivor misses the dead rank at a different place, and has its finding before it reads another."""
    ranks = meshes(world_size, transport=transport)
    for victim in victims:
        ranks[victim].close()
    survivors = [mesh for mesh in ranks if mesh.rank not in victims]
    barrier = threading.Barrier(len(survivors), timeout=HANG_SECONDS)
    calls = []
    for mesh in survivors:
        wait_until_lost(mesh, *victims)
        before_first(mesh, "send", lambda _: barrier.wait())
        layer, phase = PLACES[mesh.rank % len(PLACES)]
        calls.append(functools.partial(mesh.recv_all, phase, layer=layer, since=perf_counter()))
    assert failures_of(*calls) == [expected] * len(survivors)
    assert {mesh.failure for mesh in survivors} == {expected}


class Died(Exception):
    """Ends a rank's thread in place of its process."""


def test_finding_sent_to_one_rank_reaches_all(meshes: Opener) -> None:
    """Rank 1 has the earliest finding, sends it to rank 0, and dies before rank 2; both others have their own."""
    ranks = meshes(4)
    ranks[3].close()
    barrier = threading.Barrier(3, timeout=HANG_SECONDS)

    def die(_: int) -> None:
        ranks[1].close()
        raise Died

    def die_at_the_second(_: int) -> None:
        barrier.wait()
        before_first(ranks[1], "send", die)

    before_first(ranks[1], "send", die_at_the_second)
    for mesh in (ranks[0], ranks[2]):
        before_first(mesh, "send", lambda _: barrier.wait())
    calls = []
    for rank, (layer, phase) in enumerate([(1, Phase.DISPATCH), (None, Phase.PLAN), (1, Phase.COMBINE)]):
        wait_until_lost(ranks[rank], 3)
        calls.append(functools.partial(ranks[rank].recv_all, phase, layer=layer, since=perf_counter()))

    def until_dead() -> None:
        with pytest.raises(Died):
            calls[1]()

    expected = "rank 3 lost at step 812, plan"
    assert failures_of(calls[0], until_dead, calls[2]) == [expected, None, expected]


@pytest.mark.parametrize("asleep", [1, 2], ids=["early", "late"])
def test_absent_rank_adopts_the_settled_finding(meshes: Opener, asleep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the others waits one round at most, even if the absent rank knows of an earlier failure."""
    give_up, given_up = Agreement.give_up, []
    monkeypatch.setattr(Agreement, "give_up", lambda agreement: (given_up.append(agreement), give_up(agreement)))
    ranks = meshes(4, deadline=4.0)
    ranks[3].close()
    awake = [mesh for mesh in ranks[:3] if mesh.rank != asleep]
    for mesh in ranks[:3]:
        wait_until_lost(mesh, 3)
    calls = [functools.partial(mesh.recv_all, Phase.COMBINE, layer=1, since=perf_counter()) for mesh in awake]
    expected = "rank 3 lost at step 812, layer 1, combine"
    assert failures_of(*calls) == [expected] * 2
    assert 0 < len(given_up) <= 2
    with pytest.raises(ExchangeError, match=f"^{expected}$"):
        ranks[asleep].recv_all(Phase.PLAN, layer=None, since=perf_counter())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary folders; its name is short, because socket paths must be."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_files_are_private_and_gone_once_connected(meshes: Opener, transport: str, folder: Path) -> None:
    ranks = meshes(3, connected=False, transport=transport)
    endpoints = [mesh.endpoint() for mesh in ranks]
    slabs = [Path(endpoint.slab_path) for endpoint in endpoints if endpoint.slab_path]
    assert len(slabs) == (3 if transport == "shm" else 0)
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()] == [0o700] * len(slabs)
    for slab in slabs:
        assert slab.parent == Path("/dev/shm")
        assert stat.S_IMODE(os.stat(slab).st_mode) == 0o600
    assert connect_all(ranks) == [None] * 3
    assert not any(slab.exists() for slab in slabs)
    assert not list(folder.iterdir())
    for mesh in ranks:
        assert sorted(mesh.peer_slabs) == (list(mesh.peers) if transport == "shm" else [])
    if transport == "shm":
        ranks[0].own_slab.memory[5] = 99  # type: ignore[union-attr]
        assert ranks[2].peer_slabs[0].memory[5] == 99


def test_files_are_gone_after_a_failed_connect(meshes: Opener, folder: Path) -> None:
    (mesh, other) = meshes(2, connected=False)
    endpoints = [mesh.endpoint(), other.endpoint()]
    with pytest.raises(ExchangeError, match=r"^rank 1 did not answer within 0.1 s of connecting$"):
        mesh.connect(endpoints, timeout=0.1)
    mesh.close()
    other.close()
    assert not list(folder.iterdir())
    assert not any(Path(endpoint.slab_path).exists() for endpoint in endpoints)


def test_rank_that_exits_before_connecting_is_named(meshes: Opener) -> None:
    gone, mesh = meshes(2, connected=False, transport="tcp")
    endpoints = [gone.endpoint(), mesh.endpoint()]
    gone.close()
    with pytest.raises(ExchangeError, match=r"^rank 0 refused the connection while connecting$"):
        mesh.connect(endpoints, timeout=HANG_SECONDS)


def test_endpoint_has_plain_values(meshes: Opener) -> None:
    endpoint = meshes(3)[1].endpoint()
    back = msgpack.unpackb(msgpack.packb(asdict(endpoint)), use_list=False)
    assert MeshEndpoint(**back) == endpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "rank 1 has epoch 3, rank 0 has 4"),
        ({"fingerprint": "tcp top_k=8"}, "rank 1 has fingerprint 'tcp top_k=8', rank 0 has 'shm top_k=4'"),
        ({"slab_bytes": 8}, "rank 1 has slab_bytes 8, rank 0 has 4096"),
        ({"world_size": 3}, "rank 1 has world_size 3, rank 0 has 2"),
        ({"rank": 0}, "endpoint 1 is of rank 0: give them in rank order"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_disagree_never_connect(meshes: Opener, change: dict[str, object], message: str) -> None:
    ranks = meshes(2, connected=False, fingerprint="top_k=4")
    endpoints = [ranks[0].endpoint(), replace(ranks[1].endpoint(), **change)]  # type: ignore[arg-type]
    with pytest.raises(ExchangeError) as raised:
        ranks[0].connect(endpoints)
    assert str(raised.value) == message


def test_rank_without_the_token_is_named(meshes: Opener) -> None:
    ranks = meshes(2, connected=False)
    endpoints = [ranks[0].endpoint(), ranks[1].endpoint()]
    forged = [replace(endpoints[0], token="guess"), endpoints[1]]
    ranks[1]._endpoint = forged[1]
    given = zip(ranks, (endpoints, forged), strict=True)
    errors = failures_of(*(functools.partial(mesh.connect, to, HANG_SECONDS) for mesh, to in given))
    assert errors[0] == "what connected as rank 1 of 2, epoch 4, is rank 1 of 2, epoch 4, without the token"


def test_strangers_are_refused_and_change_nothing(meshes: Opener) -> None:
    ranks = meshes(2, transport="tcp")
    with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.IMMEDIATE, 1)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(ranks[0].endpoint().tcp[1])
        handshake = Handshake(rank=1, world_size=2, epoch=EPOCH, token=ranks[0].endpoint().token)
        stranger.setsockopt(zmq.SNDTIMEO, 1000)
        with contextlib.suppress(zmq.Again):
            stranger.send(encode_handshake(handshake))
        assert monitor.poll(1000 * HANG_SECONDS)
        stranger.disable_monitor()
        monitor.close()
    for _ in range(20):
        ranks[1].send(0, tag(1))
        assert receive(ranks[0])[1] == tag(1)
        ranks[0].check_peers()


def test_a_known_end_does_not_end_another_wait(meshes: Opener) -> None:
    """The heartbeat's monitor reports an end that the frames' monitor has reported, too."""
    mesh, *others = meshes(3, transport="tcp")
    wires = mesh._open_wires()
    assert wires.pulse is not None
    second = wires.pulse.monitors[1]
    others[0].close()
    wires.lost[1] = "lost"
    assert second.poll(1000 * HANG_SECONDS), "no second report"
    begun = perf_counter()
    assert not wires.poll(0.2)
    assert perf_counter() - begun >= 0.2


@pytest.mark.parametrize("phase", [Phase.COMBINE, Phase.PLAN], ids=["in a step", "between steps"])
def test_repeated_strangers_lengthen_no_wait(meshes: Opener, phase: Phase) -> None:
    first, _ = meshes(2, transport="tcp", deadline=20.0, stall=0.3)
    host, port = first.endpoint().tcp[1].removeprefix("tcp://").rsplit(":", 1)
    over = threading.Event()

    def connect_repeatedly() -> None:
        limit = perf_counter() + HANG_SECONDS
        while not over.wait(0.01) and perf_counter() < limit:
            socket.create_connection((host, int(port))).close()

    repeating = threading.Thread(target=connect_repeatedly)
    repeating.start()
    try:
        with pytest.raises(ExchangeError, match=r"^rank 1 silent at"):
            first.recv_all(phase, layer=None if phase is Phase.PLAN else LAYER, since=perf_counter())
        assert repeating.is_alive(), "the wait must end before the connections do"
    finally:
        over.set()
        repeating.join()


class Link(threading.Thread):
    """A TCP connection to `address` through this process; after `cut`, it forwards and closes nothing.

    `heartbeat` is set once a heartbeat has passed; earlier, neither end expects one.
    """

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._knife, self._stopped = socket.socketpair()
        self.heartbeat = threading.Event()

    def run(self) -> None:
        ends = [self._listener.accept()[0], socket.create_connection(self._target)]
        other = dict(zip(ends, reversed(ends), strict=True))
        while self._stopped not in (ready := select.select([*ends, self._stopped], [], [])[0]):
            for end in ready:
                passing = end.recv(65536)
                other[end].sendall(passing)
                if b"\x04PING" in passing:
                    self.heartbeat.set()
        self._stopped.recv(1)  # until the test ends
        self._stopped.recv(1)
        for open_socket in (*ends, self._listener, self._stopped):
            open_socket.close()

    def cut(self) -> None:
        self._knife.send(b"x")

    def close(self) -> None:
        self._knife.close()
        self.join()


def test_both_ends_notice_a_dead_link_of_an_idle_fleet(meshes: Opener) -> None:
    """Each end asks for the other's heartbeats on separate connections."""
    ranks = meshes(2, connected=False, transport="tcp", deadline=1.0)
    pairs = [mesh._wires._sockets[1 - mesh.rank] for mesh in ranks]
    assert [pair.getsockopt(zmq.HEARTBEAT_IVL) for pair in pairs] == [0, 0], "libzmq aborts if one ends badly"
    endpoints = [mesh.endpoint() for mesh in ranks]
    with contextlib.ExitStack() as stack:
        addresses = endpoints[0].tcp[1], endpoints[1].pulse, endpoints[0].pulse
        links = [stack.enter_context(contextlib.closing(Link(address))) for address in addresses]
        for link in links:
            link.start()
        pair, there, back = links
        seen = [
            [endpoints[0], replace(endpoints[1], pulse=there.address)],
            [replace(endpoints[0], tcp=("", pair.address), pulse=back.address), endpoints[1]],
        ]
        assert not any(failures_of(*(functools.partial(mesh.connect, seen[mesh.rank], HANG_SECONDS) for mesh in ranks)))
        for link in (there, back):
            assert link.heartbeat.wait(HANG_SECONDS), "no heartbeat"
        for link in links:
            link.cut()
        for mesh in ranks:
            wait_until_lost(mesh, 1 - mesh.rank)
        assert failures_of(*(mesh.check_peers for mesh in ranks)) == [f"rank {r} lost after step 0" for r in (1, 0)]


def test_mesh_of_one_opens_nothing(meshes: Opener) -> None:
    (mesh,) = meshes(1)
    assert mesh.poll_sockets() == []
    assert mesh.own_slab is None
    assert mesh.recv_all(Phase.COMBINE, layer=LAYER, since=perf_counter()) == [b""]
    mesh.check_peers()
    mesh.fail("broken")
    with pytest.raises(ExchangeError, match="broken"):
        mesh.check_peers()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "one concrete address, got '0.0.0.0'"),
        ({"deadline": 0}, "deadline must be positive, got 0"),
        ({"transport": "udp"}, "got 'udp'"),
    ],
    ids=["wildcard", "deadline", "transport"],
)
def test_bad_options_are_refused_and_leave_nothing(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(rank=0, world_size=2, **options)  # type: ignore[arg-type]


def test_long_path_of_temporary_files_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ValueError, match="at most 107 bytes"):
        Mesh(rank=0, world_size=2)
    assert not list(long.iterdir())


def test_only_the_given_address_listens(meshes: Opener) -> None:
    ranks = meshes(3, connected=False, transport="tcp", host="127.0.0.1")
    addresses = [address for mesh in ranks for address in mesh.endpoint().tcp if address]
    assert len(addresses) == 3
    assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)


@pytest.mark.parametrize("rank", [0, 1])
def test_foreign_address_is_an_error_on_every_rank(rank: int) -> None:
    """The last rank binds only the socket for heartbeats, and an error must not hang. 203.0.113.0/24 is reserved (RFC
    5737)."""
    ended: list[BaseException] = []

    def open_it() -> None:
        try:
            Mesh(rank=rank, world_size=2, host="203.0.113.1", stall=5.0, transport="tcp")
        except BaseException as error:  # boundary: the test examines it
            ended.append(error)

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert [type(error) for error in ended] == [zmq.ZMQError]


def test_error_without_room_has_both_numbers() -> None:
    with pytest.raises(OSError, match=r"no room for \d+ KiB in /dev/shm \(\d+ KiB free\)"):
        SharedFile.create(1 << 50)


def test_memory_with_another_size_is_not_mapped() -> None:
    shared = SharedFile.create(4096)
    try:
        with pytest.raises(OSError, match="4096 bytes of user"):
            SharedFile.open(shared.path, 8192)
    finally:
        shared.unlink()
    shared.unlink()


def test_equal_tags_have_equal_bytes() -> None:
    assert tag(3) == encode_tag(Tag(epoch=EPOCH, step=STEP, layer=LAYER, phase=Phase.COMBINE, source=3))
