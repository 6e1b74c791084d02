"""What the ZMQ sockets of a fleet have in common: keys at their doors, heartbeats, and what may come through.

A bound socket under CURVE shows no stranger more than that it is there: who does not know the server's public key fails
at the first message, who has a key that is not admitted at the last of the handshake, and nobody reads along
(CurveZMQ, ZeroMQ's RFC 26). libzmq asks who is admitted over `inproc://zeromq.zap.01` (RFC 27); `Gate` answers.
"""

import hmac
import threading
from typing import Any

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from moeyard_worker.keys import FleetKeys, KeyPair
from moeyard_worker.refusals import Refusals

# Heartbeats leave this often, or five times in a deadline if that is more often.
MAX_BEAT_SECONDS = 1.0
BEATS_PER_DEADLINE = 5
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"moeyard"
# What a monitor of a bound socket says of those who did not get in.
REFUSED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def make_keys() -> FleetKeys:
    """New keys, of the machine's randomness."""
    workers, routers = (KeyPair(public=public, secret=secret) for public, secret in (_pair(), _pair()))
    return FleetKeys(workers=workers, routers=routers)


def _pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return public, secret


def set_heartbeats(socket: "zmq.Socket[bytes]", deadline: float) -> None:
    """A peer that is silent for `deadline` seconds, and at most one heartbeat longer, has its connection ended.

    One that computes is not silent: libzmq's own thread answers.
    """
    interval = min(MAX_BEAT_SECONDS, deadline / BEATS_PER_DEADLINE)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(1000 * interval)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(1000 * deadline)))


def lock(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """What is bound from now on is met under CURVE, by those that the context's `Gate` admits."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def unlock(socket: "zmq.Socket[bytes]", own: KeyPair, server: bytes) -> None:
    """What is connected from now on shows `own`, and talks only to who has the secret of the public key `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def lock_in_clear(socket: "zmq.Socket[bytes]") -> None:
    """As `lock`, without encryption: a password that whoever reads along learns (ZeroMQ's RFC 24)."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_SERVER, 1)


def unlock_in_clear(socket: "zmq.Socket[bytes]", password: bytes) -> None:
    """As `unlock`, for a socket behind `lock_in_clear`."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password)


class Gate:
    """Answers libzmq's questions of one context: admitted are holders of the secret of `key`, or of `password`.

    A thread of its own, which sleeps until somebody knocks: a rank deep in a step must not keep routers waiting, and
    strangers must not keep the rank. It ends with its context. (pyzmq's ThreadAuthenticator runs an event loop for this
    and says passwords at level debug.)
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", *, key: bytes | None = None, password: bytes | None = None
    ) -> None:
        self._key = None if key is None else zmq.utils.z85.decode(key)
        self._password = password
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        threading.Thread(target=self._run, name="gate", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                _, request, _, _, _, mechanism, *proof = self._socket.recv_multipart()
                status = (b"200", b"admitted") if self._admits(mechanism, proof) else (b"400", b"not admitted")
                self._socket.send_multipart((b"1.0", request, *status, b"", b""))
        except zmq.ContextTerminated:
            self._socket.close()

    def _admits(self, mechanism: bytes, proof: list[bytes]) -> bool:
        if mechanism == b"CURVE" and self._key is not None:
            return len(proof) == 1 and hmac.compare_digest(proof[0], self._key)
        if mechanism == b"PLAIN" and self._password is not None:
            return len(proof) == 2 and hmac.compare_digest(proof[1], self._password)
        return False


def watch(socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """A monitor of `socket`, to be closed after `socket.disable_monitor()`.

    Without a limit: at one, libzmq's thread would wait until somebody takes its news, and carry nothing meanwhile, so
    that strangers who come and go could stop a rank that is not looking (pyzmq's `get_monitor_socket` leaves 2000).
    """
    address = f"inproc://monitor-{socket.FD}"
    socket.monitor(address, events)
    monitor = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def next_event(monitor: "zmq.Socket[bytes]") -> dict[str, Any] | None:
    """The oldest of a monitor's events, without waiting: `event`, `value` and `endpoint`."""
    try:
        return dict(recv_monitor_message(monitor, zmq.NOBLOCK))
    except zmq.Again:
        return None


def count_refused(event: dict[str, Any], refusals: Refusals, whom: str) -> None:
    """File one of `REFUSED_EVENTS`."""
    known = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    reason = "unknown_key" if known else "handshake"
    why = "a key that is not admitted" if known else "no handshake of this fleet"
    refusals.add(reason, f"{whom}: {why}")
