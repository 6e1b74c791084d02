"""Whether what `--ray-address` names is a Ray at all, found out in seconds."""

import socket

from moeyard.rank import FleetError
from moeyard.ray_config import uses_tls

CONNECT_SECONDS = 3.0
# Length 0, type SETTINGS, no flags, stream 0 (RFC 9113, 4.1 and 6.5).
HTTP2_EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def check_reachable(address: str) -> None:
    """Raise FleetError when no Ray listens at host:port; Ray itself would try for minutes, with lines of its own."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise FleetError(f"--ray-address {address!r} is not HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
            if uses_tls():
                return
            # Ray speaks gRPC, so HTTP/2: both sides begin with SETTINGS, ours after a preface (RFC 9113, 3.4).
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_EMPTY_SETTINGS)
            answer = connection.recv(len(HTTP2_EMPTY_SETTINGS))
    except OSError as error:
        raise FleetError(
            f"no Ray at {address}: {error.strerror or error}; start one with `ray start --head`"
        ) from error
    if answer[3:4] != HTTP2_EMPTY_SETTINGS[3:4]:
        raise FleetError(f"what listens at {address} is no Ray; give the address that `ray start --head` printed")
