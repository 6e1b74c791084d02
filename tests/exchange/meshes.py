"""Meshes of one fleet in one process; ranks are threads where they must run concurrently."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.rendezvous import MeshEndpoint

Opener = Callable[..., list[Mesh]]


@contextmanager
def opener(**defaults: object) -> Iterator[Opener]:
    """Yield a function that opens the meshes of a fleet, with these options and connected by default.

    All meshes are closed at the end.
    """
    opened: list[Mesh] = []

    def open_all(world_size: int, *, connected: bool = True, **options: object) -> list[Mesh]:
        options = {**defaults, **options}
        ranks = [Mesh(rank=rank, world_size=world_size, **options) for rank in range(world_size)]  # type: ignore[arg-type]
        opened.extend(ranks)
        if connected:
            assert connect_all(ranks) == [None] * world_size
        return ranks

    try:
        yield open_all
    finally:
        for mesh in opened:
            mesh.close()


def before_first(mesh: Mesh, name: str, act: Callable[[Any], object]) -> None:
    """Call `act` once with the first argument, before the next call of method `name` of the mesh's wires."""
    wires = mesh._wires
    call = getattr(wires, name)

    def first(*args: Any) -> Any:
        setattr(wires, name, call)
        act(args[0])
        return call(*args)

    setattr(wires, name, first)


def connect_all(
    ranks: Sequence[Mesh], endpoints: list[MeshEndpoint] | None = None, timeout: float = HANG_SECONDS
) -> list[str | None]:
    """Connect all ranks at once; return the error of each, if any."""
    endpoints = endpoints or [mesh.endpoint() for mesh in ranks]
    return failures_of(*(functools.partial(mesh.connect, endpoints, timeout) for mesh in ranks))


def failures_of(*calls: Callable[[], object]) -> list[str | None]:
    """Make all calls at once, each in a thread; return the ExchangeError of each, if any."""
    errors: list[str | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except ExchangeError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
