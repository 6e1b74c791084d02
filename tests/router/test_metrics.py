"""The router's metrics: names, labels, buckets, and that they count what happened."""

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeyard_worker.protocol import STEP_ROWS, Snapshot

TOKEN = [0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03]
TOKEN += [0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2.5]
REQUEST = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 60, 120]
LENGTH = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
BUCKETS = {
    "moeyard_time_to_first_token_seconds": REQUEST,
    "moeyard_e2e_request_latency_seconds": REQUEST,
    "moeyard_time_per_output_token_seconds": TOKEN,
    "moeyard_inter_token_latency_seconds": TOKEN,
    "moeyard_request_prompt_tokens": LENGTH,
    "moeyard_request_generation_tokens": LENGTH,
    "moeyard_request_params_max_tokens": LENGTH,
    "moeyard_request_params_n": [1, 2, 5, 10, 20],
    "moeyard_http_request_duration_seconds": REQUEST,
    "moeyard_recovery_seconds": [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300],
}


def scrape(service):
    answer = service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {f.name: f for f in text_string_to_metric_families(answer.text)}


def value(families, name, **labels):
    family = families[name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")]
    found = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, f"{name}{labels}: {len(found)} samples"
    return found[0]


def test_counts(start, wait_for):
    service = start(2)
    for worker in service.workers:
        worker.pace = 0.002
    service.complete(prompt=[[5, 6, 7], [8]], n=2, max_tokens=5)
    service.stream("/v1/completions", prompt="x", max_tokens=9, stop=" quick")
    assert service.post("/v1/completions", prompt="").status_code == 400
    assert service.client.get("/nowhere/at/all").status_code == 404
    service.wait_idle()
    wait_for(lambda: finished_answers(service, "/v1/completions") == 3, "the answers' durations")
    families = scrape(service)
    model = {"model_name": "tiny"}
    assert value(families, "moeyard_prompt_tokens_total", **model) == 4 + 2
    assert value(families, "moeyard_request_success_total", **model, finished_reason="length") == 4
    assert value(families, "moeyard_request_success_total", **model, finished_reason="stop") == 1
    assert value(families, "moeyard_rejections_total", **model, reason="bad_request") == 1
    assert value(families, "moeyard_num_requests_inflight", **model) == 0
    assert value(families, "moeyard_workers", state="ready") == 2
    assert value(families, "moeyard_workers", state="failed") == 0
    assert value(families, "moeyard_http_requests_total", path="/v1/completions", status="200") == 2
    assert value(families, "moeyard_http_requests_total", path="/v1/completions", status="400") == 1
    assert value(families, "moeyard_http_requests_total", path="other", status="404") == 1
    assert value(families, "moeyard_time_to_first_token_seconds_count", **model) == 5
    assert value(families, "moeyard_e2e_request_latency_seconds_count", **model) == 5
    assert value(families, "moeyard_time_per_output_token_seconds_count", **model) == 5
    tokens = value(families, "moeyard_inter_token_latency_seconds_count", **model)
    assert 4 * 4 < tokens < 4 * 4 + 9
    # With four choices of four gaps and one of the rest, the means equal the gaps apart from clock noise.
    gaps, rest = value(families, "moeyard_inter_token_latency_seconds_sum", **model), tokens - 4 * 4
    means = value(families, "moeyard_time_per_output_token_seconds_sum", **model)
    rounding = 1e-9
    assert 0 < gaps / max(4, rest) - rounding <= means <= gaps / min(4, rest) + rounding
    assert value(families, "moeyard_e2e_request_latency_seconds_sum", **model) > 5 * 2 * 0.002
    assert value(families, "moeyard_request_prompt_tokens_sum", **model) == 2 * 3 + 2 * 1 + 2
    assert value(families, "moeyard_request_params_max_tokens_sum", **model) == 4 * 5 + 9
    assert value(families, "moeyard_request_params_n_sum", **model) == 2 + 1
    ended = value(families, "moeyard_request_generation_tokens_sum", **model)
    assert 4 * 5 < ended < 4 * 5 + 9
    assert value(families, "moeyard_output_tokens_total", **model) == ended
    labels = {"path": "/v1/completions", **model}
    assert value(families, "moeyard_http_request_duration_seconds_sum", **labels) > 5 * 0.002
    assert value(families, "process_resident_memory_bytes") > 1e6


def finished_answers(service, path):
    """Return the number of finished answers of a route; an answer counts after its last byte is sent."""
    families = scrape(service)
    name = "moeyard_http_request_duration_seconds"
    return sum(s.value for s in families[name].samples if s.name == name + "_count" and s.labels["path"] == path)


def test_buckets(service, wait_for):
    service.complete(prompt="x", max_tokens=2)
    wait_for(lambda: finished_answers(service, "/v1/completions") > 0, "the answer's duration")
    families = scrape(service)
    for name, expected in BUCKETS.items():
        found = [s for s in families[name].samples if s.name == name + "_bucket"]
        bounds = [float(s.labels["le"]) for s in found if s.labels.get("path") in (None, "/v1/completions")]
        assert bounds == [*expected, float("inf")]


def test_abandoned_requests_do_not_count_as_speed(start, wait_for):
    service = start(1)
    service.workers[0].pace = 0.01
    with service.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 250, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    wait_for(lambda: len(service.aborts) == 1, "the request must be aborted")
    families = scrape(service)
    assert value(families, "moeyard_request_success_total", finished_reason="abort") == 1
    assert value(families, "moeyard_e2e_request_latency_seconds_count") == 0


def test_targets_for_service_discovery(service):
    assert service.client.get("/metrics/targets").json() == [
        {
            "targets": [f"127.0.0.1:{9100 + rank}"],
            "labels": {"worker": str(rank), "__scheme__": "http", "__metrics_path__": "/metrics"},
        }
        for rank in range(2)
    ]


def test_fleet_page(service):
    page = service.client.get("/v1/fleet").json()
    assert page["failure"] is None
    assert page["unready"] is None
    assert [w["rank"] for w in page["workers"]] == [0, 1]
    snapshot = page["workers"][0]["snapshot"]
    assert snapshot["kv_pages_total"] == 64
    assert set(snapshot) == {f.name for f in dataclasses.fields(Snapshot)} - {"rank"}


def test_every_router_series_has_the_model_name(service):
    """One Prometheus can then watch several routers; process metrics belong to the router itself."""
    service.complete(prompt="x", max_tokens=2)
    nameless = {
        sample.name
        for family in scrape(service).values()
        for sample in family.samples
        if sample.labels.get("model_name") != "tiny" and not sample.name.startswith("process_")
    }
    assert nameless == set()


def test_aliases_have_the_values_of_their_series(start, wait_for):
    service = start(2, metric_aliases=("vllm",))
    service.complete(prompt=[[5, 6, 7], [8]], n=2, max_tokens=5)
    service.wait_idle()
    for worker in service.workers:
        load = {"num_running": 1, "num_waiting": 2 + worker.rank, "kv_pages_free": 16 * (1 + worker.rank)}
        steps = (1, 2, *[0] * (len(STEP_ROWS) - 2), 1)
        drafts = {"num_drafts": 5, "draft_tokens": 9, "accepted_tokens": 6, "accepted_by_place": (4, 2)}
        worker.report(**load, **drafts, steps_by_rows=steps, step_rows=20_005)
    wait_for(
        lambda: [w["snapshot"]["num_waiting"] for w in service.client.get("/v1/fleet").json()["workers"]] == [2, 3],
        "the router must have the snapshots",
    )
    families = scrape(service)
    for family in families.values():
        for sample in [s for s in family.samples if s.name.startswith("vllm:")]:
            assert sample.labels["engine"] == "0", "the router must appear as one engine"
    one = {"model_name": "tiny", "engine": "0"}
    assert value(families, "vllm:num_requests_running", **one) == 2
    assert value(families, "vllm:num_requests_waiting", **one) == 5
    assert value(families, "vllm:kv_cache_usage_perc", **one) == 1 - 48 / 128
    assert value(families, "vllm:cache_config_info", block_size="16", num_gpu_blocks="128") == 1
    assert value(families, "vllm:request_success_total", finished_reason="length", **one) == 4
    assert value(families, "vllm:generation_tokens_total", **one) == 20
    assert "vllm:num_preemptions" not in families, "no rank has reported it"
    assert value(families, "vllm:num_requests_waiting_by_reason", reason="capacity", **one) == 5
    assert value(families, "vllm:num_requests_waiting_by_reason", reason="deferred", **one) == 0
    assert value(families, "vllm:engine_sleep_state", sleep_state="awake", **one) == 1
    assert value(families, "vllm:spec_decode_num_drafts_total", **one) == 10
    assert value(families, "vllm:spec_decode_num_draft_tokens_total", **one) == 18
    assert value(families, "vllm:spec_decode_num_accepted_tokens_total", **one) == 12
    positions = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(s.labels["position"], s.value) for s in positions] == [("0", 8), ("1", 4)]
    steps = families["vllm:iteration_tokens_total"].samples
    by_rows = {s.labels["le"]: s.value for s in steps if s.name == "vllm:iteration_tokens_total_bucket"}
    assert (by_rows["1.0"], by_rows["2.0"], by_rows["16384.0"], by_rows["+Inf"]) == (2, 6, 6, 8)
    assert {s.name[27:]: s.value for s in steps if "le" not in s.labels} == {"_count": 8, "_sum": 40_010}
    for alias, name in {
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "request_time_per_output_token_seconds": "time_per_output_token_seconds",
        "e2e_request_latency_seconds": "e2e_request_latency_seconds",
        "request_prompt_tokens": "request_prompt_tokens",
        "request_generation_tokens": "request_generation_tokens",
    }.items():
        ours = {
            (s.name.removeprefix("moeyard_" + name), s.labels.get("le")): s.value
            for s in families["moeyard_" + name].samples
            if not s.name.endswith("_created")
        }
        theirs = {
            (s.name.removeprefix("vllm:" + alias), s.labels.get("le")): s.value
            for s in families["vllm:" + alias].samples
        }
        assert ours == theirs


