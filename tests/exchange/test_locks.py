"""Strangers at a TCP port of working ranks are refused and counted, and no rank dies."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest
import zmq
from tests.exchange.meshes import connect_all
from tests.limits import HANG_SECONDS
from tests.strangers import bad_messages, mechanism, one_byte_and_gone, say, try_key

from moeyard_worker.exchange.membership.frames import Phase, pack_tag
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.wires import MeshLock
from moeyard_worker.keys import KeyPair
from moeyard_worker.refusals import LINES, SECONDS
from moeyard_worker.sockets import make_keys

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 10.0
STRANGERS = 50


class Pair:
    """Two ranks in this process, over TCP."""

    def __init__(self, lock: MeshLock | None, *others: MeshLock | None) -> None:
        locks = (lock, *(others or (lock,)))
        self.ranks = [
            Mesh(rank=r, world_size=2, deadline=DEADLINE, transport="tcp", slab_bytes=4096, lock=each)
            for r, each in enumerate(locks)
        ]
        self.address = self.ranks[0].endpoint().tcp[1]
        self.step = 0

    def connect(self, timeout: float = HANG_SECONDS) -> list[str]:
        """Connect both at once; return their errors."""
        return [error for error in connect_all(self.ranks, timeout=timeout) if error is not None]

    def exchange(self) -> None:
        """Send one frame each way, as in a step."""
        self.step += 1
        for mesh in self.ranks:
            mesh.step = self.step
        for rank, mesh in enumerate(self.ranks):
            mesh.send(1 - rank, pack_tag(0, self.step, 0, Phase.COMBINE, rank) + b"rows")
        for mesh in self.ranks:
            mesh.recv_all(Phase.COMBINE, layer=0, since=perf_counter())
            mesh.check_peers()

    def close(self) -> None:
        for mesh in self.ranks:
            mesh.close()


@pytest.fixture
def fleet_lock(request: pytest.FixtureRequest) -> MeshLock:
    """A lock with `--mesh-encryption` set."""
    return MeshLock(keys=make_keys().of_worker(), encrypt=request.param == "on")


@pytest.fixture
def pair(fleet_lock: MeshLock) -> Iterator[Pair]:
    made = Pair(fleet_lock)
    yield made
    made.close()


def drill(encryption: str) -> dict[str, int]:
    """Return what working ranks refused while strangers came and left. Run in a separate process, which may abort."""
    lock = None if encryption == "none" else MeshLock(keys=make_keys().of_worker(), encrypt=encryption == "on")
    pair = Pair(lock)
    if lock is not None:
        # Also before the peer connects, because a stranger must not take its place.
        one_byte_and_gone(pair.address)
    assert pair.connect() == []
    for _ in range(STRANGERS):
        one_byte_and_gone(pair.address)
        pair.exchange()
    for parts in bad_messages(b"PAIR"):
        say(pair.address, *parts)
        pair.exchange()
    # Wait for a heartbeat of the peers: one without a connection once aborted a rank.
    interval = pair.ranks[1]._wires.pulse._dealers[0].getsockopt(zmq.HEARTBEAT_IVL)  # type: ignore[union-attr]
    assert isinstance(interval, int)
    until = perf_counter() + (1.5 * interval / 1000 if encryption == "none" else 0)
    while True:
        pair.exchange()
        if perf_counter() >= until:
            break
    refused = dict(pair.ranks[0].refused)
    pair.close()
    return refused


@pytest.mark.sampled(0)
@pytest.mark.parametrize("encryption", ["on", "off", "none"])
def test_strangers_kill_no_working_rank(encryption: str) -> None:
    """A PAIR handshake, one byte and the end of the connection once aborted a rank: `Assertion failed: !_io_error`."""
    code = f"import json, test_locks\ntest_locks.DEADLINE = 2.0\nprint(json.dumps(test_locks.drill({encryption!r})))"
    path = [str(ROOT), *(str(ROOT / f) for f in ("worker", "kernels")), str(Path(__file__).parent)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{code}"]
    begun = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = json.loads(done.stdout)
    if encryption != "none":
        assert refused.keys() == {"handshake"}
        assert refused["handshake"] >= STRANGERS + 1
        # Many strangers cause few log lines.
        assert done.stderr.count("refused (handshake)") <= LINES * (1 + (perf_counter() - begun) / SECONDS)


@pytest.mark.parametrize("fleet_lock", ["on"], indirect=True)
def test_unknown_key_is_refused_and_counted(pair: Pair, fleet_lock: MeshLock) -> None:
    assert pair.connect() == []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context:
        # The public key alone is not enough.
        event = try_key(context, zmq.PAIR, pair.address, fleet_lock.keys.own.public)
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    while not pair.ranks[0].refused:
        pair.exchange()
    assert pair.ranks[0].refused == {"unknown_key": 1}
    pair.exchange()


@pytest.mark.parametrize("fleet_lock", ["on", "off"], indirect=True)
def test_rank_of_another_fleet_is_refused(fleet_lock: MeshLock) -> None:
    pair = Pair(fleet_lock, MeshLock(keys=make_keys().of_worker(), encrypt=fleet_lock.encrypt))
    try:
        errors = pair.connect(timeout=1.0)
        assert len(errors) == 2, errors
        while not pair.ranks[0].refused:
            pair.ranks[0]._wires.poll(0.05)
    finally:
        pair.close()


@pytest.mark.parametrize("fleet_lock", ["on"], indirect=True)
def test_keys_protect_tcp_only(fleet_lock: MeshLock) -> None:
    """Doorbells between ranks of one host use a private directory, at no cost."""
    ranks = [Mesh(rank=r, world_size=2, deadline=DEADLINE, slab_bytes=4096, lock=fleet_lock) for r in (0, 1)]
    pair = Pair.__new__(Pair)
    pair.ranks, pair.step = ranks, 0
    try:
        assert mechanism(ranks[0].endpoint().tcp[1]) == b"CURVE".ljust(20, b"\0")
        assert pair.connect() == []
        pair.exchange()
        mechanisms = [mesh._wires._sockets[1 - r].getsockopt(zmq.MECHANISM) for r, mesh in enumerate(ranks)]
        assert mechanisms == [zmq.CURVE, zmq.NULL], "set after the unix socket was bound, and not used by its peer"
    finally:
        pair.close()


def test_plain_password_reveals_no_key() -> None:
    keys = make_keys().of_worker()
    password = MeshLock(keys=keys, encrypt=False).password
    assert keys.own.secret not in password
    assert password == MeshLock(keys=keys, encrypt=False).password
    assert password != MeshLock(keys=make_keys().of_worker(), encrypt=False).password


def test_repr_shows_no_key() -> None:
    keys = make_keys()
    said = f"{keys} {keys.of_worker()} {keys.of_router()} {MeshLock(keys=keys.of_worker())}"
    for key in (keys.workers, keys.routers):
        assert key.public.decode() not in said
        assert key.secret.decode() not in said
    with pytest.raises(ValueError, match="a key has 40 characters, got 5 and 6"):
        KeyPair(public=b"short", secret=b"secret")
