"""How a rank knows that its peers are alive: heartbeats, and signs of slow peers.

**Heartbeats** (`Pulse`) run between libzmq's own threads. Every rank binds a ROUTER that only answers heartbeats, and
connects to those of all peers. The pairs that carry rows send none: libzmq 4.3.5 aborts the process (`!_io_error`) when
a heartbeat is due on an ended connection whose received bytes were not taken. That happens where a pair closes with
frames unsent, or a stranger leaves a bound pair. The connections of a pulse never bring any bytes.

**Signs** (`Signs`) tell a slow peer from a silent one. BUSY: the next frame may take long (a kernel is being compiled).
WAITING: this rank waits, its device for rows of others, or its host for work. Both may come between any two frames and
never reach an inbox. Each excuses its sender for some time; the next frame of that sender ends it.
"""

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

import zmq

from moeyard_worker.exchange.membership.frames import TAG_BYTES, Frame, FrameError, Phase, decode_tag
from moeyard_worker.sockets import next_event, set_heartbeats, watch

# Only handshakes are sent; those of CURVE are below 1 KiB.
_MAX_FRAME_BYTES = 1024
_NEVER_MS = -1
_EVENTS = zmq.EVENT_DISCONNECTED
_SIGNS = (Phase.BUSY, Phase.WAITING)


class Pulse:
    """The ROUTER of one rank, at `address`, and its connections to peers. `lock` locks the ROUTER.

    Raises zmq.ZMQError where it cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        host: str,
        deadline: float,
        lock: "Callable[[zmq.Socket[bytes]], None]",
    ) -> None:
        self._context = context
        self._deadline = deadline
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self.monitors: dict[int, zmq.Socket[bytes]] = {}
        self._router = self._socket(zmq.ROUTER, ":" in host)
        try:
            lock(self._router)
            port = self._router.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        except BaseException:
            # A context ends after its sockets, and no caller holds this object yet.
            self.close()
            raise
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _socket(self, kind: int, ipv6: bool) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, _NEVER_MS),
            (zmq.MAXMSGSIZE, _MAX_FRAME_BYTES),
            (zmq.IPV6, int(ipv6)),
        ):
            socket.setsockopt(option, value)
        return socket

    def connect(self, peer: int, address: str, unlock: "Callable[[zmq.Socket[bytes]], None]") -> "zmq.Socket[bytes]":
        """Connect to a peer's ROUTER; return a monitor to poll. Never blocks."""
        dealer = self._dealers[peer] = self._socket(zmq.DEALER, "[" in address)
        set_heartbeats(dealer, self._deadline)
        unlock(dealer)
        self.monitors[peer] = watch(dealer, _EVENTS)
        dealer.connect(address)
        return self.monitors[peer]

    def lost(self) -> Iterator[int]:
        """Yield, once each, the peers without a sign of life for the deadline, and those that have closed."""
        for peer, monitor in self.monitors.items():
            if next_event(monitor) is not None:
                yield peer

    def close(self) -> None:
        """Close all sockets."""
        for dealer in self._dealers.values():
            dealer.disable_monitor()
            dealer.close()
        for monitor in self.monitors.values():
            monitor.close()
        self._dealers, self.monitors = {}, {}
        self._router.close()


class Signs:
    """The signs that one rank has received in `epoch`.

    BUSY excuses a peer for `stall` seconds, WAITING for `deadline` seconds.
    """

    def __init__(self, epoch: int, *, deadline: float, stall: float) -> None:
        self._epoch = epoch
        self._seconds = {Phase.BUSY: stall, Phase.WAITING: deadline}
        # For each peer whose last frame was a sign: the sign, and until when it counts.
        self._last: dict[int, tuple[Phase, float]] = {}

    def take(self, peer: int, frame: Frame) -> bool:
        """Note a frame of `peer` if it is a sign, and return whether it is. Any other frame ends the sign before it.

        A sign of another epoch or rank is like any unexpected frame.
        """
        if len(frame) != TAG_BYTES or frame[3] not in _SIGNS:
            self._last.pop(peer, None)
            return False
        try:
            tag = decode_tag(bytes(frame))
        except FrameError:
            return False
        if (tag.epoch, tag.source) != (self._epoch, peer):
            return False
        self._last[peer] = tag.phase, perf_counter() + self._seconds[tag.phase]
        return True

    def until(self, peer: int) -> float:
        """Return until when (perf_counter seconds) the peer's sign counts; 0 without a sign."""
        return self._last[peer][1] if peer in self._last else 0.0

    def of(self, peer: int) -> Phase | None:
        """Return the peer's sign, if it still counts."""
        return self._last[peer][0] if self.until(peer) > perf_counter() else None

    def any_waiting(self) -> bool:
        """Return whether the sign of some peer is WAITING."""
        return any(self.of(peer) is Phase.WAITING for peer in self._last)

    def allowed(self, peers: Iterable[int], seconds: float) -> float:
        """Return how long these peers may take: `seconds`, or more if the last sign of one is BUSY."""
        slow = any(peer in self._last and self._last[peer][0] is Phase.BUSY for peer in peers)
        return max(seconds, self._seconds[Phase.BUSY]) if slow else seconds
