"""The router as a program inside a program: uvicorn on a socket that is already bound, and an orderly end."""

import asyncio
import contextlib
import functools
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from moeyard_router.api.intake import formats_of
from moeyard_router.api.large import Bodies
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.aliases import VllmAliases, VllmFleetAliases
from moeyard_router.fleet.collector import FleetCollector
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.http.app import METRICS_PAGE, create_app
from moeyard_router.http.connection import ConnectionLimits, ConnectionProtocol
from moeyard_router.http.files import keep_fresh
from moeyard_router.http.keys import KeyRing
from moeyard_router.http.siblings import Siblings
from moeyard_router.http.tls import Certificate, open_certificate
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.chat import open_codec

_STOPPING = "the router is shutting down"


class RouterServer:
    """One router. `serve` runs it in the current event loop until `stop`, which any thread may call.

    `on_ready` is called once, in the loop, when every worker has decoded; `on_failed` with the reason when the fleet is
    lost (the router then goes on to answer 503 until it gets other workers or is stopped). Neither may block.
    `siblings`: the other routers on the port, whose counts are added to this one's on /metrics. Raises
    `ValueError` for a checkpoint directory without a usable tokenizer, a chat template that cannot be used, a parser of
    tool calls or reasoning that does not exist, and for keys or certificates that are none.
    """

    def __init__(
        self,
        config: RouterConfig,
        sock: socket.socket,
        *,
        on_ready: Callable[[], None],
        on_failed: Callable[[str], None] = lambda _: None,
        siblings: Siblings | None = None,
    ) -> None:
        self._siblings = siblings
        self._config = config
        self._sock = sock
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._keys = KeyRing(config.door)
        self._certificate = open_certificate(config.door)
        self._codec = open_codec(config.model_path, config.chat_template)
        self._formats = formats_of(config, self._codec)
        self._metrics = RouterMetrics(config.model_name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requests = 0
        self._server: _Server | None = None
        self._fleet: Fleet | None = None

    async def serve(self) -> None:
        """Serve until stopped; closes the socket. Open streams get `shutdown_grace` seconds, then a named error."""
        self._loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        fleet = self._fleet = Fleet(self._config, self._metrics, on_change=changed.set, on_failed=self._on_failed)
        health = Health(self._config, fleet)
        self._metrics.fleet.register(FleetCollector(fleet))
        if "vllm" in self._config.metric_aliases:
            self._metrics.aliases.register(VllmAliases(self._metrics))
            self._metrics.fleet.register(VllmFleetAliases(fleet))
        bodies = Bodies(self._config, self._formats)
        app = create_app(
            self._config,
            fleet,
            codec=self._codec,
            metrics=self._metrics,
            health=health,
            bodies=bodies,
            keys=self._keys,
            siblings=self._siblings,
        )
        grace = self._config.shutdown_grace
        self._server = _Server(_uvicorn_config(app, self._config, self._metrics, self._certificate), fleet, grace)
        try:
            if self._siblings is not None:
                await self._siblings.start({METRICS_PAGE: self._metrics.own_page})
            bodies.start()
            fleet.start()
            watching = asyncio.create_task(health.run(changed, self._on_ready))
            freshening = asyncio.create_task(keep_fresh(self._files()))
            if self._stop_requests:
                self._server.should_exit = True
            try:
                await self._server.serve(sockets=[self._sock])
            finally:
                watching.cancel()
                freshening.cancel()
                await asyncio.wait([watching, freshening])
        finally:
            bodies.close()
            fleet.close()
            self._sock.close()
            if self._siblings is not None:
                self._siblings.close()
        for task in (watching, freshening):
            if not task.cancelled():
                task.result()  # a bug in the watching task must not pass unseen

    def _files(self) -> list[Callable[[], None]]:
        """What is read again when its files change."""
        refresh = [self._keys.refresh] if self._config.door.api_key_file is not None else []
        return refresh if self._certificate is None else [*refresh, self._certificate.refresh]

    def replace_workers(self, workers: tuple[WorkerAddress, ...], then: Callable[[], None]) -> None:
        """Go on with workers that were started in the place of these, and call `then` in the loop. From any thread."""

        def replace() -> None:
            if self._fleet is not None and self._fleet.stopping is None:
                self._fleet.replace(workers)
            then()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(replace)

    def stop(self) -> None:
        """Begin an orderly end; a second call ends open streams at once. Safe from any thread and before `serve`."""
        self._stop_requests += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_now)

    def _stop_now(self) -> None:
        if self._server is not None:
            self._server.request_exit(at_once=self._stop_requests > 1)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with an end that streams can follow."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, grace: float) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._grace = grace
        self._hurry = asyncio.Event()

    def request_exit(self, *, at_once: bool) -> None:
        """Leave the main loop; `at_once` also ends what still streams."""
        self._fleet.stop(_STOPPING)
        self.should_exit = True
        if at_once:
            self._hurry.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever embeds this server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, give open ones their grace, then end them with a named error."""
        self._fleet.stop(_STOPPING)
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.wait([ending])

    async def _end_requests(self) -> None:
        with contextlib.suppress(TimeoutError):  # boundary: the grace is over, as expected
            await asyncio.wait_for(self._hurry.wait(), self._grace)
        self._fleet.end_all(_STOPPING)


def _uvicorn_config(
    app: ASGIApp, settings: RouterConfig, metrics: RouterMetrics, certificate: Certificate | None
) -> uvicorn.Config:
    """uvicorn with httptools and a few limits of our own (`ConnectionProtocol`).

    64 streams of 5 ms, CPU time per event sent (2026-11-22, two cores): uvicorn with httptools 24 to 26 us, with h11 33
    to 41, with zttp (0.0.35, weeks old) 18 to 23; granian 20, which brings processes and loops of its own where the
    fleet's sockets want to live in ours; hypercorn 61 to 67. Only granian and h11 limit a head at all.
    """
    limits = ConnectionLimits(
        header_bytes=settings.max_header_bytes,
        header_seconds=settings.header_timeout,
        body_seconds=settings.body_timeout,
        send_seconds=settings.send_timeout,
    )
    protocol = functools.partial(
        ConnectionProtocol, limits=limits, refused=functools.partial(metrics.answered, "other"), cut=metrics.cut
    )
    config = uvicorn.Config(
        cast(Any, app),  # starlette's and uvicorn's names for the same protocol
        http=cast(Any, protocol),
        timeout_keep_alive=cast(Any, settings.keep_alive_timeout),  # handed to call_later, which takes fractions too
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        # Streams end by themselves after the grace; this is for clients that do not read their last bytes.
        timeout_graceful_shutdown=int(settings.shutdown_grace) + 2,
    )
    config.load()
    # Its own way to a context takes neither one that can be renewed nor a word about an encrypted key.
    config.ssl = None if certificate is None else certificate.context
    return config


def run_router(server: RouterServer) -> None:
    """Run a router until SIGINT or SIGTERM; blocks. Returns after an orderly end.

    In the main thread it handles both signals for its duration (a second one ends open streams at once); elsewhere it
    runs until the process ends.
    """
    mine = threading.current_thread() is threading.main_thread()
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if mine else {}

    # What is there now stays: a full collection that looked through it, 30 ms, would hold all streams up.
    gc.collect()
    gc.freeze()

    async def main() -> None:
        for signum in before:
            asyncio.get_running_loop().add_signal_handler(signum, server.stop)
        await server.serve()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        for signum, handler in before.items():  # a closing event loop leaves the system's defaults behind
            signal.signal(signum, handler)
