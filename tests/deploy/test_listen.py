"""The API's port, from before a model is loaded until routers listen on it."""

import errno
import socket
from contextlib import ExitStack

import pytest
from tests.deploy.test_serve import free_port
from tests.limits import HANG_SECONDS

from moeyard.listen import bind
from moeyard_router.http.process import SharedAddress


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def listening(address: SharedAddress) -> socket.socket:
    """Listen like a router."""
    sock = address.bound()
    sock.listen()
    return sock


def visit(server: socket.socket) -> None:
    """Make a connection that the server closes first, so that its side is in TIME_WAIT for a minute."""
    with socket.create_connection(server.getsockname()[:2], timeout=HANG_SECONDS) as client:
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""


def others_can_bind(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether another server can bind; like most, it reuses addresses of closing connections."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind((host, port))
            other.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "0.0.0.0",
        pytest.param("::", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")),
    ],
)
def test_port_is_kept_for_routers(host: str) -> None:
    """The port is kept while a model loads and between routers; early connections are refused at once."""
    with bind(host, free_port(), shared=True) as kept:
        address = SharedAddress.of(kept)
        assert not others_can_bind(port_of(kept))
        assert not others_can_bind(port_of(kept), "0.0.0.0")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port_of(kept)), timeout=HANG_SECONDS)
        with ExitStack() as routers:
            first, _ = (routers.enter_context(listening(address)) for _ in range(2))
            assert not others_can_bind(port_of(kept))
            socket.create_connection(("127.0.0.1", port_of(first)), timeout=HANG_SECONDS).close()
        assert not others_can_bind(port_of(kept))
    assert others_can_bind(address.address[1])


def test_port_is_kept_after_an_earlier_server() -> None:
    """Closed connections of earlier routers change nothing; those of another program only weaken the protection."""
    with bind("127.0.0.1", free_port(), shared=True) as kept, listening(SharedAddress.of(kept)) as router:
        port = port_of(kept)
        visit(router)
    with bind("127.0.0.1", port, shared=True) as kept:
        assert not others_can_bind(port)
        listening(SharedAddress.of(kept)).close()
    with bind("127.0.0.1", free_port()) as other:
        port = port_of(other)
        visit(other)
    with bind("127.0.0.1", port, shared=True) as kept, listening(SharedAddress.of(kept)) as router:
        visit(router)
