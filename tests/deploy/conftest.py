"""Shared by the deployment tests: Prometheus' programs, the dashboards' queries and the names of all metrics."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeyard import logs

ROOT = Path(__file__).resolve().parents[2]
# Every metric that the router and the ranks export; a histogram H also has H_bucket, H_sum and H_count.
ROUTER_HISTOGRAMS = (
    "moeyard_time_to_first_token_seconds",
    "moeyard_time_per_output_token_seconds",
    "moeyard_inter_token_latency_seconds",
    "moeyard_e2e_request_latency_seconds",
    "moeyard_request_prompt_tokens",
    "moeyard_request_generation_tokens",
    "moeyard_request_max_num_generation_tokens",
    "moeyard_request_queue_seconds",
    "moeyard_request_prefill_seconds",
    "moeyard_request_decode_seconds",
    "moeyard_request_inference_seconds",
    "moeyard_request_prefill_kv_computed_tokens",
    "moeyard_request_params_max_tokens",
    "moeyard_request_params_n",
    "moeyard_router_queue_seconds",
    "moeyard_http_request_duration_seconds",
    "moeyard_recovery_seconds",
)
ROUTER_OTHERS = (
    "moeyard_prompt_tokens_total",
    "moeyard_prompt_tokens_cached_total",
    "moeyard_request_success_total",
    "moeyard_rejections_total",
    "moeyard_num_requests_inflight",
    "moeyard_num_requests_queued",
    "moeyard_connections_cut_total",
    "moeyard_worker_restarts_total",
    "moeyard_fleet_scalings_total",
    "moeyard_weight_updates_total",
    "moeyard_sleep_changes_total",
    "moeyard_workers",
    "moeyard_http_requests_total",
    "moeyard_output_tokens_total",
    "moeyard_recoveries_total",
    "moeyard_requests_carried_total",
    "moeyard_tokens_recomputed_total",
    "moeyard_fleet_rank_ready",
    "moeyard_fleet_sleep_state",
    "moeyard_fleet_num_requests_running",
    "moeyard_fleet_num_requests_waiting",
    "moeyard_fleet_kv_cache_usage_ratio",
    "moeyard_fleet_generation_tokens_total",
    "moeyard_fleet_prefill_tokens_total",
    "moeyard_fleet_prefix_cache_query_tokens_total",
    "moeyard_fleet_prefix_cache_hit_tokens_total",
    "moeyard_fleet_preemptions_total",
    "moeyard_fleet_engine_steps_total",
    "moeyard_fleet_expert_cache_hits_total",
    "moeyard_fleet_expert_cache_misses_total",
    "moeyard_fleet_expert_cache_evictions_total",
    "moeyard_fleet_expert_cache_slots",
    "moeyard_fleet_spec_decode_draft_tokens_total",
    "moeyard_fleet_spec_decode_accepted_tokens_total",
)
WORKER_HISTOGRAMS = (
    "moeyard_queue_seconds",
    "moeyard_prefill_seconds",
    "moeyard_request_time_per_output_token_seconds",
    "moeyard_exchange_seconds",
    "moeyard_lockstep_wait_seconds",
    "moeyard_expert_stall_seconds",
    "moeyard_step_seconds",
    "moeyard_step_tokens",
)
WORKER_OTHERS = (
    "moeyard_prefill_tokens_total",
    "moeyard_generation_tokens_total",
    "moeyard_kv_dropped_tokens_total",
    "moeyard_prefix_cache_query_tokens_total",
    "moeyard_prefix_cache_hit_tokens_total",
    "moeyard_state_snapshots",
    "moeyard_state_snapshots_taken_total",
    "moeyard_state_snapshots_used_total",
    "moeyard_state_snapshots_evicted_total",
    "moeyard_routing_records_dropped_total",
    "moeyard_preemptions_total",
    "moeyard_engine_steps_total",
    "moeyard_expert_cache_hits_total",
    "moeyard_expert_cache_misses_total",
    "moeyard_expert_cache_evictions_total",
    "moeyard_expert_cache_bytes_total",
    "moeyard_expert_copy_seconds_total",
    "moeyard_exchange_bytes_total",
    "moeyard_num_requests_running",
    "moeyard_num_requests_waiting",
    "moeyard_kv_cache_usage_ratio",
    "moeyard_expert_cache_slots",
    "moeyard_expert_load_imbalance",
    "moeyard_spec_decode_draft_tokens_total",
    "moeyard_spec_decode_accepted_tokens_total",
    "moeyard_spec_decode_steps_total",
    "moeyard_refused_total",
    "moeyard_build_info",
)
# Known names that a fleet on CPUs does not export.
GPU_HISTOGRAMS = ("moeyard_step_device_seconds",)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo `logs.start`, which changes the whole process, so that the next test logs as if it ran alone."""
    loggers = [logging.getLogger(name) for name in ("", *logs.OURS)]
    levels, before = [logger.level for logger in loggers], list(loggers[0].handlers)
    yield
    for handler in [h for h in loggers[0].handlers if h not in before]:
        loggers[0].removeHandler(handler)
        handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def histograms() -> tuple[str, ...]:
    """Base names of all histograms."""
    return ROUTER_HISTOGRAMS + WORKER_HISTOGRAMS + GPU_HISTOGRAMS


