"""All queries of dashboards, alerts and rules, evaluated by a live Prometheus that scrapes a running demo fleet.

The fleet is under load, and it has lost a rank. The dashboards are ours and vLLM's.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.browser import find_browser
from tests.deploy.conftest import GPU_HISTOGRAMS
from tests.deploy.live_fleet import Running, kill_rank, scrape, serve_demo
from tests.deploy.vllm_dashboards import read_queries
from tests.grafana_pictures import draw
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.slow
# Panels without data on this machine: they need a GPU, six of them also NVIDIA's dcgm-exporter.
GPU_PANELS = {
    "exchange / Step time on the GPU",
    "operations / Xid errors",
    "operations / Remapped memory rows",
    "operations / Temperature",
    "operations / Power and clock",
    "operations / GPU memory in use",
    "operations / Links",
}
# The prefix index finds a repeated prompt of more than one page.
PREFIX = "There are more experts than there is fast memory. Those that are used often should stay near. " * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The demo fleet. Low limits make requests wait and experts miss."""
    with serve_demo(tmp_path_factory.mktemp("fleet"), "--max-num-seqs", "1", "--metric-aliases", "vllm") as running:
        yield running


@pytest.fixture(scope="module")
def fleet(served: Running) -> str:
    """The URL of the fleet."""
    return served.url


@pytest.fixture(scope="module")
def prometheus(
    fleet: str, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a Prometheus with deploy/prometheus, this fleet's addresses and one-second intervals."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        scrape(fleet, program("prometheus"), folder, interval="1s") as running,
        httpx.Client(base_url=running.url, timeout=HANG_SECONDS, trust_env=False) as client,
    ):
        yield client


