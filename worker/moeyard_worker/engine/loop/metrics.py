"""Prometheus metrics of one rank. Values come from the counters of its parts. Names and buckets: docs/metrics.md."""

import platform
import threading
from bisect import bisect_left
from collections.abc import Iterable
from types import MappingProxyType

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moeyard_worker.engine.loop.metrics_server import MetricsServer
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.protocol import STEP_ROWS
from moeyard_worker.scheduling.scheduler import Scheduler

# Seconds: of a request's waits, of a step, and of what happens many times in a step.
REQUEST_BUCKETS: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75)
REQUEST_BUCKETS += (1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0)
STEP_BUCKETS: tuple[float, ...] = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05)
STEP_BUCKETS += (0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5)
EXCHANGE_BUCKETS: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 0.0016, 0.0032, 0.0064, 0.0128)
EXCHANGE_BUCKETS += (0.05, 0.25, 1.0, 5.0)
LABELS = ("model_name", "rank")


class WorkerMetrics:
    """All series of a rank in one registry of its own, each with the labels `model_name` and `rank`."""

    def __init__(self, *, model_name: str, rank: int, version: str) -> None:
        self.registry = CollectorRegistry()
        self._own = (model_name, str(rank))
        self._totals: dict[tuple[str, ...], float] = {}
        self._server: MetricsServer | None = None
        # For snapshots: steps with rows, by the bounds STEP_ROWS, and the sum of their rows.
        self.steps_by_rows = [0] * (len(STEP_ROWS) + 1)
        self.step_rows = 0
        self.queue_seconds = self._histogram("queue_seconds", "Arrival to first scheduled", REQUEST_BUCKETS)
        self.prefill_seconds = self._histogram("prefill_seconds", "First scheduled to first token", REQUEST_BUCKETS)
        self.token_seconds = self._histogram(
            "request_time_per_output_token_seconds", "Mean time from token to token of an ended request", STEP_BUCKETS
        )
        self.step_seconds = self._histogram("step_seconds", "One lockstep step of this rank", STEP_BUCKETS)
        self.step_tokens = self._histogram("step_tokens", "Rows of one step of this rank", STEP_ROWS)
        self.lockstep_wait = self._histogram("lockstep_wait_seconds", "Wait for the peers' plans", EXCHANGE_BUCKETS)
        self.expert_stall = self._histogram(
            "expert_stall_seconds", "Wait for expert weights in one layer of a step", EXCHANGE_BUCKETS
        )
        # Has no labels yet, so that it is absent where no device measures it.
        self.step_device_seconds = Histogram(
            "moeyard_step_device_seconds",
            "One step on the device, by its own clock",
            LABELS,
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self.exchange_seconds = Histogram(
            "moeyard_exchange_seconds",
            "One exchange of one layer, waiting for peers included",
            (*LABELS, "phase"),
            buckets=EXCHANGE_BUCKETS,
            registry=self.registry,
        )
        # Refused connections and frames by port (router, peer) and reason; read at each scrape.
        self.refused: dict[str, dict[str, int]] = {}
        self.registry.register(_Refused(self, self._own))
        self._counters = {
            name: Counter(f"moeyard_{name}", text, (*LABELS, *labels), registry=self.registry)
            for name, text, labels in (
                ("engine_steps", "Lockstep steps", ()),
                ("prefill_tokens", "Prompt positions computed", ()),
                ("kv_dropped_tokens", "Prompt positions whose keys and values were not kept", ()),
                ("generation_tokens", "Tokens sampled", ()),
                ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix index", ()),
                ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix index", ()),
                ("state_snapshots_taken", "Snapshots of state per sequence taken behind prompts", ()),
                ("state_snapshots_used", "Requests that began behind a snapshot", ()),
                ("state_snapshots_evicted", "Snapshots that made room for another", ()),
                ("preemptions", "Sequences preempted for lack of pages", ()),
                ("expert_cache_hits", "Needed experts found in a slot", ("segment", "phase")),
                ("expert_cache_misses", "Needed experts copied into a slot", ("phase",)),
                ("expert_cache_evictions", "Experts whose slot was taken", ("segment", "phase")),
                ("expert_cache_bytes", "Bytes of expert weights moved", ("direction",)),
                ("expert_copy_seconds", "Time in which missing experts were copied", ()),
                ("routing_records_dropped", "Accesses not recorded, because the file could not be written", ()),
                ("spec_decode_draft_tokens", "Drafts verified, by their place behind a known token", ("position",)),
                ("spec_decode_accepted_tokens", "Drafts that were right and whose forerunners were", ("position",)),
                ("spec_decode_steps", "Lockstep steps by how many tokens were drafted behind every one", ("drafts",)),
                ("exchange_bytes", "Bytes of activations exchanged with peers", ("direction",)),
            )
        }
        self._gauges = {
            name: Gauge(f"moeyard_{name}", text, LABELS, registry=self.registry)
            for name, text in (
                ("num_requests_running", "Sequences that take part in steps"),
                ("num_requests_waiting", "Sequences in the queue"),
                ("kv_cache_usage_ratio", "Share of KV pages that live sequences hold"),
                ("state_snapshots", "Snapshots of state per sequence that can be found"),
                ("expert_cache_slots", "Expert slots of this rank"),
                ("expert_load_imbalance", "Rows of the busiest local expert over the mean, latest step with rows"),
            )
        }
        labels = (*LABELS, "version", "torch", "python")
        build = Gauge("moeyard_build_info", "Versions", labels, registry=self.registry)
        build.labels(*self._own, version, torch.__version__, platform.python_version()).set(1)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"moeyard_{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._own)

    def serve(self, host: str, port: int = 0) -> int:
        """Answer scrapes on host:port (0 picks one) in a daemon thread. Return the port."""
        self._server = MetricsServer(self.registry, host=host, port=port)
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering scrapes and free the port. Return at once; the server notices within 0.5 s."""
        server, self._server = self._server, None
        if server is not None:
            threading.Thread(target=server.end, name="metrics-end", daemon=True).start()

    def _advance(self, name: str, total: float, *labels: str) -> None:
        """Set a counter to a running total of another part."""
        key = (name, *labels)
        self._counters[name].labels(*self._own, *labels).inc(total - self._totals.get(key, 0.0))
        self._totals[key] = total

    def observe_step(
        self,
        *,
        num_tokens: int,
        seconds: float,
        device_seconds: float | None,
        scheduler: Scheduler,
        exchange: Exchange,
        experts: ExpertCache,
        lockstep: Lockstep,
    ) -> None:
        """Record one finished step, and set every counter to its part's running total."""
        self._advance("engine_steps", self._totals.get(("engine_steps",), 0.0) + 1)
        self.step_seconds.observe(seconds)
        if device_seconds is not None:
            self.step_device_seconds.labels(*self._own).observe(device_seconds)
        self.step_tokens.observe(num_tokens)
        if num_tokens:
            self.steps_by_rows[bisect_left(STEP_ROWS, num_tokens)] += 1
            self.step_rows += num_tokens
        self._observe_scheduler(scheduler)
        for phase, values in exchange.stats.seconds.items():
            _drain(values, self.exchange_seconds.labels(*self._own, phase))
        self._advance("exchange_bytes", exchange.stats.bytes_sent, "sent")
        self._advance("exchange_bytes", exchange.stats.bytes_received, "received")
        _drain(lockstep.wait_seconds, self.lockstep_wait)
        if scheduler.config.num_drafts:
            self._observe_drafts(scheduler, lockstep)
        self._observe_experts(experts)

    def _observe_scheduler(self, scheduler: Scheduler) -> None:
        stats = scheduler.stats
        self._advance("prefill_tokens", stats.prefill_tokens)
        self._advance("kv_dropped_tokens", stats.dropped_tokens)
        self._advance("generation_tokens", stats.generation_tokens)
        self._advance("prefix_cache_query_tokens", stats.prefix_query_tokens)
        self._advance("prefix_cache_hit_tokens", stats.prefix_hit_tokens)
        self._advance("preemptions", stats.num_preemptions)
        self._advance("state_snapshots_taken", scheduler.snapshots.num_taken)
        self._advance("state_snapshots_used", scheduler.snapshots.num_used)
        self._advance("state_snapshots_evicted", scheduler.snapshots.num_evicted)
        _drain(stats.queue_seconds, self.queue_seconds)
        _drain(stats.prefill_seconds, self.prefill_seconds)
        _drain(stats.token_seconds, self.token_seconds)

    def _observe_drafts(self, scheduler: Scheduler, lockstep: Lockstep) -> None:
        stats = scheduler.stats
        for j, (verified, accepted) in enumerate(zip(stats.drafts, stats.accepted, strict=True)):
            self._advance("spec_decode_draft_tokens", verified, str(j + 1))
            self._advance("spec_decode_accepted_tokens", accepted, str(j + 1))
        for num_drafts, count in lockstep.steps.items():
            self._counters["spec_decode_steps"].labels(*self._own, str(num_drafts)).inc(count)
        lockstep.steps.clear()

    def observe_load(self, scheduler: Scheduler) -> None:
        """Update the gauges of running and waiting requests, KV pages and snapshots."""
        self._gauge("num_requests_running", scheduler.num_running)
        self._gauge("num_requests_waiting", scheduler.num_waiting)
        self._gauge("state_snapshots", scheduler.snapshots.num_held if scheduler.config.num_snapshots else 0)
        self._gauge("kv_cache_usage_ratio", 1 - scheduler.pool.num_free / scheduler.pool.num_pages)

    def _gauge(self, name: str, value: float) -> None:
        self._gauges[name].labels(*self._own).set(value)

    def _observe_experts(self, experts: ExpertCache) -> None:
        stats = experts.look()
        counters = stats.counters
        for (segment, kind), count in counters.hits.items():
            self._advance("expert_cache_hits", count, segment, kind)
        for kind, count in counters.misses.items():
            self._advance("expert_cache_misses", count, kind)
        for (segment, kind), count in counters.evictions.items():
            self._advance("expert_cache_evictions", count, segment, kind)
        self._advance("expert_cache_bytes", stats.bytes_copied, "to_slot")
        self._advance("expert_cache_bytes", stats.bytes_to_host, "to_host")
        self._advance("expert_cache_bytes", stats.bytes_for_peers, "for_peers")
        self._advance("expert_cache_bytes", stats.bytes_by_peers, "by_peers")
        self._advance("expert_copy_seconds", stats.copy_seconds)
        if stats.records_dropped is not None:
            self._advance("routing_records_dropped", stats.records_dropped)
        self._gauge("expert_cache_slots", experts.num_slots)
        _drain(stats.stall_seconds, self.expert_stall)
        if stats.load_imbalance:
            self._gauge("expert_load_imbalance", max(stats.load_imbalance.values()))


# Reasons of refusals by socket (the label "door"). All series exist from the start, so that the first refusal counts as
# an increase.
REFUSALS = MappingProxyType(
    {"router": ("unknown_key", "handshake", "message", "frames"), "peer": ("unknown_key", "handshake")}
)


class _Refused(Collector):
    """`moeyard_refused_total`: refused connections and frames."""

    def __init__(self, metrics: WorkerMetrics, own: tuple[str, str]) -> None:
        self._metrics, self._own = metrics, own

    def describe(self) -> Iterable[Metric]:
        """Return the series, for views of a part of the registry."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Yield a sample for each socket and reason."""
        text = "Connections and frames that were not let in"
        family = CounterMetricFamily("moeyard_refused", text, labels=[*LABELS, "door", "reason"])
        for door, reasons in REFUSALS.items():
            counts = self._metrics.refused.get(door, {})
            for reason in reasons:
                family.add_metric([*self._own, door, reason], counts.get(reason, 0))
        yield family


def _drain(values: list[float], histogram: Histogram) -> None:
    for value in values:
        histogram.observe(value)
    values.clear()