@pytest.fixture(scope="session")
def series_names(histograms: tuple[str, ...]) -> frozenset[str]:
    """Every name under which a sample is stored."""
    parts = (f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count"))
    return frozenset((*ROUTER_OTHERS, *WORKER_OTHERS, *parts))


@pytest.fixture(scope="session")
def rank_series() -> frozenset[str]:
    """Series that every rank exports."""
    return frozenset((*WORKER_OTHERS, *(f"{name}_count" for name in WORKER_HISTOGRAMS)))


def find_program(name: str) -> str | None:
    """Return the path of `prometheus` or `promtool`: from deploy/tools/get_prometheus.sh, else on PATH."""
    fetched = ROOT / ".tools" / "prometheus" / "usr" / "bin" / name
    return str(fetched) if fetched.exists() else shutil.which(name)


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of `prometheus` or `promtool`."""

    def find(name: str) -> str:
        path = find_program(name)
        if path is None and shutil.which("apt-get") is None:
            pytest.skip(f"{name} is not installed and there is no apt-get to fetch it with")
        assert path is not None, f"{name} is missing: run deploy/tools/get_prometheus.sh (make test does)"
        return path

    return find


@pytest.fixture(scope="session")
def dashboards() -> dict[str, dict[str, Any]]:
    """Name -> Grafana's JSON."""
    files = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def resolve(query: str) -> str:
    """Replace Grafana's variables by values."""
    values = {"__rate_interval": "1m", "rank": ".*", "job": ".*", "model_name": "demo", "percentile": "0.95"}
    resolved = re.sub(r"\$(\w+)", lambda variable: values.get(variable[1], variable[0]), query)
    assert "$" not in resolved, f"unknown variable in {query}"
    return resolved


@pytest.fixture(scope="session")
def annotation_queries(dashboards: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Name -> PromQL of each annotation, all of which every dashboard has."""
    found = [{each["name"]: each["expr"] for each in board["annotations"]["list"]} for board in dashboards.values()]
    assert all(queries == found[0] for queries in found)
    return {name: resolve(query) for name, query in found[0].items()}


@pytest.fixture(scope="session")
def dashboard_queries(dashboards: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Dashboard, panel and legend -> PromQL with Grafana's variables replaced by values."""
    queries = {}
    for name, dashboard in dashboards.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                title = f"{name} / {panel['title']} / {target['legendFormat']}"
                assert title not in queries, title
                queries[title] = resolve(target["expr"])
    return queries


@pytest.fixture(scope="session")
def alerts() -> dict[str, str]:
    """Name -> expression."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}


@pytest.fixture(scope="session")
def recording_rules() -> dict[str, str]:
    """Name -> expression."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[str], set[str]]:
    """Names of our series and recording rules in a PromQL expression."""

    def names(expression: str) -> set[str]:
        return set(re.findall(r"\bmoeyard[_:][a-zA-Z0-9_:]+", expression))

    return names
