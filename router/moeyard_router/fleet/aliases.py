"""vLLM's names for the router's metrics, so that its dashboards and the inference gateway of Kubernetes find them.

The router stands for one vLLM engine (`engine="0"`) that is the whole fleet: values are those of the moeyard_ series,
over ranks their sum, and for the KV cache the share of all ranks' pages. A figure that is not known is absent.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from moeyard_router.fleet.collector import kv_usage, total
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics

# moeyard_ name of the router -> vLLM's names for the same thing. Its metrics were renamed over time: dashboards of both
# ages are about.
_SAME: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens",),
        "request_max_num_generation_tokens": ("request_max_num_generation_tokens",),
        "request_queue_seconds": ("request_queue_time_seconds",),
        "request_prefill_seconds": ("request_prefill_time_seconds",),
        "request_decode_seconds": ("request_decode_time_seconds",),
        "request_params_max_tokens": ("request_params_max_tokens",),
        "request_params_n": ("request_params_n",),
        "prompt_tokens": ("prompt_tokens",),
        "output_tokens": ("generation_tokens",),
        "request_success": ("request_success",),
    }
)
_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "num_requests_running": ("num_running", "Sequences that take part in steps."),
        "num_requests_waiting": ("num_waiting", "Sequences in the queues."),
    }
)
_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "prefix_cache_queries": ("prefix_query_tokens", "Prompt tokens looked up in the prefix indexes."),
        "prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens found in the prefix indexes."),
        "spec_decode_num_draft_tokens": ("draft_tokens", "Drafts that were verified."),
        "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafts that were verified and accepted."),
        "num_preemptions": ("preemptions", "Sequences preempted for lack of pages."),
    }
)
_LABELS = ("model_name", "engine")
_ENGINE = "0"


class VllmAliases(Collector):
    """Those of what the router counts; reads its registry when it is scraped and keeps nothing."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All aliases."""
        for metric in self._metrics.registry.collect():
            for alias in _SAME.get(metric.name.removeprefix("moeyard_"), ()):
                yield _renamed(metric, f"vllm:{alias}")


class VllmFleetAliases(Collector):
    """Those of what the ranks say; reads the snapshots when it is scraped and keeps nothing."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._model_name = fleet.config.model_name

    def collect(self) -> Iterable[Metric]:
        """All aliases."""
        workers = self._fleet.describe()["workers"]
        labels = (self._model_name, _ENGINE)
        for name, (field, text) in _GAUGES.items():
            if (value := total(workers, field)) is not None:
                if field == "num_waiting":
                    value += self._fleet.num_queued
                yield _one(GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS), labels, value)
        for name, (field, text) in _COUNTERS.items():
            if (value := total(workers, field)) is not None:
                yield _one(CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS), labels, value)
        usage = kv_usage(workers)
        if usage is not None:
            text = "Share of all KV pages that live sequences hold, 0 to 1."
            yield _one(GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=_LABELS), labels, usage)
        yield from self._cache_config(workers)

    def _cache_config(self, workers: list[dict[str, Any]]) -> Iterable[Metric]:
        """`vllm:cache_config_info`: from its labels the inference gateway learns how large the KV cache is."""
        snapshots = [worker["snapshot"] for worker in workers if "snapshot" in worker]
        if snapshots:
            family = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache of the fleet: tokens of a page and pages.",
                labels=("block_size", "num_gpu_blocks", "engine"),
            )
            pages = sum(snapshot["kv_pages_total"] for snapshot in snapshots)
            family.add_metric((str(snapshots[0]["page_size"]), str(pages), _ENGINE), 1.0)
            yield family


def _one(
    family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, str], value: float
) -> GaugeMetricFamily | CounterMetricFamily:
    family.add_metric(labels, float(value))
    return family


def _renamed(metric: Metric, name: str) -> Metric:
    """The same samples under another name, with vLLM's label for an engine."""
    renamed = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        if suffix != "_created":
            renamed.samples.append(Sample(name + suffix, {**sample.labels, "engine": _ENGINE}, sample.value))
    return renamed
