"""The router's HTTP surface as an ASGI app."""

import time
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeyard_router.api.endpoints import GenerateEndpoint
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError, unknown_model
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.http.siblings import Siblings
from moeyard_router.http.summing import summed
from moeyard_router.metrics import METRICS_CONTENT_TYPE, RouterMetrics
from moeyard_router.text.chat import Codec

METRICS_PAGE = "metrics"  # what siblings are asked for
_MODELS = "/v1/models"


def create_app(
    config: RouterConfig,
    fleet: Fleet,
    *,
    codec: Codec,
    metrics: RouterMetrics,
    health: Health,
    siblings: Siblings | None = None,
) -> ASGIApp:
    """The app before a fleet that somebody else starts and stops."""
    pages = _Pages(config, fleet, metrics=metrics, health=health, siblings=siblings)
    complete = GenerateEndpoint(config, chat=False, fleet=fleet, codec=codec, metrics=metrics)
    chat = GenerateEndpoint(config, chat=True, fleet=fleet, codec=codec, metrics=metrics)
    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route(_MODELS, pages.models),
        Route(f"{_MODELS}/{{id:path}}", pages.model),  # names of models have slashes
        Route("/v1/fleet", pages.fleet),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/health", pages.readyz),  # vLLM's name for it
        Route("/metrics", pages.metrics),
        Route("/metrics/targets", pages.metrics_targets),
    ]
    handlers: Any = {HTTPException: _http_error, Exception: _crash}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return _CountAnswers(app, metrics, frozenset(r.path for r in routes))


class _Pages:
    """The endpoints that only look."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, *, metrics: RouterMetrics, health: Health, siblings: Siblings | None
    ) -> None:
        self._siblings = siblings
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._health = health
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The one model that is served, in OpenAI's list."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """That model by its name; 404 for any other."""
        name = request.path_params["id"]
        if not name:  # /v1/models/ with a slash too many
            return await self.models(request)
        if name != self._config.model_name:
            error = unknown_model(name, self._config.model_name)
            return _json(error.body(), error.status)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "moeyard",
            "root": str(self._config.model_path or self._config.model_name),
            "parent": None,
            "max_model_len": self._config.max_model_len,
        }

    async def fleet(self, request: Request) -> Response:
        """State and latest snapshot of every rank."""
        return _json({**self._fleet.describe(), "unready": self._health.unready()})

    async def livez(self, request: Request) -> Response:
        """200 as long as the router itself runs."""
        return _json({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 if a request sent now would be decoded, otherwise 503 with the reason."""
        problem = self._health.unready()
        if problem is None:
            return _json({"status": "ready"})
        return _json({"status": "unready", "reason": problem}, status=503)

    async def metrics(self, request: Request) -> Response:
        """The router's own metrics for Prometheus; of several routers on a port, the sum."""
        page = self._metrics.page()
        if self._siblings is not None:
            page = summed([page, *await self._siblings.ask(METRICS_PAGE)])
        return Response(page, headers={"content-type": METRICS_CONTENT_TYPE})

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
        """Pass everything through."""
        path = scope.get("path", "")
        if path.startswith(f"{_MODELS}/"):
            path = f"{_MODELS}/{{id}}"
        elif path not in self._paths:
            path = "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status_code=status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such route, or a method that the route does not have."""
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _json(ApiError(error.status_code, what).body(), error.status_code, dict(error.headers or {}))


async def _crash(request: Request, error: Exception) -> Response:
    """A bug of this program; the server logs it with its traceback."""
    message = f"internal error: {type(error).__name__}"
    return _json(ApiError(500, message).body(), 500)
