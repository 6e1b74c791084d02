"""The dashboard at / and its data: the fleet now, running totals, the latest requests. Made when asked for.

The files hold no secret and are free to all; their data under /v1 asks for a key like any route. Every number is one of
/metrics: the page makes rates and quantiles from two answers, as Prometheus does from two scrapes.
"""

import gzip
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moeyard_router.config import RouterConfig
from moeyard_router.fleet.collector import kv_usage, total
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.fleet.loads import rows_of_ranks
from moeyard_router.fleet.records import RECENT
from moeyard_router.http.siblings import Siblings, merged
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.chat import Codec

STATIC = "/static/{name}"
_FOLDER = Path(__file__).with_name("static")
_INDEX = "index.html"
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".txt": "text/plain; charset=utf-8",
    }
)
# No script, style or connection but from here, no frame around it, no form that leaves it.
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # kept, but asked for again: a new version of the server has new files
        "vary": "accept-encoding",
    }
)


class _File:
    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.packed = gzip.compress(self.body, mtime=0)
        self.headers = {
            **_HEADERS,
            "content-type": _KINDS[path.suffix],
            "etag": f'"{hashlib.sha256(self.body).hexdigest()[:16]}"',
        }

    def answer(self, request: Request) -> Response:
        """200, or 304 to whoever has it already."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.body, headers=self.headers)


def page_routes() -> list[Route]:
    """The page and its files, which are read now."""
    files = {path.name: _File(path) for path in _FOLDER.iterdir() if path.suffix in _KINDS}

    async def index(request: Request) -> Response:
        return files[_INDEX].answer(request)

    async def static(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404, "no such file")
        return file.answer(request)

    return [Route("/", index), Route("/dashboard", index), Route(STATIC, static)]


_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)
_FIGURES_PAGE = "figures"  # what siblings are asked for
_COUNTERS = ("prompt_tokens", "output_tokens", "request_success", "rejections")
_FLEET_SUMS = (
    "num_running",
    "num_waiting",
    "generation_tokens",
    "prefill_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "expert_hits",
    "expert_misses",
    "draft_tokens",
    "accepted_tokens",
)


class LiveView:
    """Answers /v1/fleet/live and /v1/fleet/experts. Keeps nothing and does nothing between two questions."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        *,
        codec: Codec,
        metrics: RouterMetrics,
        health: Health,
        siblings: Siblings | None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._health = health
        self._text = codec.has_text
        self._chat = codec.template is not None
        names = [f"moeyard_{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "sum", "count")]
        names += [f"moeyard_{name}_total" for name in _COUNTERS]
        self._registry = metrics.registry.restricted_registry(names)
        self._siblings = siblings
        if siblings is not None:
            siblings.offer(_FIGURES_PAGE, lambda: orjson.dumps(self._own()))

    async def fleet(self) -> dict[str, Any]:
        """State and latest snapshot of every rank, and what the routers have sent them."""
        fleet = self._fleet.describe() if self._siblings is None else self._described(await self._figures())
        return {**fleet, "unready": self._health.unready()}

    async def now(self) -> dict[str, Any]:
        """The fleet and the routers' totals. Times are seconds; a figure that nobody knows is null or absent."""
        figures = await self._figures()
        fleet = self._described(figures)
        workers = fleet["workers"]
        for worker in workers:
            worker["kv_usage"] = kv_usage([worker])
        return {
            "time": time.time(),
            "monotonic": time.monotonic(),
            "model": self._config.model_name,
            "max_model_len": self._config.max_model_len,
            "has_text": self._text,
            "has_chat": self._chat,
            "unready": self._health.unready(),
            **fleet,
            "generation": self._fleet.generation,
            "totals": {name: total(workers, name) for name in _FLEET_SUMS} | {"kv_usage": kv_usage(workers)},
            **{name: figures[name] for name in ("counters", "histograms", "requests")},
        }

    def _described(self, figures: dict[str, Any]) -> dict[str, Any]:
        """The fleet as this router sees it, with what all of them have in flight."""
        fleet = self._fleet.describe() | {"inflight": figures["inflight"]}
        for worker, count in zip(fleet["workers"], figures["router_inflight"], strict=False):
            worker["router_inflight"] = count
        return fleet

    async def _figures(self) -> dict[str, Any]:
        """What is counted here, of all routers on the port; one alone asks nobody."""
        own = self._own()
        if self._siblings is None:
            return own
        others = [orjson.loads(page) for page in await self._siblings.ask(_FIGURES_PAGE)]
        return merged(orjson.loads(orjson.dumps(own)), others, num_requests=RECENT)

    def _own(self) -> dict[str, Any]:
        described = self._fleet.describe()
        return {
            "inflight": described["inflight"],
            "router_inflight": [worker["router_inflight"] for worker in described["workers"]],
            **self._router_figures(),
            "requests": self._fleet.recent.latest(),
        }

    def _router_figures(self) -> dict[str, Any]:
        """Counters by label, and histograms with cumulative `buckets` [upper bound or null for infinity, count]."""
        counters: dict[str, Any] = {}
        histograms: dict[str, Any] = {}
        for metric in self._registry.collect():
            name = metric.name.removeprefix("moeyard_")
            for sample in metric.samples:
                part = sample.name.removeprefix(metric.name)
                if part == "_total":
                    labels = [value for key, value in sample.labels.items() if key != "model_name"]
                    if labels:
                        counters.setdefault(name, {})[labels[0]] = sample.value
                    else:
                        counters[name] = sample.value
                    continue
                histogram = histograms.setdefault(name, {"buckets": []})
                if part == "_bucket":
                    bound = sample.labels["le"]
                    histogram["buckets"].append([None if bound == "+Inf" else float(bound), sample.value])
                else:
                    histogram[part[1:]] = sample.value
        return {"counters": counters, "histograms": histograms}

    async def experts(self) -> dict[str, Any]:
        """Rows that each expert has computed, per rank: `rows[i]` of layer `layers[i]`, by the expert of `experts`."""
        loads = await self._fleet.loads.read()
        ranks = [
            {"rank": each.rank, "layers": each.layers, "experts": each.experts, "rows": rows}
            for each, rows in zip(loads, rows_of_ranks(loads), strict=True)
        ]
        return {"time": time.time(), "generation": self._fleet.generation, "ranks": ranks}
