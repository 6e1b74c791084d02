"""What the workers say of themselves, as metrics: read from their latest snapshots when somebody scrapes."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeyard_router.fleet.fleet import Fleet

# Name -> (field of the snapshot, meaning). Totals are the workers' own, so canary requests are among them.
_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "num_requests_running": ("num_running", "Sequences that take part in steps, per rank."),
        "num_requests_waiting": ("num_waiting", "Sequences in the queue of a rank."),
        "expert_cache_slots": ("expert_slots", "Expert slots of a rank."),
    }
)
_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "generation_tokens": ("generation_tokens", "Tokens sampled by a rank."),
        "prefill_tokens": ("prefill_tokens", "Prompt positions computed by a rank."),
        "prefix_cache_query_tokens": (
            "prefix_query_tokens",
            "Prompt tokens that a rank looked up in its prefix index.",
        ),
        "prefix_cache_hit_tokens": ("prefix_hit_tokens", "Prompt tokens that a rank found in its prefix index."),
        "preemptions": ("preemptions", "Sequences that a rank preempted for lack of pages."),
        "engine_steps": ("step", "Lockstep steps of a rank."),
        "spec_decode_draft_tokens": ("draft_tokens", "Drafts that a rank verified."),
        "spec_decode_accepted_tokens": ("accepted_tokens", "Drafts that a rank verified and accepted."),
        "expert_cache_hits": ("expert_hits", "Needed experts that a rank found in a slot."),
        "expert_cache_misses": ("expert_misses", "Needed experts that a rank copied into a slot."),
        "expert_cache_evictions": ("expert_evictions", "Experts whose slot a rank took."),
    }
)
_LABELS = ("model_name", "rank")


class FleetCollector(Collector):
    """A `moeyard_fleet_` series per rank for every figure that the rank has told; none for what it has not."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._model_name = fleet.config.model_name

    def collect(self) -> Iterable[Metric]:
        """All families, each with the ranks that know it."""
        workers = self._fleet.describe()["workers"]
        ready = GaugeMetricFamily("moeyard_fleet_rank_ready", "1 if the rank takes requests, else 0.", labels=_LABELS)
        usage = GaugeMetricFamily(
            "moeyard_fleet_kv_cache_usage_ratio", "Share of a rank's KV pages that live sequences hold.", labels=_LABELS
        )
        for worker in workers:
            labels = (self._model_name, str(worker["rank"]))
            ready.add_metric(labels, float(worker["state"] == "ready"))
            ratio = kv_usage([worker])
            if ratio is not None:
                usage.add_metric(labels, ratio)
        yield from (ready, usage)
        for name, (field, text) in _GAUGES.items():
            yield self._filled(GaugeMetricFamily(f"moeyard_fleet_{name}", text, labels=_LABELS), workers, field)
        for name, (field, text) in _COUNTERS.items():
            yield self._filled(CounterMetricFamily(f"moeyard_fleet_{name}", text, labels=_LABELS), workers, field)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, workers: list[dict[str, Any]], field: str
    ) -> Metric:
        for worker in workers:
            value = worker.get("snapshot", {}).get(field)
            if value is not None:
                family.add_metric((self._model_name, str(worker["rank"])), float(value))
        return family


def kv_usage(workers: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of these ranks' KV pages that live sequences hold, of `Fleet.describe`; None before any has told."""
    snapshots = [worker["snapshot"] for worker in workers if "snapshot" in worker]
    total = sum(snapshot["kv_pages_total"] for snapshot in snapshots)
    return 1 - sum(snapshot["kv_pages_free"] for snapshot in snapshots) / total if total else None


def total(workers: Iterable[Mapping[str, Any]], field: str) -> int | None:
    """The sum of a snapshot's field over the ranks that have told it; None if none has."""
    values = [worker.get("snapshot", {}).get(field) for worker in workers]
    known = [value for value in values if value is not None]
    return sum(known) if known else None
