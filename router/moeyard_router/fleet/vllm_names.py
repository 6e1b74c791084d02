"""vLLM's names of metrics, read when Prometheus scrapes. Unknown figures are absent.

vLLM's dashboards and the inference gateway of Kubernetes find the router by them. The whole fleet appears as one vLLM
engine (`engine="0"`). A value is the sum over ranks, and counters include lost ranks. For the KV cache it is the share
of all ranks' pages. Names and labels are those of vllm/v1/metrics/loggers.py in vLLM's repository.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from moeyard_router.fleet.collector import SLEEP_STATES, Family, kind_of, kv_usage, total, totals
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics, cumulative
from moeyard_worker.protocol import STEP_ROWS

# Name, field of the snapshot that is summed over ranks, help.
_FLEET = (
    ("num_requests_running", "num_running", "Sequences that take part in steps."),
    ("num_requests_waiting", "num_waiting", "Sequences in the queues."),
    ("prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the prefix indexes."),
    ("prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the prefix indexes."),
    ("spec_decode_num_drafts", "num_drafts", "Verifications of one or more drafts of a sequence."),
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
        "request_inference_seconds": ("request_inference_time_seconds",),
        "request_prefill_kv_computed_tokens": ("request_prefill_kv_computed_tokens",),
        "prompt_tokens_cached": ("prompt_tokens_cached",),
        "output_tokens": ("generation_tokens",),
    }
)
_ENGINE = "0"
# Routes whose answers vLLM does not count.
_PROBES = frozenset(
    (
        *("/livez", "/readyz", "/health", "/health_generate", "/ping"),
        *("/metrics", "/metrics/targets", "/load", "/version"),
    )
)


class VllmAliases(Collector):
    """vLLM's names for the router's own metrics."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Yield all aliases, with vLLM's label `engine`."""
        found = {metric.name.removeprefix("moeyard_"): metric for metric in self._metrics.registry.collect()}
        for name, metric in found.items():
            for alias in _VLLM_NAMES.get(name, ()):
                renamed = Metric(f"vllm:{alias}", metric.documentation, metric.type)
                for sample in metric.samples:
                    suffix = sample.name.removeprefix(metric.name)
                    if suffix != "_created":
                        labels = {**sample.labels, "engine": _ENGINE}
                        renamed.samples.append(Sample(renamed.name + suffix, labels, sample.value))
                yield renamed
        yield from _prompt_sources(found["prompt_tokens"], found["prompt_tokens_cached"])
        yield from _http(found["http_requests"], found["http_request_duration_seconds"])


class VllmFleetAliases(Collector):
    """vLLM's names for sums over the ranks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._model_name = fleet.config.model_name

    def collect(self) -> Iterable[Metric]:
        """Yield all aliases."""
        workers = self._fleet.admission.describe()["workers"]
        for name, field, text in _FLEET:
            value = total(self._fleet, field)
            if value is None:
                continue
            if field == "num_waiting":
                value += self._fleet.num_queued
            yield self._one(kind_of(field), name, text, value)
            if field == "num_waiting":
                yield self._labelled(
                    GaugeMetricFamily,
                    "num_requests_waiting_by_reason",
                    "The same by reason.",
                    label="reason",
                    values={"capacity": value, "deferred": 0},
                )
        yield from self._steps()
        yield self._labelled(
            GaugeMetricFamily,
            "engine_sleep_state",
            "1 for the state that the server is in: awake, or the level at which it sleeps.",
            label="sleep_state",
            values={state: level == self._fleet.admission.asleep for level, state in enumerate(SLEEP_STATES)},
        )
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

    def _steps(self) -> Iterable[Metric]:
        """Yield what ranks count by the rows of their steps and by the places of drafts."""
        if steps := totals(self._fleet, "steps_by_rows"):
            rows = total(self._fleet, "step_rows") or 0
            family = HistogramMetricFamily(
                "vllm:iteration_tokens_total", "Rows of a rank's step that has rows.", labels=("model_name", "engine")
            )
            family.add_metric((self._model_name, _ENGINE), cumulative(STEP_ROWS, steps), float(rows))
            yield family
        if accepted := totals(self._fleet, "accepted_by_place"):
            yield self._labelled(
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts accepted at each place behind a known token; the first is 0.",
                label="position",
                values={str(place): count for place, count in enumerate(accepted)},
            )

    def _one(self, kind: Family, name: str, text: str, value: float) -> Metric:
        family = kind(f"vllm:{name}", text, labels=("model_name", "engine"))
        family.add_metric((self._model_name, _ENGINE), float(value))
        return family

    def _labelled(self, kind: Family, name: str, text: str, *, label: str, values: Mapping[str, float]) -> Metric:
        family = kind(f"vllm:{name}", text, labels=("model_name", "engine", label))
        for value, count in values.items():
            family.add_metric((self._model_name, _ENGINE, value), float(count))
        return family


def _prompt_sources(prompts: Metric, cached: Metric) -> Iterable[Metric]:
    """Yield the prompt tokens by their source, and the cached ones by the memory that held them: the device's."""
    totals = [s for metric in (prompts, cached) for s in metric.samples if s.name.endswith("_total")]
    all_tokens, hits = (sample.value for sample in totals)
    sources = {"local_compute": all_tokens - hits, "local_cache_hit": hits, "external_kv_transfer": 0.0}
    for name, values in (("prompt_tokens_by_source", sources), ("prompt_tokens_cached_by_source", {"device": hits})):
        family = CounterMetricFamily(
            f"vllm:{name}", "Prompt tokens by source.", labels=("model_name", "engine", "source")
        )
        for source, value in values.items():
            family.add_metric((totals[0].labels["model_name"], _ENGINE, source), value)
        yield family


def _http(requests: Metric, durations: Metric) -> Iterable[Metric]:
    """Yield HTTP answers under the names and labels of vLLM's API server, without probes. Statuses are classes."""
    counts: Counter[tuple[str, str]] = Counter()
    for sample in requests.samples:
        if sample.name.endswith("_total") and sample.labels["path"] not in _PROBES:
            counts[sample.labels["path"], f"{sample.labels['status'][0]}xx"] += int(sample.value)
    family = CounterMetricFamily("http_requests", "HTTP answers by class of status.", labels=("handler", "status"))
    for key, count in counts.items():
        family.add_metric(key, float(count))
    yield family
    renamed = Metric("http_request_duration_seconds", durations.documentation, "histogram")
    for sample in durations.samples:
        if not sample.name.endswith("_created") and sample.labels["path"] not in _PROBES:
            labels = {"handler": sample.labels["path"]} | {k: v for k, v in sample.labels.items() if k == "le"}
            renamed.samples.append(Sample(sample.name.removeprefix("moeyard_"), labels, sample.value))
    yield renamed
