"""The workers' figures, and vLLM's names of metrics, read when Prometheus scrapes. Nothing is stored between scrapes.

vLLM's names let its dashboards and the inference gateway of Kubernetes find the router. The whole fleet appears as one
vLLM engine (`engine="0"`). A value is the sum over ranks; for the KV cache it is the share of all ranks' pages. Unknown
figures are absent.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

# Fields of the snapshot that are gauges. The others are totals of the workers, which include canary requests.
_GAUGES = frozenset(("num_running", "num_waiting", "expert_slots"))
# Name, field of the snapshot, help.
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
# The same for the fleet, under vLLM's names.
_FLEET = (
    ("num_requests_running", "num_running", "Sequences that take part in steps."),
    ("num_requests_waiting", "num_waiting", "Sequences in the queues."),
    ("prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the prefix indexes."),
    ("prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the prefix indexes."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Drafts that were verified."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Drafts that were verified and accepted."),
    ("num_preemptions", "preemptions", "Sequences preempted for lack of pages."),
)
# Metric of this router -> vLLM's names for it. vLLM renamed some, and dashboards use both names.
_VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens",),
        "request_max_num_generation_tokens": ("request_max_num_generation_tokens",),
        "request_params_max_tokens": ("request_params_max_tokens",),
        "request_params_n": ("request_params_n",),
        "prompt_tokens": ("prompt_tokens",),
        "request_success": ("request_success",),
        "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "request_queue_seconds": ("request_queue_time_seconds",),
        "request_prefill_seconds": ("request_prefill_time_seconds",),
        "request_decode_seconds": ("request_decode_time_seconds",),
        "output_tokens": ("generation_tokens",),
    }
)
_ENGINE = "0"
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
            values = {worker["rank"]: worker.get("snapshot", {}).get(field) for worker in workers}
            yield self._family(_kind(field), name, text, values)

    def _family(self, kind: Family, name: str, text: str, values: Mapping[int, float | None]) -> Metric:
        family = kind(f"moeyard_fleet_{name}", text, labels=("model_name", "rank"))
        for rank, value in values.items():
            if value is not None:
                family.add_metric((self._model_name, str(rank)), float(value))
        return family


class VllmAliases(Collector):
    """vLLM's names for the router's own metrics."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Yield all aliases, with vLLM's label `engine`."""
        for metric in self._metrics.registry.collect():
            for alias in _VLLM_NAMES.get(metric.name.removeprefix("moeyard_"), ()):
                renamed = Metric(f"vllm:{alias}", metric.documentation, metric.type)
                for sample in metric.samples:
                    suffix = sample.name.removeprefix(metric.name)
                    if suffix != "_created":
                        labels = {**sample.labels, "engine": _ENGINE}
                        renamed.samples.append(Sample(renamed.name + suffix, labels, sample.value))
                yield renamed


class VllmFleetAliases(Collector):
    """vLLM's names for sums over the ranks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._model_name = fleet.config.model_name

    def collect(self) -> Iterable[Metric]:
        """Yield all aliases."""
        workers = self._fleet.admission.describe()["workers"]
        for name, field, text in _FLEET:
            value = total(workers, field)
            if value is not None:
                queued = self._fleet.num_queued if field == "num_waiting" else 0
                yield self._one(_kind(field), name, text, value + queued)
        states = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state that the server is in: awake, or the level at which it sleeps.",
            labels=("model_name", "engine", "sleep_state"),
        )
        for level, state in enumerate(SLEEP_STATES):
            states.add_metric((self._model_name, _ENGINE, state), float(level == self._fleet.admission.asleep))
        yield states
        usage = kv_usage(workers)
        if usage is not None:
            text = "Share of all KV pages that live sequences hold, 0 to 1."
            yield self._one(GaugeMetricFamily, "kv_cache_usage_perc", text, usage)
        snapshots = [worker["snapshot"] for worker in workers if "snapshot" in worker]
        if snapshots:  # the inference gateway reads the size of the KV cache from these labels
            family = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache of the fleet: tokens per page, and pages.",
                labels=("block_size", "num_gpu_blocks", "engine"),
            )
            pages = sum(snapshot["kv_pages_total"] for snapshot in snapshots)
            family.add_metric((str(snapshots[0]["page_size"]), str(pages), _ENGINE), 1.0)
            yield family

    def _one(self, kind: Family, name: str, text: str, value: float) -> Metric:
        family = kind(f"vllm:{name}", text, labels=("model_name", "engine"))
        family.add_metric((self._model_name, _ENGINE), float(value))
        return family


def _kind(field: str) -> Family:
    return GaugeMetricFamily if field in _GAUGES else CounterMetricFamily


def kv_usage(workers: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of the KV pages of `workers` that live sequences hold. None if no worker sent a snapshot.

    `workers`: as in `Admission.describe`.
    """
    snapshots = [worker["snapshot"] for worker in workers if "snapshot" in worker]
    pages = sum(snapshot["kv_pages_total"] for snapshot in snapshots)
    return 1 - sum(snapshot["kv_pages_free"] for snapshot in snapshots) / pages if pages else None


def total(workers: Iterable[Mapping[str, Any]], field: str) -> int | None:
    """Return the sum of a snapshot's field over the ranks that have sent it. None if no rank has."""
    known = [value for w in workers if (value := w.get("snapshot", {}).get(field)) is not None]
    return sum(known) if known else None
