"""The workers' figures, read when Prometheus scrapes. Unknown figures are absent."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeyard_router.fleet.counters import COUNTERS, added, values_of
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.ranks import Rank

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

# Name, field of the snapshot, help. Counters include canary requests.
_PER_RANK = (
    ("num_requests_running", "num_running", "Sequences that take part in steps, per rank."),
    ("num_requests_waiting", "num_waiting", "Sequences in the queue of a rank."),
    ("expert_cache_slots", "expert_slots", "Expert slots of a rank."),
    ("generation_tokens", "generation_tokens", "Tokens sampled by a rank."),
    ("prefill_tokens", "prefill_tokens", "Prompt positions computed by a rank."),
    ("prefix_cache_query_tokens", "prefix_query_tokens", "Prompt tokens that a rank looked up in its prefix index."),
    ("prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens that a rank found in its prefix index."),
    ("preemptions", "preemptions", "Sequences that a rank preempted for lack of pages."),
    ("engine_steps", "step", "Lockstep steps of a rank."),
    ("spec_decode_draft_tokens", "draft_tokens", "Drafts that a rank verified."),
    ("spec_decode_accepted_tokens", "accepted_tokens", "Drafts that a rank verified and accepted."),
    ("expert_cache_hits", "expert_hits", "Needed experts that a rank found in a slot."),
    ("expert_cache_misses", "expert_misses", "Needed experts that a rank copied into a slot."),
    ("expert_cache_evictions", "expert_evictions", "Experts that a rank evicted from a slot."),
)
# By level, with vLLM's names. At level 1 the KV cache is discarded, too.
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class FleetCollector(Collector):
    """Metrics `moeyard_fleet_*`, with a series for each rank that has sent the figure."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._model_name = fleet.config.model_name

    def collect(self) -> Iterable[Metric]:
        """Yield all families."""
        workers = self._fleet.admission.describe()["workers"]
        ready = {worker["rank"]: float(worker["state"] == "ready") for worker in workers}
        yield self._family(GaugeMetricFamily, "rank_ready", "1 if the rank takes requests, else 0.", ready)
        family = GaugeMetricFamily(
            "moeyard_fleet_sleep_state",
            "1 for the state that the server is in: awake, or the level at which it sleeps.",
            labels=("model_name", "sleep_state"),
        )
        for level, state in enumerate(SLEEP_STATES):
            family.add_metric((self._model_name, state), float(level == self._fleet.admission.asleep))
        yield family
        usage = {worker["rank"]: kv_usage([worker]) for worker in workers}
        text = "Share of a rank's KV pages that live sequences hold."
        yield self._family(GaugeMetricFamily, "kv_cache_usage_ratio", text, usage)
        for name, field, text in _PER_RANK:
            values = {rank.number: next(iter(_figure(rank, field)), None) for rank in self._fleet.admission.ranks}
            yield self._family(kind_of(field), name, text, values)

    def _family(self, kind: Family, name: str, text: str, values: Mapping[int, float | None]) -> Metric:
        family = kind(f"moeyard_fleet_{name}", text, labels=("model_name", "rank"))
        for rank, value in values.items():
            if value is not None:
                family.add_metric((self._model_name, str(rank)), float(value))
        return family


def kind_of(field: str) -> Family:
    """Return the kind of metric of a snapshot's field."""
    return CounterMetricFamily if field in COUNTERS else GaugeMetricFamily


def kv_usage(workers: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of the KV pages of `workers` that live sequences hold. None if no worker sent a snapshot.

    `workers`: as in `Admission.describe`.
    """
    snapshots = [worker["snapshot"] for worker in workers if "snapshot" in worker]
    pages = sum(snapshot["kv_pages_total"] for snapshot in snapshots)
    return 1 - sum(snapshot["kv_pages_free"] for snapshot in snapshots) / pages if pages else None


def total(fleet: Fleet, field: str) -> int | None:
    """Return the sum of a snapshot's field over the ranks that have sent it. None if no rank has.

    A counter includes the ranks that were lost or have left.
    """
    return next(iter(totals(fleet, field)), None)


def totals(fleet: Fleet, field: str) -> tuple[int, ...]:
    """Return the same sum of a field that has one number per place. Empty if no rank has sent it."""
    ranks = fleet.admission.ranks
    if field in COUNTERS:
        return added(counters.total(field) for counters in ranks.counters.values())
    return added(_figure(rank, field) for rank in ranks)


def _figure(rank: Rank, field: str) -> tuple[int, ...]:
    return rank.counters.total(field) if field in COUNTERS else values_of(rank.snapshot, field)