def test_aliases_count_cached_prompt_tokens_and_http_answers(start, wait_for):
    service = start(1, metric_aliases=("vllm",))
    service.workers[0].phases = 0.5, 0.25
    service.complete(prompt=[[5, 6, 7], [8, 9, 10, 11]], n=2, max_tokens=5)
    assert service.post("/v1/completions", prompt="").status_code == 400
    service.wait_idle()
    wait_for(lambda: finished_answers(service, "/v1/completions") == 2, "the answers' durations")
    families = scrape(service)
    one = {"model_name": "tiny", "engine": "0"}
    assert value(families, "vllm:prompt_tokens_total", **one) == 7
    # The worker reports three cached tokens of each prompt.
    assert value(families, "vllm:prompt_tokens_cached_total", **one) == 2 * 3, "once per prompt"
    by_source = {s.labels["source"]: s.value for s in families["vllm:prompt_tokens_by_source"].samples}
    assert by_source == {"local_compute": 1, "local_cache_hit": 6, "external_kv_transfer": 0}
    assert value(families, "vllm:prompt_tokens_cached_by_source_total", source="device", **one) == 6
    assert value(families, "vllm:request_prefill_kv_computed_tokens_sum", **one) == 2 * 1, "per choice"
    decode = value(families, "vllm:request_decode_time_seconds_sum", **one)
    assert value(families, "vllm:request_inference_time_seconds_sum", **one) == pytest.approx(4 * 0.25 + decode)
    for status, count in (("2xx", 1), ("4xx", 1)):
        assert value(families, "http_requests_total", handler="/v1/completions", status=status) == count
    assert value(families, "http_request_duration_seconds_count", handler="/v1/completions") == 2
    assert "/metrics" not in {s.labels["handler"] for s in families["http_requests"].samples}


