"""One of several router processes that share a port, and what it says to the process that started it.

It sends `Ready` once every worker has decoded, `FleetFailed` when the fleet is lost, `Replaced` when it has taken other
workers, and takes `Replace` and `Stop`. When whoever started it is gone, it stops.
"""

import asyncio
import signal
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer
from moeyard_router.http.siblings import Siblings


@dataclass(frozen=True, slots=True)
class Ready:
    """Every worker has decoded for this router."""


@dataclass(frozen=True, slots=True)
class FleetFailed:
    """This router has lost the fleet, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The workers of the last `Replace` are the ones in use."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Go on with these workers."""

    workers: tuple[WorkerAddress, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Begin an orderly end; a second one ends open streams at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one process: `index` of `count`, the address that all listen on, the directory of their sockets."""

    index: int
    count: int
    family: int
    address: tuple[Any, ...]
    directory: Path


def listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    """A listening socket of its own on an address that others listen on too; the kernel deals out connections."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(address)
    sock.listen(1024)
    return sock


def run_router_process(config: RouterConfig, seat: Seat, pipe: Connection) -> None:
    """The whole life of such a process. Ctrl-C reaches it through whoever started it, who hears it too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = RouterServer(
        config,
        listen(seat.family, seat.address),
        on_ready=lambda: pipe.send(Ready()),
        on_failed=lambda reason: pipe.send(FleetFailed(reason)),
        siblings=Siblings(seat.directory, index=seat.index, count=seat.count),
    )

    def told() -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            message = Stop()
        if isinstance(message, Replace):
            server.replace_workers(message.workers, lambda: pipe.send(Replaced()))
        elif isinstance(message, Stop):
            server.stop()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), told)
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        await server.serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
