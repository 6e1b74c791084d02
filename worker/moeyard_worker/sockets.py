"""The common part of a fleet's ZMQ sockets: CURVE keys, heartbeats, and monitors.

A bound socket under CURVE shows a stranger only that it exists (CurveZMQ, ZeroMQ's RFC 26). A client without the
server's public key fails at the first message of the handshake. One with a key that is not admitted fails at the last.
Traffic cannot be read. libzmq asks over `inproc://zeromq.zap.01` which keys are admitted (RFC 27), and `Gate` answers.
"""

import hmac
import threading
from typing import Any

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from moeyard_worker.keys import FleetKeys, KeyPair
from moeyard_worker.refusals import Refusals

# Longest interval of heartbeats. There are at least five in a deadline.
MAX_BEAT_SECONDS = 1.0
BEATS_PER_DEADLINE = 5
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"moeyard"
# Events of a bound socket's monitor for refused connections.
REFUSED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def make_keys() -> FleetKeys:
    """Return new keys from the system's random generator."""
    return FleetKeys(workers=_pair(), routers=_pair())


def _pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public, secret=secret)


def set_heartbeats(socket: "zmq.Socket[bytes]", deadline: float) -> None:
    """End the connection of a peer that is silent for `deadline` seconds and at most one heartbeat more.

    A peer that computes is not silent, because libzmq's own thread answers.
    """
    interval = min(MAX_BEAT_SECONDS, deadline / BEATS_PER_DEADLINE)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(1000 * interval)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(1000 * deadline)))


def lock(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """Require CURVE, and a key that the context's `Gate` admits, for addresses that are bound from now on."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def unlock(socket: "zmq.Socket[bytes]", own: KeyPair, server: bytes) -> None:
    """Use the key `own` for connections from now on, and require a server with the secret of the key `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def lock_in_clear(socket: "zmq.Socket[bytes]") -> None:
    """Require a password in clear text, without encryption (ZeroMQ's RFC 24). Eavesdroppers learn it."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_SERVER, 1)


def unlock_in_clear(socket: "zmq.Socket[bytes]", password: bytes) -> None:
    """Use `password` for connections from now on, to a socket behind `lock_in_clear`."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password)


class Gate:
    """Answers libzmq's authentication requests of one context. It admits holders of `key`'s secret, or of `password`.

    It runs in a thread of its own, because a rank in a step must not delay routers, and strangers must not delay the
    rank. The thread ends with the context. (pyzmq's ThreadAuthenticator runs an event loop for this and logs passwords
    at level debug.)
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
    """Return a monitor of `socket`. Close it after `socket.disable_monitor()`.

    Its queue has no limit. At a limit, libzmq's thread would wait for a reader and carry no messages. Then strangers
    that connect often could stop a rank that does not read its monitor. (pyzmq's `get_monitor_socket` has a limit of
    2000.)
    """
    address = f"inproc://monitor-{socket.FD}"
    socket.monitor(address, events)
    monitor = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def next_event(monitor: "zmq.Socket[bytes]") -> dict[str, Any] | None:
    """Return a monitor's oldest event (`event`, `value`, `endpoint`), or None. Never waits."""
    try:
        return dict(recv_monitor_message(monitor, zmq.NOBLOCK))
    except zmq.Again:
        return None


def count_refused(event: dict[str, Any], refusals: Refusals, whom: str) -> None:
    """Count one of `REFUSED_EVENTS`."""
    known = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    reason = "unknown_key" if known else "handshake"
    why = "a key that is not admitted" if known else "no handshake of this fleet"
    refusals.add(reason, f"{whom}: {why}")