# Series that the 12 panels of vLLM's dashboard read (examples/observability/prometheus_grafana/grafana.json, 2026-11).
DASHBOARD = {
    "E2E Request Latency": ("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"),
    "Token Throughput": ("prompt_tokens_total", "generation_tokens_total"),
    "Inter Token Latency": ("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count"),
    "Scheduler State": ("num_requests_running", "num_requests_waiting"),
    "Time To First Token Latency": ("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_count"),
    "Cache Utilization": ("kv_cache_usage_perc",),
    "Request Prompt Length": ("request_prompt_tokens_bucket",),
    "Request Generation Length": ("request_generation_tokens_bucket",),
    "Finish Reason": ("request_success_total",),
    "Queue Time": ("request_queue_time_seconds_sum",),
    "Requests Prefill and Decode Time": ("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    "Max Generation Token in Sequence Group": ("request_max_num_generation_tokens_sum",),
}


def test_every_panel_of_vllms_dashboard_has_data(start):
    service = start(2, metric_aliases=("vllm",))
    for worker in service.workers:
        worker.phases = 0.5, 0.25
    service.complete(prompt=[5, 6, 7], n=2, max_tokens=5)
    service.complete(prompt=[5, 6], max_tokens=3)
    service.wait_idle()
    samples = {}
    for family in scrape(service).values():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and sample.labels.get("model_name") == "tiny":
                samples[sample.name.removeprefix("vllm:")] = sample.value
    assert [title for title, names in DASHBOARD.items() if not samples.keys() >= set(names)] == []
    assert samples["request_max_num_generation_tokens_sum"] == 5 + 3, "the longer of two choices counts"
    assert samples["request_max_num_generation_tokens_count"] == 2
    assert (samples["request_queue_time_seconds_sum"], samples["request_prefill_time_seconds_sum"]) == (1.5, 0.75)
    assert samples["request_decode_time_seconds_count"] == 3


def test_aliases_are_optional(service):
    assert [name for name in scrape(service) if name.startswith("vllm:")] == []
    with pytest.raises(ValueError, match="metric_aliases: 'sglang' is none of vllm"):
        dataclasses.replace(service.server._config, metric_aliases=("sglang",))
