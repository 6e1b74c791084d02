"""What a rank leaves behind that is killed: nothing in /dev/shm and no folder, once its mesh has met."""

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.rendezvous import MeshEndpoint
from moeyard_worker.exchange.slab import SharedFile


def names() -> set[Path]:
    """What meshes have named on this host; other tests may run beside this one."""
    return {*Path("/dev/shm").glob("moeyard-*"), *Path(tempfile.gettempdir()).glob("moeyard-*")}


def _rank(rank: int, pipe: Connection) -> None:
    mesh = Mesh(rank=rank, world_size=2, slab_bytes=1 << 16)
    pipe.send((mesh.endpoint(), mesh._own_directory))
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
