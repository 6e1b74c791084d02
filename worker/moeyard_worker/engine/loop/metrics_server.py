"""The metrics port of a rank: prometheus_client's page behind a server that idle or slow clients cannot exhaust.

prometheus_client's server has a thread for each connection, for as long as the client keeps it: 300 idle connections
were 300 threads.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS = 16  # each has a thread; Prometheus has one connection, for about 5 ms
CONNECTION_SECONDS = 5.0  # from the start of a connection to the end of its response; Prometheus waits for 10
_LEAVE_SECONDS = 1.0  # the thread of a closed connection ends within this time


class MetricsServer(WSGIServer):
    """Answers scrapes of `registry` on host:port in daemon threads. One connection too many ends the oldest one.

    Raises OSError if it cannot listen.
    """

    request_queue_size = 128  # with socketserver's 5, connection attempts are dropped and repeated after a second

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # oldest first, with the time of arrival (monotonic seconds)
        super().__init__((host, port), _Scrape)
        self.set_app(make_wsgi_app(registry))
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def server_bind(self) -> None:
        """Bind as the base class does, but without its query of the name service for this host's name."""
        socket_name = self.socket
        if self.allow_reuse_address:
            socket_name.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_name.bind(self.server_address)
        self.server_address = socket_name.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. If there are too many, end the oldest one."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._cut([next(iter(self._open))])
        if not self._room.acquire(timeout=_LEAVE_SECONDS):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        threading.Thread(target=self._answer, args=(request, client_address), name="scrape", daemon=True).start()

    def service_actions(self) -> None:
        """End connections that take too long, even if they send or read meanwhile. Called every half second."""
        limit = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            self._cut([request for request, came in self._open.items() if came < limit])

    def end(self) -> None:
        """Stop answering and free the port. Takes up to half a second."""
        self.shutdown()
        self.server_close()
        with self._lock:
            self._cut(list(self._open))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that left, or whose connection was ended."""

    def _cut(self, requests: Iterable[socket.socket]) -> None:
        for request in requests:
            with contextlib.suppress(OSError):  # boundary: the client may have closed it
                request.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes the socket

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            with contextlib.suppress(OSError):  # boundary: the client left, or its connection was ended
                self.finish_request(request, client_address)
        finally:
            # Before the socket is closed: another connection may then get its number.
            with self._lock:
                del self._open[request]
            self.shutdown_request(request)
            self._room.release()


class _Scrape(WSGIRequestHandler):
    timeout = CONNECTION_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""
