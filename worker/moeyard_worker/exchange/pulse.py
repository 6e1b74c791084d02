"""Signs of life of peers whatever they compute: heartbeats between libzmq's own threads.

Every rank binds a ROUTER that does nothing but answer heartbeats, and connects to those of all its peers. The pairs
that carry rows send none: libzmq 4.3.5 aborts the process (`!_io_error`) when a heartbeat is due on a connection that
has ended while nobody could take what it brought, as where a pair is closed with frames unsent, or a stranger leaves
one that is bound. Here nothing is ever brought.
"""

from collections.abc import Callable, Iterator

import zmq

from moeyard_worker.sockets import next_event, set_heartbeats, watch

# Nothing is said but handshakes, those of CURVE below 1 KiB.
_MAX_FRAME_BYTES = 1024
_NEVER_MS = -1
_EVENTS = zmq.EVENT_DISCONNECTED


class Pulse:
    """The ROUTER of one rank, at `address`, and its connections to others'. `lock` is put on what is bound.

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
        self._feelers: dict[int, zmq.Socket[bytes]] = {}
        self.monitors: dict[int, zmq.Socket[bytes]] = {}
        self._door = self._socket(zmq.ROUTER, ":" in host)
        try:
            lock(self._door)
            port = self._door.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        except BaseException:
            # Nobody has this object yet, and a context does not end before its sockets.
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

    def feel(self, peer: int, address: str, unlock: "Callable[[zmq.Socket[bytes]], None]") -> "zmq.Socket[bytes]":
        """Connect to a peer's ROUTER; returns a monitor to be polled. Never blocks."""
        feeler = self._feelers[peer] = self._socket(zmq.DEALER, "[" in address)
        set_heartbeats(feeler, self._deadline)
        unlock(feeler)
        self.monitors[peer] = watch(feeler, _EVENTS)
        feeler.connect(address)
        return self.monitors[peer]

    def lost(self) -> Iterator[int]:
        """The peers that have given no sign of life for the deadline, or have closed; each is said once."""
        for peer, monitor in self.monitors.items():
            if next_event(monitor) is not None:
                yield peer

    def close(self) -> None:
        """Close all sockets."""
        for feeler in self._feelers.values():
            feeler.disable_monitor()
            feeler.close()
        for monitor in self.monitors.values():
            monitor.close()
        self._feelers, self.monitors = {}, {}
        self._door.close()
