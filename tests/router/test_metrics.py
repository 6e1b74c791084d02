"""The router's metrics: names, labels, buckets, and that they count what happened."""

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from moeyard_worker.protocol import Snapshot

TOKEN = [0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03]
TOKEN += [0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5]
REQUEST = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 60, 120]
BUCKETS = {
    "moeyard_time_to_first_token_seconds": REQUEST,
    "moeyard_e2e_request_latency_seconds": REQUEST,
    "moeyard_time_per_output_token_seconds": TOKEN,
    "moeyard_inter_token_latency_seconds": TOKEN,
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


def test_counts(start):
    service = start(2)
    for worker in service.workers:
        worker.pace = 0.002
    service.complete(prompt=[[5, 6, 7], [8]], n=2, max_tokens=5)
    service.stream("/v1/completions", prompt="x", max_tokens=9, stop=" quick")
    assert service.post("/v1/completions", prompt="").status_code == 400
    assert service.client.get("/nowhere/at/all").status_code == 404
    service.wait_idle()
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
    assert 0.002 <= value(families, "moeyard_time_per_output_token_seconds_sum", **model) / 5 < 1
    assert value(families, "moeyard_e2e_request_latency_seconds_sum", **model) > 5 * 2 * 0.002


def test_buckets(service):
    service.complete(prompt="x", max_tokens=2)
    families = scrape(service)
    for name, expected in BUCKETS.items():
        bounds = [float(s.labels["le"]) for s in families[name].samples if s.name == name + "_bucket"]
        assert bounds == [*expected, float("inf")]


def test_abandoned_requests_say_nothing_about_speed(start, wait_for):
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
