"""A router process, which may share its port with others, and what it says to the process that started it.

It sends `Ready` once every worker has decoded, `WorkerLost` when one is lost, `Replaced` when it has taken other
workers, `Drained` to every `Drain`, and takes `Replace`, `GiveUp` and `Stop`. When whoever started it is gone, so are
the workers soon: what is open ends by name, and so does it.
"""

import asyncio
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.orders import Drain
from moeyard_router.http.server import RouterServer, freeze_start_up
from moeyard_router.http.siblings import Siblings


@dataclass(frozen=True, slots=True)
class Ready:
    """Every worker has decoded for this router."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """This router has lost a worker, at which endpoint, and why."""

    rank: int
    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The workers of the last `Replace` are the ones in use."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Go on with these workers; `incident` is what the launcher knows of why."""

    workers: tuple[WorkerAddress, ...]
    incident: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing will bring the fleet back, and why: end all requests, then yourself."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The last `Drain` was carried out, and this router has so many sequences at its rank."""

    sequences: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Begin an orderly end; a second one ends open streams at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAddress:
    """What several sockets of several processes can be bound to. `only_ipv6` is of an IPv6 address alone."""

    family: int
    address: tuple[Any, ...]
    only_ipv6: bool

    @classmethod
    def of(cls, sock: socket.socket) -> "SharedAddress":
        is_ipv6 = sock.family == socket.AF_INET6
        only = is_ipv6 and bool(sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
        return cls(family=sock.family, address=sock.getsockname(), only_ipv6=only)

    def bound(self, *, closing: bool = True) -> socket.socket:
        """Return another bound socket that does not listen yet; raises `OSError`.

        `closing`: also while connections of any ended server close; without it only this kind of socket can share.
        """
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, closing)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if self.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self.only_ipv6)
            sock.bind(self.address)
        except OSError:
            sock.close()
            raise
        return sock


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one process: `index` of `count`, the address that all listen on, the directory of their sockets."""

    index: int
    count: int
    address: SharedAddress
    directory: Path


def run_router_process(config: RouterConfig, seat: Seat, pipe: Connection) -> None:
    """Run a router process to its end. Signals reach it through its parent: heard twice, they would end streams."""
    ending = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    for number in ending:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    sock = seat.address.bound()
    if seat.count == 1:
        # Connections wait while this process starts. Where there are other routers, these answer them at once: then
        # uvicorn listens, after the tokenizer is there.
        sock.listen(1024)
    server = RouterServer(
        config,
        sock,
        on_ready=lambda: pipe.send(Ready()),
        on_lost=lambda rank, why: pipe.send(WorkerLost(rank, server.workers[rank].endpoint, why)),
        siblings=None if seat.count == 1 else Siblings(seat.directory, index=seat.index, count=seat.count),
    )

    def told() -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            message = GiveUp("moeyard serve has ended, and its workers with it")
        if isinstance(message, Replace):
            server.replace_workers(message.workers, lambda: pipe.send(Replaced()), message.incident)
        elif isinstance(message, Drain):
            server.drain(message, lambda sequences: pipe.send(Drained(sequences)))
        elif isinstance(message, GiveUp):
            server.give_up(message.reason)
        elif isinstance(message, Stop):
            server.stop()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), told)
        await server.serve()

    freeze_start_up()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
