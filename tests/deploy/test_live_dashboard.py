"""Every dashboard query and recording rule, evaluated by a live Prometheus that scrapes a running demo fleet."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.deploy.test_serve import free_port, get, post
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
# Fewer slots than a rank's 48 experts (16 in each of 3 layers) cause misses and evictions.
EXPERT_SLOTS = 16
# The prefix index finds a repeated prompt of more than one page.
PREFIX = "There are more experts than there is fast memory. Those that are used often should stay near. " * 4


class Running:
    """A child process with its output in a file; SIGINT stops it, like Ctrl-C."""

    def __init__(self, command: list[str], log: Path) -> None:
        folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
        self.log = log
        with log.open("wb") as output:
            # A separate session makes a group that can be killed whole if it does not stop.
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def wait_for(self, url: str) -> None:
        """Wait until `url` answers 200, or the process ends."""
        deadline = time.monotonic() + HANG_SECONDS
        last = "no answer yet"
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"exit code {self.process.returncode}:\n{self.tail()}"
            try:
                response = get(url)
                if response.status_code == 200:
                    return
                last = f"{response.status_code} {response.text}"
            except httpx.TransportError as error:
                last = str(error)
            time.sleep(0.05)
        raise AssertionError(f"{url} is not ready ({last}):\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self) -> int:
        """Stop the process and return its exit code; the rest of its group is killed."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(HANG_SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `moeyard serve` of the demo checkpoint with two ranks, a small expert cache and speculation."""
    port = free_port()
    command = [sys.executable, "-m", "moeyard", "serve", str(ROOT / "deploy" / "demo")]
    command += ["--workers", "2", "--port", str(port), "--expert-slots", str(EXPERT_SLOTS), "--speculate", "mtp"]
    running = Running(command, tmp_path_factory.mktemp("fleet") / "log")
    url = f"http://127.0.0.1:{port}"
    try:
        running.wait_for(f"{url}/readyz")
        yield url
    finally:
        code = running.stop()
    assert code == 0, f"exit code {code} after Ctrl-C:\n{running.tail()}"


@pytest.fixture(scope="module")
def prometheus(fleet: str, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with deploy/prometheus, this fleet's addresses and one-second intervals."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(ROOT / "deploy/prometheus" / name) for name in config["rule_files"]]
    port = free_port()
    text = yaml.safe_dump(config).replace("router:8000", fleet.removeprefix("http://"))
    text = text.replace("localhost:9090", f"127.0.0.1:{port}").replace("refresh_interval: 15s", "refresh_interval: 1s")
    (folder / "prometheus.yml").write_text(text)
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    running = Running(command, folder / "log")
    url = f"http://127.0.0.1:{port}"
    try:
        running.wait_for(f"{url}/-/ready")
        yield url
    finally:
        running.stop()


def chat(fleet: str, question: str) -> None:
    """Send a streamed chat completion of 16 tokens with the common prefix."""
    messages = [{"role": "user", "content": PREFIX + question}]
    body = {"messages": messages, "stream": True, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{fleet}/v1/chat/completions", json=body, timeout=HANG_SECONDS) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200, lines
    assert lines[-1] == "data: [DONE]", lines[-1]


def too_long(fleet: str) -> None:
    """Send a prompt over the model's limit, which is refused and counted."""
    response = post(f"{fleet}/v1/completions", json={"prompt": [5] * 100_000, "max_tokens": 1})
    assert response.status_code == 400, response.text


@pytest.fixture(scope="module")
def traffic(fleet: str) -> Iterator[None]:
    """Send requests until the tests are over, because rates need change between two scrapes."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def forever() -> None:
        with ThreadPoolExecutor(3) as pool:
            number = 0
            while not stop.wait(0.3):
                jobs = [pool.submit(chat, fleet, f"What is {number} plus {i}?") for i in range(3)]
                jobs.append(pool.submit(too_long, fleet))
                errors.extend(error for job in jobs if (error := job.exception()) is not None)
                number += 1

    thread = threading.Thread(target=forever)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert errors == []


def evaluate(prometheus: str, query: str) -> list[float]:
    """Return the finite values of an instant query; raise if Prometheus refuses it."""
    answer: dict[str, Any] = get(f"{prometheus}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    result = answer["data"]["result"]
    values = [float(sample["value"][1]) for sample in result]
    return [value for value in values if math.isfinite(value)]


def wait_until_all_have_values(prometheus: str, queries: dict[str, str]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while queries := {title: query for title, query in queries.items() if not evaluate(prometheus, query)}:
        assert time.monotonic() < deadline, queries
        time.sleep(1)  # Prometheus scrapes once a second


@pytest.mark.usefixtures("traffic")
def test_every_target_is_up(prometheus: str) -> None:
    counts = {"moeyard-worker": 2, "moeyard-router": 1}
    up = {job: f'count(up{{job="{job}"}} == 1) == {count}' for job, count in counts.items()}
    # One scrape may be late by a second on a busy machine.
    wait_until_all_have_values(prometheus, {**up, "none is down": "absent(up == 0)"})


@pytest.mark.usefixtures("traffic")
def test_every_dashboard_query_has_values(prometheus: str, dashboard_queries: list[tuple[str, str]]) -> None:
    queries = dict(dashboard_queries)
    assert len(queries) == len(dashboard_queries)
    # Quantiles need an event, and no rank is lost here. The counts have values, which are 0.
    never = {title for title, query in queries.items() if "moeyard_recovery_seconds_bucket" in query}
    assert len(never) == 3
    wait_until_all_have_values(prometheus, {title: queries[title] for title in queries.keys() - never})


@pytest.mark.usefixtures("traffic")
def test_every_recording_rule_has_values(prometheus: str, recording_rules: dict[str, str]) -> None:
    wait_until_all_have_values(prometheus, {name: name for name in recording_rules})
    wait_until_all_have_values(prometheus, recording_rules)


@pytest.mark.usefixtures("traffic")
def test_every_known_metric_is_exported(
    prometheus: str, series_names: frozenset[str], rank_series: frozenset[str]
) -> None:
    wait_until_all_have_values(prometheus, {name: name for name in series_names})
    by_rank = {name: f"count(count by (rank) ({name})) == 2" for name in rank_series}
    wait_until_all_have_values(prometheus, by_rank)


@pytest.mark.usefixtures("traffic")
def test_no_alert_fires_on_a_healthy_fleet(prometheus: str) -> None:
    answer = get(f"{prometheus}/api/v1/alerts").json()
    assert [alert for alert in answer["data"]["alerts"] if alert["state"] == "firing"] == []
    rules = get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    assert [rule for group in rules for rule in group["rules"] if rule["health"] == "err"] == []
