"""The router's own Prometheus metrics, in a registry of their own; the workers export the rest."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# Seconds. Both lists are those of docs/metrics.md, for router and workers.
TOKEN_BUCKETS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
)
# Seconds too: from a connection that is made again at once to a checkpoint that is read again from a slow disk.
RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
REQUEST_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    60.0,
    120.0,
)
# Tokens: 1, 2, 5 and so on up to what the longest models take, as vLLM's; choices of a request, as vLLM's too.
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
# As the router sees a worker, which may not have spoken yet.
_WORKER_STATES = ("connecting", "ready", "draining", "recovering", "failed", "stopping", "away")


class RouterMetrics:
    """Owner of the registry; every metric of one model carries vLLM's `model_name` label."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.aliases = CollectorRegistry()  # the same figures under other names, for those who ask for them
        self.fleet = CollectorRegistry()  # what is the fleet's, and the same for every router before it
        label = {"model_name": model_name}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"moeyard_{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(**label)

        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token, per choice.", REQUEST_BUCKETS
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Per choice: time from first to last token over the number of tokens less one.",
            TOKEN_BUCKETS,
        )
        self.itl = _TokenGaps(model_name)
        self.registry.register(self.itl)
        self.e2e = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of a choice.", REQUEST_BUCKETS
        )
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a choice.", LENGTH_BUCKETS)
        self._output_length = histogram("request_generation_tokens", "Output tokens of a choice.", LENGTH_BUCKETS)
        self._longest_output = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", LENGTH_BUCKETS
        )
        self._queue = histogram(
            "request_queue_seconds", "Per choice: its wait at the router and in its worker's queue.", REQUEST_BUCKETS
        )
        self._prefill = histogram(
            "request_prefill_seconds", "Per choice: from its start at the worker to its first token.", REQUEST_BUCKETS
        )
        self._decode = histogram(
            "request_decode_seconds", "Per choice: from its first token to its last.", REQUEST_BUCKETS
        )
        self._max_tokens = histogram("request_params_max_tokens", "Output limit of a choice.", LENGTH_BUCKETS)
        self.params_n = histogram("request_params_n", "Choices per prompt of a request.", CHOICE_BUCKETS)
        self.prompt_tokens = Counter(
            "moeyard_prompt_tokens",
            "Prompt tokens of requests that got a first token, or were to get none.",
            ["model_name"],
            registry=self.registry,
        ).labels(**label)
        # A plain number on the way of every token; the counter reads it when somebody scrapes.
        self.num_output_tokens = 0
        self.registry.register(_OutputTokens(self, model_name))
        self._success = Counter(
            "moeyard_request_success",
            "Choices ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "moeyard_rejections", "Requests refused, by reason.", ["model_name", "reason"], registry=self.registry
        )
        self._http = Counter(
            "moeyard_http_requests",
            "HTTP answers, by route and status.",
            ["model_name", "path", "status"],
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "moeyard_http_request_duration_seconds",
            "From an HTTP request's head to the last byte of its answer, streams included.",
            ["model_name", "path"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )

        def counter(name: str, text: str) -> Counter:
            return Counter(f"moeyard_{name}", text, ["model_name"], registry=self.registry).labels(**label)

        self.recoveries = counter("recoveries", "Times that the fleet was whole again after a loss.")
        self.recovery_seconds = histogram(
            "recovery_seconds", "From a loss until the fleet was whole again.", RECOVERY_BUCKETS
        )
        self.restarts = counter("worker_restarts", "Times that the fleet was whole again after a restart on purpose.")
        self.scalings = counter("fleet_scalings", "Times that the fleet was whole again with more or fewer workers.")
        self.carried = counter("requests_carried", "Sequences that went on at another rank or connection.")
        self.recomputed = counter(
            "tokens_recomputed", "Tokens of carried sequences that no cache was thought to hold at their new rank."
        )
        self.inflight = Gauge(
            "moeyard_num_requests_inflight", "Sequences at the workers.", ["model_name"], registry=self.registry
        ).labels(**label)
        self.waiting = Gauge(
            "moeyard_num_requests_queued",
            "Sequences that wait at the router for a place at a worker.",
            ["model_name"],
            registry=self.registry,
        ).labels(**label)
        self.waited = histogram(
            "router_queue_seconds", "Of requests that waited at the router and started.", REQUEST_BUCKETS
        )
        self._cut = Counter(
            "moeyard_connections_cut",
            "Connections that the router cut, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._workers = Gauge("moeyard_workers", "Workers by state.", ["model_name", "state"], registry=self.fleet)
        self._model_name = model_name
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
        """An HTTP answer is over."""
        self._http_seconds.labels(self._model_name, path).observe(seconds)

    def lengths(self, *, prompt_tokens: int, output_tokens: int, max_tokens: int) -> None:
        """Observe the lengths of a choice that ended by itself."""
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(output_tokens)
        self._max_tokens.observe(max_tokens)

    def phases(self, *, queue: float | None, prefill: float | None, decode: float | None) -> None:
        """Observe the phases of a choice that ended by itself, in seconds; None is not known."""
        for metric, seconds in ((self._queue, queue), (self._prefill, prefill), (self._decode, decode)):
            if seconds is not None:
                metric.observe(seconds)

    def longest(self, output_tokens: int) -> None:
        """Observe the longest choice of a request that ended by itself."""
        self._longest_output.observe(output_tokens)

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


class _TokenGaps(Collector):
    """`moeyard_inter_token_latency_seconds`, in plain numbers of one event loop: every token is observed.

    0.3 us where prometheus_client's histogram, which locks, takes 2 to 3.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(TOKEN_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(TOKEN_BUCKETS, seconds)] += 1
        self._sum += seconds

    def describe(self) -> Iterable[Metric]:
        """Its name, for views of a part of the registry."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """The one histogram."""
        text = "Time between token messages of a choice."
        family = HistogramMetricFamily("moeyard_inter_token_latency_seconds", text, labels=["model_name"])
        bounds = [*map(floatToGoString, TOKEN_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class _OutputTokens(Collector):
    """`moeyard_output_tokens_total`: tokens that clients' sequences have got so far."""

    def __init__(self, metrics: RouterMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Its name, for views of a part of the registry."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """The one sample."""
        text = "Output tokens of clients' sequences, as they arrive."
        family = CounterMetricFamily("moeyard_output_tokens", text, labels=["model_name"])
        family.add_metric([self._model_name], self._metrics.num_output_tokens)
        yield family


@dataclass(slots=True)
class Timing:
    """Times of one choice on the router's monotonic clock, in seconds; observes its metrics as it goes."""

    metrics: RouterMetrics
    arrived: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0

    def tokens(self, now: float, count: int) -> None:
        """`count` tokens arrived at `now`."""
        if self.first is None:
            self.first = now
            self.metrics.ttft.observe(now - self.arrived)
        else:
            self.metrics.itl.observe(now - self.last)
        self.last = now
        self.num_tokens += count
        self.metrics.num_output_tokens += count

    def finished(self, now: float, reason: str, *, prompt_tokens: int, max_tokens: int) -> None:
        """The choice ended; an aborted or failed one says nothing about speed."""
        self.metrics.finished(reason)
        if reason not in ("stop", "length"):
            return
        self.metrics.e2e.observe(now - self.arrived)
        self.metrics.lengths(prompt_tokens=prompt_tokens, output_tokens=self.num_tokens, max_tokens=max_tokens)
        if self.first is not None and self.num_tokens > 1:
            self.metrics.tpot.observe((self.last - self.first) / (self.num_tokens - 1))
