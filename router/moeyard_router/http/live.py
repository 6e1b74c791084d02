"""The dashboard at / and its data: the fleet now, running totals, the latest requests.

The files need no key; their data under /v1 does. All numbers are those of /metrics. The page computes rates and
quantiles from two answers, as Prometheus does from two scrapes.
"""

import gzip
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moeyard_router.api.endpoints import Services
from moeyard_router.config import Setting
from moeyard_router.fleet.collector import kv_usage, total
from moeyard_router.fleet.health import Health
from moeyard_router.fleet.loads import rows_of_ranks
from moeyard_router.fleet.records import RECENT
from moeyard_router.http.siblings import Siblings, merged

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
# Scripts, styles and connections only of this server, no frames around the page, no forms.
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # revalidated each time, because a new server version has new files
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
        """Return 200, or 304 if the client has the current file."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.body, headers=self.headers)


def page_routes() -> list[Route]:
    """Return the routes of the page and its files, which are read at this call."""
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
_FIGURES_PAGE = "figures"  # its name among sibling routers
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
    """The data of the dashboard and of /v1/fleet. Stateless: each request reads the fleet and the metrics."""

    def __init__(self, services: Services, health: Health, siblings: Siblings | None) -> None:
        self._config = services.config
        self._fleet = services.fleet
        self._codec = services.codec
        self._health = health
        names = [f"moeyard_{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "sum", "count")]
        names += [f"moeyard_{name}_total" for name in _COUNTERS]
        self._registry = services.metrics.registry.restricted_registry(names)
        self._siblings = siblings
        if siblings is not None:
            siblings.offer(_FIGURES_PAGE, lambda: orjson.dumps(self._own_figures()), _joined)

    async def fleet(self) -> dict[str, Any]:
        """Return state and latest snapshot of every rank, with what all routers have in flight there."""
        fleet = self._fleet.admission.describe() if self._siblings is None else self._described(await self._figures())
        return {**fleet, "unready": self._health.unready()}

    async def now(self) -> dict[str, Any]:
        """Return the fleet and the routers' totals. Times are seconds. Unknown figures are null or absent."""
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
            "has_text": self._codec.has_text,
            "has_chat": self._codec.template is not None,
            "unready": self._health.unready(),
            **fleet,
            "generation": self._fleet.admission.generation,
            "totals": {name: total(self._fleet, name) for name in _FLEET_SUMS} | {"kv_usage": kv_usage(workers)},
            **_counters_and_histograms(figures["samples"]),
            "requests": figures["requests"],
            "refusals": figures["refusals"],
        }

    async def incidents(self) -> dict[str, Any]:
        """Return the latest losses and how the fleet recovered."""
        return {"time": time.time(), "incidents": self._fleet.admission.incidents.latest()}

    async def config(self) -> dict[str, Any]:
        """Return the settings in use with their sources, and those in which ranks differ since a restart."""
        changed = [
            {"rank": rank.rank, "name": name, "value": value}
            for rank in self._fleet.admission.ranks.addresses
            for name, value in rank.changes
        ]
        settings = [asdict(self._current(setting)) for setting in self._config.settings]
        return {"time": time.time(), "version": self._config.version, "settings": settings, "changed": changed}

    def _current(self, setting: Setting) -> Setting:
        """Return a setting as it is now: `moeyard scale` changes the number of workers and what follows from it."""
        count = len(self._fleet.admission.ranks)
        if setting.name == "workers" and setting.value != count:
            return replace(setting, value=count, source="derived", why="moeyard scale")
        if setting.name == "max-inflight":
            return replace(setting, value=self._config.most_inflight(count))
        return setting

    async def experts(self) -> dict[str, Any]:
        """Return the rows that each expert computed, per rank: `rows[i]` of layer `layers[i]`, in `experts` order."""
        loads = await self._fleet.loads.read()
        ranks = [
            {"rank": each.rank, "layers": each.layers, "experts": each.experts, "rows": rows}
            for each, rows in zip(loads, rows_of_ranks(loads), strict=True)
        ]
        return {"time": time.time(), "generation": self._fleet.admission.generation, "ranks": ranks}

    def _described(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return the fleet as this router sees it, with the in-flight counts of all routers."""
        fleet = self._fleet.admission.describe() | {"inflight": figures["inflight"]}
        for worker, count in zip(fleet["workers"], figures["router_inflight"], strict=False):
            worker["router_inflight"] = count
        return fleet

    async def _figures(self) -> dict[str, Any]:
        """Return the figures of this router, or their sums over all routers on the port."""
        if self._siblings is None:
            return self._own_figures()
        figures: dict[str, Any] = orjson.loads(await self._siblings.joined(_FIGURES_PAGE))
        return figures

    def _own_figures(self) -> dict[str, Any]:
        described = self._fleet.admission.describe()
        samples = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                labels = [value for name, value in sample.labels.items() if name != "model_name"]
                samples[" ".join((sample.name, *labels))] = sample.value
        return {
            "inflight": described["inflight"],
            "router_inflight": [worker["router_inflight"] for worker in described["workers"]],
            "samples": samples,
            "requests": list(reversed(self._fleet.recent)),
            "refusals": self._fleet.refusals.latest(),
        }


def _joined(living: Sequence[bytes], ended: Sequence[bytes]) -> bytes:
    """Join pages of figures, see `Siblings`."""
    return orjson.dumps(merged([*map(orjson.loads, living)], [*map(orjson.loads, ended)], num_requests=RECENT))


def _counters_and_histograms(samples: Mapping[str, float]) -> dict[str, Any]:
    """Return counters by label, and histograms with cumulative `buckets` [upper bound or null for infinity, count]."""
    counters: dict[str, Any] = {}
    histograms: dict[str, Any] = {}
    for key, value in samples.items():
        sample, _, label = key.removeprefix("moeyard_").partition(" ")
        name, _, part = sample.rpartition("_")
        if part == "total":
            if label:
                counters.setdefault(name, {})[label] = value
            else:
                counters[name] = value
            continue
        histogram = histograms.setdefault(name, {"buckets": []})
        if part == "bucket":
            histogram["buckets"].append([None if label == "+Inf" else float(label), value])
        else:
            histogram[part] = value
    return {"counters": counters, "histograms": histograms}
