"""Uninvited connections to ZMQ sockets: the bytes that they may send over TCP (ZMTP 3, RFC 23)."""

import contextlib
import socket
import struct
from collections.abc import Iterator

import zmq
from tests.limits import HANG_SECONDS

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """Return the last part of a handshake without keys, for a socket of this kind."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def frame(data: bytes) -> bytes:
    """Return a message of one short frame."""
    return b"\x00" + bytes([len(data)]) + data


def huge(size: int = 1 << 30) -> bytes:
    """Return the beginning of a message of `size` bytes."""
    return b"\x02" + struct.pack(">Q", size) + bytes(1024)


@contextlib.contextmanager
def open_tcp(address: str) -> Iterator[socket.socket]:
    """Open a TCP connection to tcp://host:port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as connection:
        yield connection


def mechanism(address: str) -> bytes:
    """Return the security mechanism that the listener expects, 20 bytes: it answers a version."""
    with open_tcp(address) as connection, connection.makefile("rb") as answer:
        connection.sendall(GREETING[:11])
        return answer.read(32)[12:]


def say(address: str, *parts: bytes) -> None:
    """Connect, send all parts in any case, and leave; wait for an answer to the first part only."""
    with open_tcp(address) as connection, contextlib.suppress(ConnectionError):  # boundary: refused while it sends
        connection.sendall(parts[0])
        connection.recv(64)
        for part in parts[1:]:
            connection.sendall(part)


def one_byte_and_gone(address: str, kind: bytes = b"PAIR") -> None:
    """Send a peer's handshake, one byte, and close, which once aborted a rank."""
    say(address, GREETING, ready(kind), frame(b"x"))


def bad_messages(kind: bytes) -> list[tuple[bytes, ...]]:
    """Return other attempts: no ZMTP, half a greeting, a pickle, a gigabyte, a gigabyte before the handshake."""
    pickle = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."
    return [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),),
        (GREETING[:30], bytes(200)),
        (GREETING, ready(kind), frame(pickle)),
        (GREETING, ready(kind), huge()),
        (GREETING, huge()),
    ]


def try_key(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, server: bytes) -> int:
    """Connect with an unknown key to a server whose public key is known; return the resulting event."""
    public, secret = zmq.curve_keypair()
    with context.socket(kind) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.CURVE_PUBLICKEY, public)
        client.setsockopt(zmq.CURVE_SECRETKEY, secret)
        client.setsockopt(zmq.CURVE_SERVERKEY, server)
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        client.connect(address)
        assert monitor.poll(1000 * HANG_SECONDS), "no answer"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        client.disable_monitor()
        monitor.close(0)
        return event
