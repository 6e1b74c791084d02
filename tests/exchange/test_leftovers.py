"""Files of killed ranks: none in /dev/shm and no folder, or the next rank removes them."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq
from tests.fleet import rank_context
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.membership import shared_files
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.rendezvous import MeshEndpoint
from moeyard_worker.exchange.membership.shared_files import Folder, SharedFile, make_file, sweep


def names() -> set[Path]:
    """Return the files of meshes on this host; tests may run concurrently."""
    return {*Path("/dev/shm").glob("moeyard-*"), *Path(tempfile.gettempdir()).glob("moeyard-*")}


def _rank(rank: int, pipe: Connection, directory: str | None = None) -> None:
    if directory is not None:
        tempfile.tempdir = shared_files.SHARED_DIRECTORY = directory
    mesh = Mesh(rank=rank, world_size=2, slab_bytes=1 << 16)
    assert mesh._folder is not None
    pipe.send((mesh.endpoint(), mesh._folder.path))
    mesh.connect(pipe.recv(), timeout=HANG_SECONDS)
    pipe.send("met")
    pipe.recv()


def test_killed_rank_leaves_nothing() -> None:
    context = rank_context()
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_rank, args=(i, pipes[i][1]), daemon=True) for i in range(2)]
    for process in ranks:
        process.start()
    try:
        answers: list[tuple[MeshEndpoint, str]] = [pipe.recv() for pipe, _ in pipes]
        endpoints = [endpoint for endpoint, _ in answers]
        mine = {Path(endpoint.slab_path) for endpoint in endpoints} | {Path(folder) for _, folder in answers}
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


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private directory in place of the host's, because concurrent tests sweep those. Socket paths must be short."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setattr(shared_files, "SHARED_DIRECTORY", name)
        yield Path(name)


def test_files_of_a_rank_killed_early_are_swept_later(directory: Path) -> None:
    context = rank_context()
    pipe, theirs = context.Pipe()
    rank = context.Process(target=_rank, args=(0, theirs, str(directory)), daemon=True)
    rank.start()
    try:
        endpoint, folder = pipe.recv()
        killed = {Path(endpoint.slab_path), Path(folder)}
        sweep()
        assert killed == set(directory.iterdir()), "files of a living rank must stay"
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join()
        assert killed == set(directory.iterdir())
        mesh = Mesh(rank=0, world_size=2, slab_bytes=1 << 16)
        assert not killed & set(directory.iterdir())
        assert Path(mesh.endpoint().slab_path) in directory.iterdir()
        mesh.close()
        assert not list(directory.iterdir())
    finally:
        rank.kill()


def test_only_unlocked_files_are_swept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, left, other = Folder(), directory / f"moeyard-sockets-{1:016x}", directory / "moeyard-sockets-notes"
    young, old = directory / f".moeyard-sockets-{2:016x}", directory / f".moeyard-slab-{3:032x}"
    (left / "sockets").mkdir(parents=True)
    for path in (other, young, old):
        path.touch()
    path, fd = make_file(str(directory))
    now = time.time()
    assert sweep() == [left]
    assert sorted(directory.iterdir()) == sorted((Path(held.path), Path(path), other, young, old))
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    os.close(fd)
    sweep()
    assert sorted(directory.iterdir()) == sorted((Path(held.path), other))
    held.remove()
    assert list(directory.iterdir()) == [other]


def test_failed_mesh_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
