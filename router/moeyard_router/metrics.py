"""The router's own Prometheus metrics, in registries of their own."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# Seconds. The buckets for tokens and requests are those of docs/metrics.md, for router and workers.
TOKEN_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03),
    *(0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5),
)
REQUEST_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0),
)
# From a new connection to the same worker up to a checkpoint that is read again from a slow disk.
RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
# Tokens: 1, 2, 5 and so on up to the limit of the longest models. These and the buckets of choices are vLLM's.
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
# States of a worker as the router sees it. A worker may not have sent a snapshot yet.
_WORKER_STATES = ("connecting", "ready", "draining", "recovering", "failed", "stopping", "away")

_M = TypeVar("_M", Counter, Gauge, Histogram)


class RouterMetrics:
    """Owner of the registries. Every metric has vLLM's label `model_name`.

    registry: metrics of this router. `aliases`: the same figures under other names, if configured.
    fleet: metrics of the fleet, which are the same at each of its routers.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.aliases = CollectorRegistry()
        self.fleet = CollectorRegistry()
        self._model_name = model_name

        def made(kind: type[_M], name: str, text: str, *labels: str, **options: Any) -> _M:
            """Register a metric; return its only series if it has no further `labels`."""
            metric = kind(f"moeyard_{name}", text, ["model_name", *labels], **{"registry": self.registry, **options})
            return metric if labels else metric.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return made(Histogram, name, text, buckets=buckets)

        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token, per choice.", REQUEST_BUCKETS
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Per choice: time from first to last token over the number of tokens less one.",
            TOKEN_BUCKETS,
        )
        self.tokens = _TokenMetrics(model_name)
        self.registry.register(self.tokens)
        self.e2e = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of a choice.", REQUEST_BUCKETS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a choice.", LENGTH_BUCKETS)
        self.output_length = histogram("request_generation_tokens", "Output tokens of a choice.", LENGTH_BUCKETS)
        self.longest_output = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", LENGTH_BUCKETS
        )
        self.queue = histogram(
            "request_queue_seconds", "Per choice: its wait at the router and in its worker's queue.", REQUEST_BUCKETS
        )
        self.prefill = histogram(
            "request_prefill_seconds", "Per choice: from its start at the worker to its first token.", REQUEST_BUCKETS
        )
        self.decode = histogram(
            "request_decode_seconds", "Per choice: from its first token to its last.", REQUEST_BUCKETS
        )
        self.inference = histogram(
            "request_inference_seconds", "Per choice: from its start at the worker to its last token.", REQUEST_BUCKETS
        )
        self.computed_length = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a choice that were not cached.", LENGTH_BUCKETS
        )
        self.max_tokens = histogram("request_params_max_tokens", "Output limit of a choice.", LENGTH_BUCKETS)
        self.params_n = histogram("request_params_n", "Choices per prompt of a request.", CHOICE_BUCKETS)
        self.prompt_tokens = made(
            Counter, "prompt_tokens", "Prompt tokens of requests that got a first token, or asked for none."
        )
        self.cached_prompt_tokens = made(
            Counter, "prompt_tokens_cached", "Prompt tokens of the same requests that a prefix index held."
        )
        self._success = made(Counter, "request_success", "Choices ended, by reason.", "finished_reason")
        self._rejections = made(Counter, "rejections", "Requests refused, by reason.", "reason")
        self._http = made(Counter, "http_requests", "HTTP answers, by route and status.", "path", "status")
        self._http_seconds = made(
            Histogram,
            "http_request_duration_seconds",
            "From an HTTP request's head to the last byte of its answer, streams included.",
            "path",
            buckets=REQUEST_BUCKETS,
        )
        self.recoveries = made(Counter, "recoveries", "Times that the fleet was whole again after a loss.")
        self.recovery_seconds = histogram(
            "recovery_seconds", "From a loss until the fleet was whole again.", RECOVERY_BUCKETS
        )
        # Changes on purpose, by kind.
        self.changes = {
            "restart": made(
                Counter, "worker_restarts", "Times that the fleet was whole again after a restart on purpose."
            ),
            "scale": made(
                Counter, "fleet_scalings", "Times that the fleet was whole again with more or fewer workers."
            ),
            "sleep": made(Counter, "sleep_changes", "Times that the fleet fell asleep or woke up."),
            "update": made(Counter, "weight_updates", "Times that the fleet was whole again with other weights."),
        }
        self.carried = made(Counter, "requests_carried", "Sequences that continued on another rank or connection.")
        self.recomputed = made(
            Counter,
            "tokens_recomputed",
            "Tokens of carried sequences that no cache of their new rank was expected to hold.",
        )
        self.inflight = made(Gauge, "num_requests_inflight", "Sequences on the workers.")
        self.waiting = made(Gauge, "num_requests_queued", "Sequences that wait in the router for a place on a worker.")
        self.waited = histogram(
            "router_queue_seconds", "Wait at the router of a request that started after it.", REQUEST_BUCKETS
        )
        self._cut = made(Counter, "connections_cut", "Connections that the router cut, by reason.", "reason")
        # These series exist from the start, so that alerts and panels see the first event as an increase.
        for counter, labels in (
            (self._success, ("stop", "length", "abort", "error")),
            (self._rejections, ("queue_full", "queue_timeout", "overload")),
            (self._cut, ("slow_reader",)),
        ):
            for label in labels:
                counter.labels(model_name, label)
        self._workers = made(Gauge, "workers", "Workers by state.", "state", registry=self.fleet)
        ProcessCollector(registry=self.registry)

    def finished(self, reason: str) -> None:
        """Count a choice that ended with `reason`: stop, length, abort or error."""
        self._success.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was refused."""
        self._rejections.labels(self._model_name, reason).inc()

    def cut(self, reason: str) -> None:
        """Count a connection that was cut."""
        self._cut.labels(self._model_name, reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; `path` is a route, never the client's raw path."""
        self._http.labels(self._model_name, path, str(status)).inc()

    def http_took(self, path: str, seconds: float) -> None:
        """Observe the duration of an HTTP answer."""
        self._http_seconds.labels(self._model_name, path).observe(seconds)

    def set_workers(self, states: list[str]) -> None:
        """Publish how many workers are in each state."""
        for state in _WORKER_STATES:
            self._workers.labels(self._model_name, state).set(states.count(state))

    def own_page(self) -> bytes:
        """Return this router's own counts in Prometheus' text format. Those of several routers add up."""
        return generate_latest(self.registry) + generate_latest(self.aliases)

    def fleet_page(self) -> bytes:
        """Return the metrics of the fleet, which are the same at every router."""
        return generate_latest(self.fleet)


