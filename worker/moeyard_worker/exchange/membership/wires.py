"""The sockets under the mesh: one PAIR per peer at both ends, each with a monitor. Frames are bytes here.

A PAIR accepts exactly one connection and keeps it for life. So the socket tells a frame's source, no stranger can take
a peer's place, waiting for one peer is one blocking `recv`, and each source's frames stay in order. An ended connection
is never made again (RECONNECT_IVL); its monitor says so within milliseconds.

TCP connections need the fleet's keys. Unix sockets do not: they lie in a directory of mode 0700 until all have met.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import zmq

from moeyard_worker.exchange.membership.frames import Frame
from moeyard_worker.exchange.membership.liveness import Pulse
from moeyard_worker.keys import WorkerKeys
from moeyard_worker.refusals import Refusals
from moeyard_worker.sockets import (
    REFUSED_EVENTS,
    Gate,
    count_refused,
    lock,
    lock_in_clear,
    next_event,
    unlock,
    unlock_in_clear,
    watch,
)

# At most two frames of a source are unread: one of this phase and one of the next. A handshake, a plan, a poison frame
# and signs (`Signs`) come on top. A source sends two signs per deadline, for up to twelve deadlines of the receiver's
# absence. It sends more only if it is slow and waits by turns. A PAIR blocks at its mark; it never drops.
HIGH_WATER_MARK = 64
# A wait first blocks in `recv` this long, which is one system call in the usual case. Only then it polls everything.
RECV_SLICE_MS = 2
# A day, by which time the fleet has long failed. With -1, and with IMMEDIATE too, libzmq 4.3 drops unread frames when a
# connection ends. The last of these says why a peer ends (measured: lost 1 time in 10).
RECONNECT_NEVER_MS = 86_400_000
# How long closing waits for frames already sent to leave; nothing waits when they have.
CLOSE_LINGER_MS = 500
# A rank that was stopped wakes past its time limit while its peers' frames still arrive. It looks once more for this
# long before it accuses them.
LAST_LOOK_S = 0.05
# sun_path holds 108 bytes with its terminating zero (unix(7)).
MAX_IPC_PATH = 107

# CLOSED on a socket that connects is a refused connection; on one that binds it would be the end of a listener.
_CONNECT_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_BIND_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | REFUSED_EVENTS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLock:
    """Access control: CURVE, or without `encrypt` a password in clear in every handshake."""

    keys: WorkerKeys
    encrypt: bool = True

    @property
    def password(self) -> bytes:
        """A digest of the ranks' secret, which does not reveal it."""
        return hmac.digest(self.keys.own.secret, b"moeyard exchange", hashlib.sha256).hex().encode()

    def on(self, socket: "zmq.Socket[bytes]") -> None:
        """Lock the addresses that `socket` binds from now on."""
        if self.encrypt:
            lock(socket, self.keys.own)
        else:
            lock_in_clear(socket)

    def opened_by(self, socket: "zmq.Socket[bytes]") -> None:
        """Give `socket` the key for connections that it makes from now on."""
        if self.encrypt:
            unlock(socket, self.keys.own, self.keys.own.public)
        else:
            unlock_in_clear(socket, self.password)

    def gate(self, context: "zmq.Context[zmq.Socket[bytes]]") -> Gate:
        """Return the authenticator of the sockets of `context`."""
        if self.encrypt:
            return Gate(context, key=self.keys.own.public)
        return Gate(context, password=self.password)


