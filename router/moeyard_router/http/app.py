"""The router's HTTP surface as an ASGI app."""

import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeyard_router.api.endpoints import CountEndpoint, GenerateEndpoint
from moeyard_router.api.large import Bodies
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError, no_route, unknown_model
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.http.credentials import KeyRing
from moeyard_router.http.gate import RequestGate
from moeyard_router.http.live import STATIC, LiveView, page_routes
from moeyard_router.http.openapi import Documents
from moeyard_router.http.origins import Origins
from moeyard_router.http.siblings import Siblings, summed
from moeyard_router.metrics import METRICS_CONTENT_TYPE, RouterMetrics
from moeyard_router.text.chat import Codec

_METRICS_PAGE = "metrics"  # what siblings are asked for
_MODELS = "/v1/models"


def create_app(
    config: RouterConfig,
    fleet: Fleet,
    *,
    codec: Codec,
    metrics: RouterMetrics,
    health: Health,
    bodies: Bodies,
    keys: KeyRing,
    siblings: Siblings | None = None,
) -> ASGIApp:
    """The app before a fleet that somebody else starts and stops."""
    live = LiveView(config, fleet, codec=codec, metrics=metrics, health=health, siblings=siblings)
    pages = _Pages(config, fleet, metrics=metrics, health=health, siblings=siblings)

    def generate(api: str) -> GenerateEndpoint:
        return GenerateEndpoint(config, api=api, fleet=fleet, codec=codec, metrics=metrics, bodies=bodies)

    def count(api: str) -> CountEndpoint:
        return CountEndpoint(config, api=api, codec=codec, metrics=metrics, bodies=bodies)

    documents = Documents(config)
    origins = Origins(config.door.allowed_origins, host=config.host, keys=keys.asks)

    def page(answer: Callable[[], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return _json(await answer())

        return endpoint

    async def incidents_page(request: Request) -> Response:
        return _json({"time": time.time(), "incidents": fleet.incidents.latest()})

    routes = [
        Route("/v1/completions", generate("completion"), methods=["POST"]),
        Route("/v1/chat/completions", generate("chat"), methods=["POST"]),
        Route("/v1/responses", generate("response"), methods=["POST"]),
        Route("/v1/messages", generate("message"), methods=["POST"]),
        Route("/v1/messages/count_tokens", count("count_tokens"), methods=["POST"]),
        Route(_MODELS, pages.models),
        Route(f"{_MODELS}/{{id:path}}", pages.model),  # names of models have slashes
        Route("/tokenize", count("tokenize"), methods=["POST"]),
        Route("/detokenize", count("detokenize"), methods=["POST"]),
        Route("/v1/fleet", page(live.fleet)),
        Route("/v1/fleet/live", page(live.now)),
        Route("/v1/fleet/experts", page(live.experts)),
        Route("/v1/fleet/incidents", incidents_page),
        *page_routes(),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/health", pages.readyz),  # vLLM's name for it
        Route("/ping", pages.readyz, methods=["GET", "POST"]),  # SageMaker's
        Route("/version", pages.version),
        Route("/openapi.json", documents.openapi),
        Route("/docs", documents.page),
        Route("/metrics", pages.metrics),
        Route("/metrics/targets", pages.metrics_targets),
    ]
    handlers: Any = {HTTPException: _http_error, Exception: _crash}
    app = Starlette(routes=routes, exception_handlers=handlers)
    gate = RequestGate(app, config=config, keys=keys, origins=origins, metrics=metrics)
    return _CountAnswers(gate, metrics, frozenset(r.path for r in routes))


class _Pages:
    def __init__(
        self, config: RouterConfig, fleet: Fleet, *, metrics: RouterMetrics, health: Health, siblings: Siblings | None
    ) -> None:
        self._siblings = siblings
        if siblings is not None:
            siblings.offer(_METRICS_PAGE, metrics.own_page)
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._health = health
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The one model that is served, in OpenAI's list, once under each of its names."""
        return _json({"object": "list", "data": [self._card(name) for name in self._config.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:  # /v1/models/ with a slash too many
            return await self.models(request)
        if name not in self._config.model_names:
            error = unknown_model(name, self._config.model_names)
            return _json(error.body(), error.status)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "moeyard",
            "root": self._config.model_name,  # where it lies is nobody's business
            "parent": None,
            "max_model_len": self._config.max_model_len,
        }

    async def livez(self, request: Request) -> Response:
        """200 as long as the router runs and the fleet may come back; 503 with the reason once it is given up."""
        if self._fleet.given_up:
            return _json({"status": "dead", "reason": self._fleet.failure}, status=503)
        return _json({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 if a request sent now would be decoded, otherwise 503 with the reason."""
        problem = self._health.unready()
        if problem is None:
            return _json({"status": "ready"})
        return _json({"status": "unready", "reason": problem}, status=503)

    async def version(self, request: Request) -> Response:
        return _json({"version": self._config.version})

    async def metrics(self, request: Request) -> Response:
        """The router's own metrics for Prometheus; of several routers on a port, the sum."""
        own = self._metrics.own_page()
        if self._siblings is not None:
            own = summed([own, *await self._siblings.ask(_METRICS_PAGE)])
        return Response(own + self._metrics.fleet_page(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def metrics_targets(self, request: Request) -> Response:
        """Where the workers' metrics are, for Prometheus' HTTP service discovery."""
        groups = []
        for worker in self._fleet.addresses:
            if worker.metrics_url is not None:
                url = urlsplit(worker.metrics_url)
                labels = {
                    "worker": str(worker.rank),
                    "__scheme__": url.scheme or "http",
                    "__metrics_path__": url.path or "/metrics",
                }
                groups.append({"targets": [url.netloc], "labels": labels})
        return _json(groups)


class _CountAnswers:
    """Counts every answer by route and status; paths that are no route share one label, as do models by name."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        path = scope.get("path", "")
        if path.startswith(f"{_MODELS}/"):
            path = f"{_MODELS}/{{id}}"
        elif path.startswith("/static/"):
            path = STATIC
        elif path not in self._paths:
            path = "other"

        def counting(message: Message) -> Awaitable[None]:  # no coroutine of its own: a stream passes here per token
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            return send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            self._metrics.http_took(path, time.monotonic() - begun)


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status_code=status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    told = no_route(request.method, request.url.path, error.status_code, error.detail)
    return _json(told.body_at(request.url.path), error.status_code, dict(error.headers or {}))


async def _crash(request: Request, error: Exception) -> Response:
    message = f"internal error: {type(error).__name__}"
    return _json(ApiError(500, message).body_at(request.url.path), 500)
