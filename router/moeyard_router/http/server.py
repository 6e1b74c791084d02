"""The router as an embeddable server: uvicorn on a bound socket, with a graceful shutdown."""

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from moeyard_router.api.endpoints import Services
from moeyard_router.api.intake import formats_of
from moeyard_router.api.large import Bodies
from moeyard_router.api.request_log import open_log
from moeyard_router.api.tracing import open_traces
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.collector import FleetCollector
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.fleet.orders import FleetOrder
from moeyard_router.fleet.vllm_names import VllmAliases, VllmFleetAliases
from moeyard_router.http.app import create_app
from moeyard_router.http.connection import ChunkOutbox, ConnectionProtocol
from moeyard_router.http.credentials import Certificate, KeyRing, keep_fresh, open_certificate
from moeyard_router.http.siblings import Siblings
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.chat import open_codec
from moeyard_worker.refusals import Refusals

# libuv accepts one connection per listening socket and turn of the event loop (since 1.45). With turns of 5 ms, 200
# simultaneous connections took 1.1 s, and 0.2 s with eight listeners (2026-11-22, uvloop 0.23). Until then they wait in
# the kernel, which no metric shows. An idle listener costs one system call per turn.
LISTENERS = 16


def listeners(sock: socket.socket) -> list[socket.socket]:
    """Return the socket and duplicates of it for one event loop. The caller closes them."""
    return [sock, *(sock.dup() for _ in range(LISTENERS - 1))]


log = logging.getLogger(__name__)

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
# The event loop waits this long for a thread that computes, at each of its turns. Python's default is 5 ms.
_SWITCH_SECONDS = 0.001
_STOPPING = "the router is shutting down"


