"""A router process, which may share its port with others, and its messages to and from the launcher.

It sends `Ready`, `WorkerLost`, `Replaced`, and `Obeyed` in answer to each order (`FleetOrder`). It receives `Replace`,
orders, `GiveUp` and `Stop`. The workers end with the launcher. Then the router ends open requests with an error and
exits.
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
from moeyard_router.fleet.orders import FleetOrder
from moeyard_router.http.server import RouterServer, freeze_start_up
from moeyard_router.http.siblings import Siblings


@dataclass(frozen=True, slots=True)
class Ready:
    """Every worker has decoded for this router."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """This router has lost the worker at `endpoint`."""

    rank: int
    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The workers of the last `Replace` are in use."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Continue with these workers. `incident` describes why, for /v1/fleet/incidents."""

    workers: tuple[WorkerAddress, ...]
    incident: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The fleet cannot recover: end all requests with `reason`, then exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The last order took effect. `sequences`: its answer, a number of this router's sequences, or UNKNOWN."""

    sequences: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Shut down gracefully; a second `Stop` ends open streams at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAddress:
    """An address that sockets of several processes can share. `only_ipv6` concerns IPv6 addresses only."""

    family: int
    address: tuple[Any, ...]
    only_ipv6: bool

    @classmethod
    def of(cls, sock: socket.socket) -> "SharedAddress":
        """Return the address of a bound socket."""
        is_ipv6 = sock.family == socket.AF_INET6
        only = is_ipv6 and bool(sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
        return cls(family=sock.family, address=sock.getsockname(), only_ipv6=only)

    def bound(self, *, closing: bool = True) -> socket.socket:
        """Return another bound socket that does not listen yet. Raises `OSError`.

        `closing` allows an address on which connections of an ended server still close.
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
    """One process: `index` of `count`, the common address, and the directory of the `Siblings`."""

    index: int
    count: int
    address: SharedAddress
    directory: Path


def run_router_process(config: RouterConfig, seat: Seat, pipe: Connection) -> None:
    """Run a router process. Signals reach it as messages of its parent; received twice, they would end streams."""
    ending = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    for number in ending:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    sock = seat.address.bound()
    if seat.count == 1:
        # Connections queue while this process starts. With other routers, which answer at once, uvicorn listens later,
        # after the tokenizer is loaded.
        sock.listen(1024)
    server = RouterServer(
        config,
        sock,
        on_ready=lambda: pipe.send(Ready()),
        on_lost=lambda rank, why: pipe.send(WorkerLost(rank, server.workers[rank].endpoint, why)),
        siblings=Siblings(seat.directory, index=seat.index, count=seat.count),
    )

    def receive() -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            message = GiveUp("moeyard serve has ended, and its workers with it")
        if isinstance(message, Replace):
            server.replace_workers(message.workers, lambda: pipe.send(Replaced()), message.incident)
        elif isinstance(message, FleetOrder):
            server.obey(message, lambda sequences: pipe.send(Obeyed(sequences)))
        elif isinstance(message, GiveUp):
            server.give_up(message.reason)
        elif isinstance(message, Stop):
            server.stop()

    async def main() -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), receive)
        await server.serve()

    freeze_start_up()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
