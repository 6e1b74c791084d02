"""What the loop of a rank hears: messages of routers, frames of peers, and whoever wakes it from another thread."""

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import zmq


class Heard(NamedTuple):
    """Whether anything has come, and whether from peers. What has come stays where it is, but for being woken."""

    anything: bool
    peers: bool


class Ears:
    """Listens to `sources` for one thread, and to `peers` from `watch` to `forget`."""

    def __init__(self, *sources: Any) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        for source in (self._wake, *sources):
            self._poller.register(source, zmq.POLLIN)
        # Registered when an epoch begins: they are met after the rank is built.
        self._peers: list[zmq.Socket[bytes]] = []

    def wake(self) -> None:
        """Let a thread that listens look again. Safe from any thread, at any time."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Give back what this used; `wake` does nothing from then on."""
        with self._closing:
            self._closed = True
            os.close(self._wake)

    def watch(self, peers: "Iterable[zmq.Socket[bytes]]") -> None:
        """Listen to these, too."""
        for socket in peers:
            self._peers.append(socket)
            self._poller.register(socket, zmq.POLLIN)

    def forget(self) -> None:
        """Listen to no peer."""
        while self._peers:
            self._poller.unregister(self._peers.pop())

    def hear(self, milliseconds: int | None) -> Heard:
        """Wait so long for anything, None: until it comes."""
        ready = dict(self._poller.poll(milliseconds))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return Heard(bool(ready), any(socket in ready for socket in self._peers))