class Wires:
    """One socket per peer. The lower rank of a pair binds (TCP, and a unix socket if there is a directory for it).

    take_sign: called with peer and frame for every frame read; true for a sign, which reaches no inbox.
    tcp, ipc: the bound address for each rank, "" for none. The owner of the directory removes unix sockets.
    inbox: frames read but not yet used, oldest first.
    lost: the peers whose connection ended, and how.
    refusals: refused connections of strangers.
    """

    def __init__(
        self,
        *,
        rank: int,
        members: Sequence[int],
        host: str,
        ipc_directory: str | None,
        heartbeat_timeout: float,
        max_frame_bytes: int,
        take_sign: Callable[[int, Frame], bool],
        lock: MeshLock | None,
    ) -> None:
        self._rank, self._take_sign, self._num_signs = rank, take_sign, 0
        self.pulse: Pulse | None = None
        # Called with a socket before it binds, or connects, over TCP.
        self._lock_socket = _ignore if lock is None else lock.on
        self._unlock_socket = _ignore if lock is None else lock.opened_by
        self.refusals = Refusals(log)
        self._ipv6 = ":" in host
        self.peers = tuple(peer for peer in members if peer != rank)
        self.inbox: dict[int, deque[Frame]] = {peer: deque() for peer in self.peers}
        self.lost: dict[int, str] = {}
        self.tcp = [""] * (max(members) + 1)
        self.ipc = [""] * (max(members) + 1)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._in_place: set[int] = set()
        # The file descriptor that carries a peer, and the ended descriptors of its socket: a listener also sees
        # connections of strangers, which a PAIR refuses and whose end means nothing.
        self._descriptor: dict[int, int] = {}
        self._ended: dict[int, set[int]] = {peer: set() for peer in self.peers}
        self._poller = zmq.Poller()
        if not self.peers:
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if lock is not None:
            lock.gate(self._context)
        try:
            for peer in self.peers:
                self._open(peer, max_frame_bytes)
                if peer > rank:
                    self._bind(peer, host, ipc_directory)
            self.pulse = Pulse(self._context, host=host, deadline=heartbeat_timeout, lock=self._lock_socket)
        except BaseException:
            self.close()
            raise

    def _open(self, peer: int, max_frame_bytes: int) -> None:
        socket = self._context.socket(zmq.PAIR)
        self._sockets[peer] = socket
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, RECONNECT_NEVER_MS),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, max_frame_bytes),
            (zmq.RCVTIMEO, RECV_SLICE_MS),
            (zmq.IPV6, int(self._ipv6)),
        ):
            socket.setsockopt(option, value)
        monitor = watch(socket, _BIND_EVENTS if peer > self._rank else _CONNECT_EVENTS)
        self._monitors[peer] = monitor
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _bind(self, peer: int, host: str, ipc_directory: str | None) -> None:
        socket = self._sockets[peer]
        # A lock applies to addresses that are bound after it.
        if ipc_directory is not None:
            path = str(Path(ipc_directory) / f"{secrets.token_hex(8)}.sock")
            if len(os.fsencode(path)) > MAX_IPC_PATH:
                raise ValueError(f"a unix socket's path has at most {MAX_IPC_PATH} bytes: {path}")
            socket.bind(f"ipc://{path}")
            self.ipc[peer] = f"ipc://{path}"
        self._lock_socket(socket)
        socket.bind(f"tcp://[{host}]:*" if self._ipv6 else f"tcp://{host}:*")
        self.tcp[peer] = _last_endpoint(socket)

    def connect(self, peer: int, address: str) -> None:
        """Connect to the address that a lower rank has bound for this one. Never blocks."""
        socket = self._sockets[peer]
        if address.startswith("tcp:"):
            self._unlock_socket(socket)
        socket.connect(address)

    def addresses(self) -> dict[str, Any]:
        """Return the addresses of this rank: fields of a `MeshEndpoint`."""
        pulse = "" if self.pulse is None else self.pulse.address
        return {"tcp": tuple(self.tcp), "ipc": tuple(self.ipc), "pulse": pulse}

    def watch_pulse(self, peer: int, address: str) -> None:
        """Watch the heartbeats of a peer at the `pulse` address that it bound."""
        assert self.pulse is not None
        self._poller.register(self.pulse.connect(peer, address, self._unlock_socket), zmq.POLLIN)

    def unbind(self, address: str) -> None:
        """Stop listening on a bound address that its peer will not use."""
        for peer, socket in self._sockets.items():
            if address in (self.tcp[peer], self.ipc[peer]):
                socket.unbind(address)

    def read_in_place(self, peer: int) -> None:
        """Return this peer's frames as views of the received message from now on, which saves copies of large ones."""
        self._in_place.add(peer)

    def send(self, peer: int, frame: Frame) -> bool:
        """Queue a small frame (copied); False when there is no connection to take it."""
        try:
            self._sockets[peer].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def send_in_place(self, peer: int, frame: memoryview) -> "zmq.MessageTracker | None":
        """Queue a large frame without copying it; None when there is no connection. Rewrite it only when `done`."""
        try:
            return self._sockets[peer].send(frame, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            return None

    def recv(self, peer: int) -> Frame | None:
        """Return the oldest frame of `peer`, or None if none arrives within RECV_SLICE_MS."""
        inbox = self.inbox[peer]
        return inbox.popleft() if inbox else self._read(peer, 0)

    def poll(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `drain` files something; return whether it did.

        Other events (strangers, the second sign of an end that is known) do not end the wait: a last look that they
        cut short would accuse a living peer. ZMQ's own clock may end a wait a little early.
        """
        limit = perf_counter() + timeout
        while True:
            if self._poller.poll(int(timeout * 1000) + 1 if timeout > 0 else 0) and self.drain():
                return True
            timeout = limit - perf_counter()
            if timeout <= 0:
                return False

    def drain(self) -> bool:
        """File events into `inbox` and `lost`; return whether there were any. Never blocks.

        Ends are filed first, as frames that a peer sent before its end are read after it. Strangers that come and go do
        not count.
        """
        before = self._num_filed()
        for peer in self.peers:
            self._drain_monitor(peer)
            while (frame := self._read(peer, zmq.NOBLOCK)) is not None:
                self.inbox[peer].append(frame)
            if self._descriptor.get(peer) in self._ended[peer]:
                self.lost[peer] = "lost"
        for peer in self.pulse.lost() if self.pulse is not None else ():
            self.lost.setdefault(peer, "lost")
        return self._num_filed() > before

    def _num_filed(self) -> int:
        return self._num_signs + len(self.lost) + sum(map(len, self.inbox.values()))

    def _drain_monitor(self, peer: int) -> None:
        while (message := next_event(self._monitors[peer])) is not None:
            if message["event"] & REFUSED_EVENTS:
                count_refused(message, self.refusals, f"a connection to the port of rank {peer}")
            elif message["event"] == zmq.EVENT_ACCEPTED:
                self._ended[peer].discard(message["value"])
            elif peer > self._rank:
                self._ended[peer].add(message["value"])
            else:
                self.lost[peer] = "lost" if message["event"] == zmq.EVENT_DISCONNECTED else "refused the connection"

    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """Return all sockets and monitors, for another poller."""
        pulses = () if self.pulse is None else self.pulse.monitors.values()
        return [*self._sockets.values(), *self._monitors.values(), *pulses]

    def close(self) -> None:
        """Close everything. Frames already sent to living peers still leave, for at most CLOSE_LINGER_MS."""
        for peer, socket in self._sockets.items():
            socket.disable_monitor()
            socket.close(linger=0 if peer in self.lost else CLOSE_LINGER_MS)
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        if self.pulse is not None:
            self.pulse.close()
        if self.peers:
            self._context.term()
        self._sockets.clear()
        self._monitors.clear()

    def _read(self, peer: int, flags: int) -> Frame | None:
        while (frame := self._receive(peer, flags)) is not None and self._take_sign(peer, frame):
            self._num_signs += 1
        return frame

    def _receive(self, peer: int, flags: int) -> Frame | None:
        try:
            if peer > self._rank and peer not in self._descriptor:
                frame = self._sockets[peer].recv(flags, copy=False)
                self._descriptor[peer] = int(frame.get(zmq.SRCFD))
                return frame.bytes
            if peer in self._in_place:
                return memoryview(self._sockets[peer].recv(flags, copy=False).buffer)
            return self._sockets[peer].recv(flags)
        except zmq.Again:
            return None


def _ignore(socket: "zmq.Socket[bytes]") -> None:
    """Leave a socket as it is."""


def _last_endpoint(socket: "zmq.Socket[bytes]") -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
