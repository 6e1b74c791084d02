"""The router's HTTP surface as an ASGI app."""

import asyncio
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
from starlette.types import ASGIApp

from moeyard_router.api.endpoints import CountEndpoint, GenerateEndpoint, Services
from moeyard_router.errors import ApiError, no_route, unknown_model
from moeyard_router.fleet.health import Health
from moeyard_router.http.credentials import KeyRing
from moeyard_router.http.engine_info import EngineInfo
from moeyard_router.http.gate import MODELS, RequestGate
from moeyard_router.http.live import LiveView, page_routes
from moeyard_router.http.openapi import Documents
from moeyard_router.http.siblings import Siblings, largest, summed
from moeyard_router.http.trainers import PATHS as TRAINERS
from moeyard_router.http.trainers import trainer_routes
from moeyard_router.metrics import METRICS_CONTENT_TYPE

_CONTROL_ONLY = (
    "this path is served on the server's control socket only; "
    "`moeyard serve --control-listen api --control-key-file FILE` opens it here"
)
_METRICS_PAGE, _FLEET_PAGE = "metrics", "fleet"  # their names among sibling routers


def create_app(services: Services, *, health: Health, keys: KeyRing, siblings: Siblings | None = None) -> ASGIApp:
    """Return the app of a fleet that the caller starts and stops."""
    live = LiveView(services, health, siblings)
    pages = _Pages(services, health, siblings)
    info = EngineInfo(services, live)
    documents = Documents(services.config)

    def page(data: Callable[[], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return _json(await data())

        return endpoint

    routes = [
        Route("/v1/completions", GenerateEndpoint(services, "completion"), methods=["POST"]),
        Route("/v1/chat/completions", GenerateEndpoint(services, "chat"), methods=["POST"]),
        Route("/inference/v1/generate", GenerateEndpoint(services, "generate"), methods=["POST"]),
        Route("/generate", GenerateEndpoint(services, "sglang"), methods=["POST"]),
        Route("/v1/responses", GenerateEndpoint(services, "response"), methods=["POST"]),
        Route("/v1/messages", GenerateEndpoint(services, "message"), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountEndpoint(services, "count_tokens"), methods=["POST"]),
        Route("/tokenize", CountEndpoint(services, "tokenize"), methods=["POST"]),
        Route("/detokenize", CountEndpoint(services, "detokenize"), methods=["POST"]),
        Route(MODELS, page(pages.models)),
        Route(f"{MODELS}/{{id:path}}", pages.model),  # model names may contain slashes
        Route("/v1/fleet", page(live.fleet)),
        Route("/v1/fleet/live", page(live.now)),
        Route("/v1/fleet/experts", page(live.experts)),
        Route("/v1/fleet/incidents", page(live.incidents)),
        Route("/v1/fleet/config", page(live.config)),
        *(Route(path, page(info.model)) for path in ("/model_info", "/get_model_info")),
        *(Route(path, page(info.server)) for path in ("/server_info", "/get_server_info")),
        Route("/v1/loads", page(info.loads)),
        *page_routes(),
        *trainer_routes(None if services.config.control is None else services.config.control[0]),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/health", pages.readyz),  # vLLM's name
        Route("/health_generate", pages.readyz),  # SGLang's name
        Route("/ping", pages.readyz, methods=["GET", "POST"]),  # SageMaker's name
        Route("/version", page(pages.version)),
        Route("/openapi.json", documents.openapi),
        Route("/docs", documents.page),
        Route("/metrics", pages.metrics),
        Route("/metrics/targets", page(pages.metrics_targets)),
    ]
    handlers: Any = {HTTPException: _http_error, Exception: _crash}
    app = Starlette(routes=routes, exception_handlers=handlers)
    paths = frozenset(route.path for route in routes)
    return RequestGate(
        app,
        config=services.config,
        keys=keys,
        metrics=services.metrics,
        refusals=services.fleet.refusals,
        paths=paths,
        traces=services.traces,
    )


class _Pages:
    def __init__(self, services: Services, health: Health, siblings: Siblings | None) -> None:
        self._config = services.config
        self._fleet = services.fleet
        self._metrics = services.metrics
        self._health = health
        self._siblings = siblings
        self._created = int(time.time())
        if siblings is not None:
            siblings.offer(_METRICS_PAGE, services.metrics.own_page, summed)
            siblings.offer(_FLEET_PAGE, services.metrics.fleet_page, lambda living, _: largest(living), store=False)

    async def models(self) -> dict[str, Any]:
        """Return OpenAI's list of models: the served model under each of its names."""
        return {"object": "list", "data": [self._card(name) for name in self._config.model_names]}

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:  # /v1/models/ with a trailing slash
            return _json(await self.models())
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
            "root": self._config.model_name,  # vLLM has the checkpoint's path here, which clients need not know
            "parent": None,
            "max_model_len": self._config.max_model_len,
        }

    async def livez(self, request: Request) -> Response:
        """Return 200 while the fleet may still recover, 503 with the reason after the router has given it up."""
        if self._fleet.admission.given_up:
            return _json({"status": "dead", "reason": self._fleet.admission.failure}, 503)
        return _json({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """Return 200 if a request would run now, otherwise 503 with the reason."""
        problem = self._health.unready()
        if problem is None:
            return _json({"status": "ready"})
        return _json({"status": "unready", "reason": problem}, 503)

    async def version(self) -> dict[str, str]:
        return {"version": self._config.version, **self._fleet.admission.identified()}

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics: the sum over all routers on the port, and the fleet's."""
        if self._siblings is None:
            counted, fleet = self._metrics.own_page(), self._metrics.fleet_page()
        else:
            counted, fleet = await asyncio.gather(*map(self._siblings.joined, (_METRICS_PAGE, _FLEET_PAGE)))
        return Response(counted + fleet, headers={"content-type": METRICS_CONTENT_TYPE})

    async def metrics_targets(self) -> list[dict[str, Any]]:
        """Return the addresses of the workers' metrics for Prometheus' HTTP service discovery."""
        groups = []
        for worker in self._fleet.admission.ranks.addresses:
            if worker.metrics_url is not None:
                url = urlsplit(worker.metrics_url)
                labels = {
                    "worker": str(worker.rank),
                    "__scheme__": url.scheme or "http",
                    "__metrics_path__": url.path or "/metrics",
                }
                groups.append({"targets": [url.netloc], "labels": labels})
        return groups


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status_code=status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    detail = _CONTROL_ONLY if error.status_code == 404 and path in TRAINERS else error.detail
    answer = no_route(request.method, path, error.status_code, detail)
    return _json(answer.body_at(request.url.path), error.status_code, dict(error.headers or {}))


async def _crash(request: Request, error: Exception) -> Response:
    message = f"internal error: {type(error).__name__}"
    return _json(ApiError(500, message).body_at(request.url.path), 500)
