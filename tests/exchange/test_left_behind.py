"""What a rank leaves behind that is killed: nothing in /dev/shm and no folder, or what the next one takes away."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from moeyard_worker.exchange.leftovers import Folder, make_file, sweep
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.rendezvous import MeshEndpoint
from moeyard_worker.exchange.slab import SharedFile


def names() -> set[Path]:
    """What meshes have named on this host; other tests may run beside this one."""
    return {*Path("/dev/shm").glob("moeyard-*"), *Path(tempfile.gettempdir()).glob("moeyard-*")}


def _rank(rank: int, pipe: Connection) -> None:
    mesh = Mesh(rank=rank, world_size=2, slab_bytes=1 << 16)
    assert mesh._folder is not None
    pipe.send((mesh.endpoint(), mesh._folder.path))
    mesh.connect(pipe.recv(), timeout=60)
    pipe.send("met")
    pipe.recv()


def test_a_rank_that_is_killed_leaves_nothing() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_rank, args=(i, pipes[i][1]), daemon=True) for i in range(2)]
    for process in ranks:
        process.start()
    try:
        told: list[tuple[MeshEndpoint, str]] = [pipe.recv() for pipe, _ in pipes]
        endpoints = [endpoint for endpoint, _ in told]
        mine = {Path(endpoint.slab_path) for endpoint in endpoints} | {Path(folder) for _, folder in told}
        assert len(mine) == 4
        assert mine <= names()
        for pipe, _ in pipes:
            pipe.send(endpoints)
        assert [pipe.recv() for pipe, _ in pipes] == ["met", "met"]
        for process in ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert not mine & names()
    finally:
        for process in ranks:
            process.kill()


def test_what_was_killed_before_it_met_goes_with_the_next_one() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    rank = context.Process(target=_rank, args=(0, theirs), daemon=True)
    rank.start()
    try:
        endpoint, folder = pipe.recv()
        killed = {Path(endpoint.slab_path), Path(folder)}
        sweep()
        assert killed <= names(), "they were taken from a rank that lives"
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join()
        assert killed <= names()
        mesh = Mesh(rank=0, world_size=2, slab_bytes=1 << 16)
        assert not killed & names()
        assert Path(mesh.endpoint().slab_path) in names()
        mesh.close()
        assert Path(mesh.endpoint().slab_path) not in names()
    finally:
        rank.kill()


def test_only_what_nobody_holds_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, left, other = Folder(), tmp_path / f"moeyard-sockets-{1:016x}", tmp_path / "moeyard-sockets-notes"
    young, old = tmp_path / f".moeyard-sockets-{2:016x}", tmp_path / f".moeyard-slab-{3:032x}"
    (left / "sockets").mkdir(parents=True)
    for path in (other, young, old):
        path.touch()
    path, fd = make_file(str(tmp_path))
    now = time.time()
    assert set(sweep()) & set(tmp_path.iterdir()) == set()
    assert sorted(tmp_path.iterdir()) == sorted((Path(held.path), Path(path), other, young, old))
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    os.close(fd)
    sweep()
    assert sorted(tmp_path.iterdir()) == sorted((Path(held.path), other))
    held.remove()
    assert list(tmp_path.iterdir()) == [other]


def test_a_mesh_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    create = SharedFile.create

    def note(size: int) -> SharedFile:
        shared = create(size)
        made.append(Path(shared.path))
        return shared

    monkeypatch.setattr(SharedFile, "create", staticmethod(note))
    with pytest.raises(zmq.ZMQError, match="Cannot assign requested address"):
        Mesh(rank=0, world_size=2, slab_bytes=1 << 16, host="192.0.2.1")
    assert len(made) == 1
    assert not made[0].exists()