def chat(client: httpx.Client, question: str) -> None:
    """Send a streamed chat completion of 16 tokens with the common prefix."""
    messages = [{"role": "user", "content": PREFIX + question}]
    body = {"messages": messages, "stream": True, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200, lines
    assert lines[-1] == "data: [DONE]", lines[-1]


def too_long(client: httpx.Client) -> None:
    """Send a prompt over the model's limit, which is refused and counted."""
    response = client.post("/v1/completions", json={"prompt": [5] * 100_000, "max_tokens": 1})
    assert response.status_code == 400, response.text


@pytest.fixture(scope="module")
def traffic(fleet: str) -> Iterator[None]:
    """Send requests until the tests are over, because rates need change between two scrapes.

    There are more chats at once than places at the ranks, so some wait at the router.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def forever() -> None:
        with (
            ThreadPoolExecutor(7) as pool,
            httpx.Client(base_url=fleet, timeout=HANG_SECONDS, trust_env=False) as client,
        ):
            number = 0
            while not stop.wait(0.3):
                jobs = [pool.submit(chat, client, f"What is {number} plus {i}?") for i in range(6)]
                jobs.append(pool.submit(too_long, client))
                errors.extend(error for job in jobs if (error := job.exception()) is not None)
                number += 1

    thread = threading.Thread(target=forever)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert errors == []


@pytest.fixture(scope="module")
def incident(served: Running, prometheus: httpx.Client, traffic: None) -> None:
    """Kill a rank under load, and wait until Prometheus knows that the fleet has recovered."""
    wait_until_all_have_values(prometheus, {"before": "moeyard_recoveries_total == 0"})
    kill_rank(served)
    wait_until_all_have_values(prometheus, {"after": "moeyard_recoveries_total == 1"})


def evaluate(prometheus: httpx.Client, query: str) -> list[float]:
    """Return the finite values of an instant query; raise if Prometheus refuses it."""
    answer: dict[str, Any] = prometheus.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    result = answer["data"]["result"]
    values = [float(sample["value"][1]) for sample in result]
    return [value for value in values if math.isfinite(value)]


def wait_until_all_have_values(prometheus: httpx.Client, queries: dict[str, str]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while queries := {title: query for title, query in queries.items() if not evaluate(prometheus, query)}:
        assert time.monotonic() < deadline, queries
        time.sleep(1)  # Prometheus scrapes once a second


@pytest.mark.usefixtures("traffic")
def test_every_target_is_up(prometheus: httpx.Client) -> None:
    counts = {"moeyard-worker": 2, "moeyard-router": 1}
    up = {job: f'count(up{{job="{job}"}} == 1) == {count}' for job, count in counts.items()}
    # One scrape may be late by a second on a busy machine.
    wait_until_all_have_values(prometheus, {**up, "none is down": "absent(up == 0)"})


@pytest.mark.usefixtures("incident")
def test_every_dashboard_query_has_values(
    prometheus: httpx.Client, dashboards: dict[str, dict[str, Any]], dashboard_queries: dict[str, str]
) -> None:
    panels = {f"{name} / {panel['title']}": panel for name, board in dashboards.items() for panel in board["panels"]}
    described = {title for title, panel in panels.items() if "No data without a GPU" in panel.get("description", "")}
    assert described == GPU_PANELS
    for title in (titles := {title for title in dashboard_queries if title.rpartition(" / ")[0] in GPU_PANELS}):
        evaluate(prometheus, dashboard_queries[title])
    queries = {title: query for title, query in dashboard_queries.items() if title not in titles}
    assert len(queries) > 150
    wait_until_all_have_values(prometheus, queries)


@pytest.mark.usefixtures("incident")
def test_pictures_of_dashboards_can_be_drawn(prometheus: httpx.Client, tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on PATH")
    empty = draw(program, str(prometheus.base_url).rstrip("/"), int(time.time()), 60, tmp_path)
    assert empty >= GPU_PANELS
    assert len(list(tmp_path.glob("grafana-*.png"))) == 5


def operands(expression: str) -> list[str]:
    """Return the parts of an alert's condition between comparisons, `and` and `unless`, without numbers."""
    parts = re.split(r"\s+(?:and|unless on \(\w+\)|[<>=]=|[<>])\s+", expression)
    return [part for part in parts if not re.fullmatch(r"[\d.]+", part)]


@pytest.mark.usefixtures("incident")
def test_every_operand_of_alerts_and_annotations_has_values(
    prometheus: httpx.Client, alerts: dict[str, str], annotation_queries: dict[str, str]
) -> None:
    """The conditions themselves have no value on a healthy fleet."""
    conditions = {**alerts, **annotation_queries}
    assert len(conditions) == len(alerts) + 4
    for condition in conditions.values():
        evaluate(prometheus, condition)
    queries = {f"{name} / {part}": part for name, condition in conditions.items() for part in operands(condition)}
    # Prometheus has series of alerts only while one is pending or fires.
    wait_until_all_have_values(prometheus, {name: q for name, q in queries.items() if "ALERTS{" not in q})


@pytest.mark.usefixtures("traffic")
def test_panels_of_vllms_dashboards_have_values(prometheus: httpx.Client) -> None:
    queries, reasons = read_queries()
    absent = {prefix: {title for title, query in queries.items() if prefix in query} for prefix in reasons}
    assert all(absent.values()), absent
    titles = set().union(*absent.values())
    for title in titles:
        assert evaluate(prometheus, queries[title]) == [], f"{title} has data: take it from no_data"
    wait_until_all_have_values(prometheus, {title: queries[title] for title in queries.keys() - titles})


@pytest.mark.usefixtures("traffic")
def test_every_recording_rule_has_values(prometheus: httpx.Client, recording_rules: dict[str, str]) -> None:
    wait_until_all_have_values(prometheus, {name: name for name in recording_rules})
    wait_until_all_have_values(prometheus, recording_rules)


@pytest.mark.usefixtures("traffic")
def test_metrics_are_exported_as_known(
    prometheus: httpx.Client, series_names: frozenset[str], rank_series: frozenset[str]
) -> None:
    exported = series_names - {f"{name}_{part}" for name in GPU_HISTOGRAMS for part in ("bucket", "sum", "count")}
    wait_until_all_have_values(prometheus, {name: name for name in exported})
    by_rank = {name: f"count(count by (rank) ({name})) == 2" for name in rank_series}
    wait_until_all_have_values(prometheus, by_rank)
    names = prometheus.get("/api/v1/label/__name__/values").json()["data"]
    unknown = {name for name in names if name.startswith("moeyard_") and not name.endswith("_created")} - series_names
    assert unknown == set()


@pytest.mark.usefixtures("traffic")
def test_no_alert_fires_on_a_healthy_fleet(prometheus: httpx.Client) -> None:
    answer = prometheus.get("/api/v1/alerts").json()
    assert [alert for alert in answer["data"]["alerts"] if alert["state"] == "firing"] == []
    rules = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert [rule for group in rules for rule in group["rules"] if rule["health"] == "err"] == []