class RouterServer:
    """One router. `serve` runs it in the current event loop until `stop`. Any thread may call the other methods.

    The loop calls `on_ready` once, when every worker has decoded, and `on_lost` with rank and reason for each lost
    worker. Requests then wait `config.recovery_timeout` seconds for `replace_workers`, or until `give_up`. Raises
    `ValueError` for an unusable tokenizer, chat template, parser, key or certificate.
    """

    def __init__(
        self,
        config: RouterConfig,
        sock: socket.socket,
        *,
        on_ready: Callable[[], None],
        on_lost: Callable[[int, str], None] = lambda rank, reason: None,
        siblings: Siblings | None = None,
    ) -> None:
        self._siblings = siblings
        self._config = config
        self._sock = sock
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._keys = KeyRing(config.access)
        self._certificate = open_certificate(config.access)
        self._codec = open_codec(config.model_path, config.chat_template)
        self._formats = formats_of(config, self._codec)
        self._metrics = RouterMetrics(config.model_name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requests = 0
        self._given_up: str | None = None
        self._server: _UvicornServer | None = None
        self._fleet: Fleet | None = None

    async def serve(self) -> None:
        """Serve until `stop` or `give_up`. Open streams then have `shutdown_grace` seconds, then an error."""
        self._loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        fleet = self._fleet = Fleet(self._config, self._metrics, on_change=changed.set, on_lost=self._on_lost)
        health = Health(self._config, fleet)
        self._metrics.fleet.register(FleetCollector(fleet))
        if "vllm" in self._config.metric_aliases:
            self._metrics.aliases.register(VllmAliases(self._metrics))
            self._metrics.fleet.register(VllmFleetAliases(fleet))
        bodies, request_log = Bodies(self._config, self._formats), open_log(self._config)
        traces = open_traces(self._config)
        services = Services(
            config=self._config,
            fleet=fleet,
            codec=self._codec,
            metrics=self._metrics,
            bodies=bodies,
            log=request_log,
            traces=traces,
        )
        app = create_app(services, health=health, keys=self._keys, siblings=self._siblings)
        self._server = _UvicornServer(
            _uvicorn_config(app, self._config, self._metrics, self._certificate), fleet, self._config.shutdown_grace
        )
        try:
            if self._siblings is not None:
                await self._siblings.start()
            bodies.start()
            fleet.start()
            watching = asyncio.create_task(health.run(changed, self._on_ready))
            freshening = asyncio.create_task(keep_fresh(self._files()))
            self._end()
            sockets = listeners(self._sock)
            try:
                await self._server.serve(sockets=sockets)
            finally:
                for sock in sockets:
                    sock.close()
                watching.cancel()
                freshening.cancel()
                await asyncio.wait([watching, freshening])
        finally:
            bodies.close()
            fleet.close()
            if request_log is not None:
                request_log.close()
            if traces is not None:
                traces.close()
            self._sock.close()
            if self._siblings is not None:
                self._siblings.close()
        for task in (watching, freshening):
            if not task.cancelled():
                task.result()  # raise a bug of the task

    def _files(self) -> list[Callable[[], None]]:
        refresh = [self._keys.refresh] if self._config.access.api_key_file is not None else []
        return refresh if self._certificate is None else [*refresh, self._certificate.refresh]

    @property
    def workers(self) -> tuple[WorkerAddress, ...]:
        """The workers in use."""
        return self._config.workers if self._fleet is None else self._fleet.admission.ranks.addresses

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Call this in the event loop if it runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def replace_workers(
        self, workers: tuple[WorkerAddress, ...], then: Callable[[], None], incident: Mapping[str, Any] | None = None
    ) -> None:
        """Continue with these workers, then call `then` in the loop. `incident` describes why, as JSON."""

        def replace() -> None:
            if self._fleet is not None:
                self._fleet.replace(workers, incident)
            then()

        self._in_loop(replace)

    def obey(self, order: FleetOrder, then: Callable[[int], None]) -> None:
        """Carry out an order. Then call `then` in the loop with its answer."""

        def obey() -> None:
            then(0 if self._fleet is None else self._fleet.obey(order))

        self._in_loop(obey)

    def give_up(self, reason: str) -> None:
        """End all requests with this error, then `serve`. It may be called before `serve`."""
        self._given_up = self._given_up or reason
        self._in_loop(self._end)

    def stop(self) -> None:
        """Shut down gracefully; a second call ends open streams at once. It may be called before `serve`."""
        self._stop_requests += 1
        self._in_loop(self._end)

    def _end(self) -> None:
        """Apply earlier calls of `give_up` and `stop`, once the server exists."""
        if self._fleet is None or self._server is None:
            return
        if self._given_up is not None:
            self._fleet.give_up(self._given_up)
        if self._given_up is not None or self._stop_requests:
            self._server.request_exit(at_once=self._stop_requests > 1)


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, with a shutdown that ends streams with an error."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, grace: float) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._grace = grace
        self._hurry = asyncio.Event()

    def request_exit(self, *, at_once: bool) -> None:
        """Leave the main loop. `at_once` also ends open streams."""
        self._fleet.stop(_STOPPING)
        self.should_exit = True
        if at_once:
            self._hurry.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals: the embedding program does."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, give open ones their grace period, then end them with an error."""
        self._fleet.stop(_STOPPING)
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.wait([ending])

    async def _end_requests(self) -> None:
        with contextlib.suppress(TimeoutError):  # boundary: the grace period is over
            async with asyncio.timeout(self._grace):
                await self._hurry.wait()
        self._fleet.end_all(_STOPPING)


def _uvicorn_config(
    app: ASGIApp, settings: RouterConfig, metrics: RouterMetrics, certificate: Certificate | None
) -> uvicorn.Config:
    """Return uvicorn's configuration, with `ConnectionProtocol` for the limits that uvicorn lacks."""
    protocol = functools.partial(
        ConnectionProtocol, limits=settings, metrics=metrics, refusals=Refusals(log), outbox=ChunkOutbox()
    )
    config = uvicorn.Config(
        cast(Any, app),  # starlette and uvicorn declare the ASGI protocol each
        http=cast(Any, protocol),
        timeout_keep_alive=cast(Any, settings.keep_alive_timeout),  # call_later takes fractions too
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        # Streams end after the grace period. This limit is for clients that do not read the last bytes.
        timeout_graceful_shutdown=int(settings.shutdown_grace) + 2,
    )
    config.load()
    # uvicorn's own SSL options allow neither a renewable context nor a clear error for an encrypted key.
    config.ssl = None if certificate is None else certificate.context
    return config


def freeze_start_up() -> None:
    """Exempt all present objects from garbage collection. A full collection of them would block streams for 30 ms."""
    gc.collect()
    gc.freeze()


def run_router(server: RouterServer) -> None:
    """Run a router until SIGINT, SIGTERM or SIGHUP, if this is the main thread; a second signal ends streams."""
    mine = threading.current_thread() is threading.main_thread()
    before = {s: signal.getsignal(s) for s in _END_SIGNALS} if mine else {}
    # `nohup` starts programs with SIGHUP ignored, which must remain so.
    before = {s: handler for s, handler in before.items() if handler is not signal.SIG_IGN}

    freeze_start_up()
    sys.setswitchinterval(_SWITCH_SECONDS)

    async def main() -> None:
        for signum in before:
            asyncio.get_running_loop().add_signal_handler(signum, server.stop)
        await server.serve()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        for signum, handler in before.items():  # a closing event loop restores the system's default handlers instead
            signal.signal(signum, handler)