class _TokenMetrics(Collector):
    """`moeyard_output_tokens_total` and `moeyard_inter_token_latency_seconds` as plain numbers of one event loop.

    Every token counts here. A gap takes 0.3 us; the histogram of prometheus_client, which locks, takes 2 to 3.
    """

    def __init__(self, model_name: str) -> None:
        self.count = 0  # output tokens of clients' sequences
        self._labels = [model_name]
        self._gaps = [0] * (len(TOKEN_BUCKETS) + 1)
        self._seconds = 0.0

    def observe_gap(self, seconds: float) -> None:
        """Count the time between two token messages of a choice."""
        self._gaps[bisect_left(TOKEN_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def describe(self) -> Iterable[Metric]:
        """Return the families with their names, which restricted registries need."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Yield both families."""
        text = "Output tokens of clients' sequences, as they arrive."
        tokens = CounterMetricFamily("moeyard_output_tokens", text, labels=["model_name"])
        tokens.add_metric(self._labels, self.count)
        yield tokens
        text = "Time between token messages of a choice."
        gaps = HistogramMetricFamily("moeyard_inter_token_latency_seconds", text, labels=["model_name"])
        gaps.add_metric(self._labels, cumulative(TOKEN_BUCKETS, self._gaps), self._seconds)
        yield gaps


def cumulative(bounds: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram. `counts`: of each bucket alone, and of values above the last bound."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


@dataclass(slots=True)
class Timing:
    """Times of one choice in monotonic seconds. Observes the metrics of the choice."""

    metrics: RouterMetrics
    arrived: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0

    def tokens(self, now: float, count: int) -> None:
        """Note that `count` tokens arrived at `now`."""
        if self.first is None:
            self.first = now
            self.metrics.ttft.observe(now - self.arrived)
        else:
            self.metrics.tokens.observe_gap(now - self.last)
        self.last = now
        self.num_tokens += count
        self.metrics.tokens.count += count

    def finished(self, now: float, reason: str, *, prompt_tokens: int, max_tokens: int) -> None:
        """Note the end of the choice. An aborted or failed one counts in no histogram."""
        self.metrics.finished(reason)
        if reason not in ("stop", "length"):
            return
        self.metrics.e2e.observe(now - self.arrived)
        self.metrics.prompt_length.observe(prompt_tokens)
        self.metrics.output_length.observe(self.num_tokens)
        self.metrics.max_tokens.observe(max_tokens)
        if self.first is not None and self.num_tokens > 1:
            self.metrics.tpot.observe((self.last - self.first) / (self.num_tokens - 1))
