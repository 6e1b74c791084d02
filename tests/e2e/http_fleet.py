"""A fleet as its clients see it: workers without Ray, the real router, plain HTTP."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.fleet import Fleet, ProcessPool, start_fleet
from tests.limits import HANG_SECONDS

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.families import load_model_config

MODEL_NAME = "tiny"
PAGE = 16


def engine_config(model: Path, *, num_workers: int, num_pages: int = 128, **overrides: Any) -> EngineConfig:
    """Return a small engine: `num_pages` KV pages of 16 tokens in fp32, steps of at most 256 rows."""
    bytes_per_token = load_model_config(model).state_spec(4).bytes_per_token
    options: dict[str, Any] = {"max_batch_tokens": 256, "max_num_seqs": 16, **overrides}
    return EngineConfig(
        model_path=str(model),
        num_workers=num_workers,
        kv_memory=num_pages * PAGE * bytes_per_token,
        page_size=PAGE,
        **options,
    )


@dataclass(slots=True)
class HttpFleet:
    """A running fleet behind its router. `failures` are the reasons that the router passed to `on_lost`.

    No launcher replaces a lost worker, so by default a loss fails the fleet at once.
    """

    url: str
    client: httpx.Client
    fleet: Fleet
    failures: list[str]

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return a completion with its token ids. It must succeed."""
        answer = self.post(**{"return_token_ids": True, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def choice(self, **body: Any) -> dict[str, Any]:
        """Return the only choice of a completion."""
        (choice,) = self.complete(**body)["choices"]
        return dict(choice)

    def choices_at_once(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Submit requests together, one connection each, and return the only choice of each."""
        return [dict(answer["choices"][0]) for answer in self.complete_at_once(bodies)]

    def complete_at_once(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Submit requests together, one connection each, and return their completions."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def snapshots(self) -> list[dict[str, Any]]:
        """Return the latest snapshot of every rank, from /v1/fleet."""
        workers = self.client.get("/v1/fleet").json()["workers"]
        return [dict(worker["snapshot"]) for worker in workers]

    def num_running(self) -> int:
        """Return the number of running sequences over all ranks."""
        return sum(int(s["num_running"]) for s in self.snapshots())

    def samples(self, name: str) -> list[dict[tuple[str, ...], float]]:
        """Return one metric's values by rank and label values, ordered by label name, without model and rank."""
        return [_series(httpx.get(e["metrics_url"], timeout=HANG_SECONDS).text, name) for e in self.fleet.endpoints]

    def total(self, name: str) -> float:
        """Return one counter summed over ranks and labels."""
        return sum(sum(series.values()) for series in self.samples(name))


def _series(page: str, name: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name:
                labels = tuple(sample.labels[key] for key in sorted(sample.labels) if key not in ("model_name", "rank"))
                found[labels] = sample.value
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds. Fail with `what` after HANG_SECONDS."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < HANG_SECONDS, f"{what}: not within {HANG_SECONDS} s"
        time.sleep(0.01)


def wait_until_idle(http: HttpFleet) -> None:
    """Wait until every rank runs nothing and has all its pages back."""

    def idle() -> bool:
        return all(
            s["num_running"] == s["num_waiting"] == 0 and s["kv_pages_free"] == s["kv_pages_total"]
            for s in http.snapshots()
        )

    wait_for(idle, "an idle fleet")


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer without the final [DONE]."""
    for line in answer.iter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def serve_http(pool: ProcessPool, config: EngineConfig, **overrides: Any) -> Iterator[HttpFleet]:
    """Start workers and a router (`overrides` are fields of RouterConfig), and stop them at the end."""
    model = load_model_config(config.model_path)
    with start_fleet(pool, config) as fleet:
        options: dict[str, Any] = {
            "model_name": MODEL_NAME,
            "model_path": Path(config.model_path),
            "workers": tuple(
                WorkerAddress(rank=rank, endpoint=e["frontend"], metrics_url=e["metrics_url"])
                for rank, e in enumerate(fleet.endpoints)
            ),
            "max_model_len": min(report["max_model_len"] for report in fleet.reports),
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "shutdown_grace": 0.2,
            "recovery_timeout": 0.0,
            "intake_processes": 1,  # each costs half a second of a core
            "keys": fleet.keys.of_router(),
        }
        with _route(RouterConfig(**{**options, **overrides})) as (url, failures):
            with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
                yield HttpFleet(url, client, fleet, failures)
            assert failures == []


@contextlib.contextmanager
def _route(config: RouterConfig) -> Iterator[tuple[str, list[str]]]:
    """Run a router in its own thread until the block ends. Yields its URL and its list of failures."""
    sock = socket.create_server(("127.0.0.1", 0))
    ready, failures = threading.Event(), list[str]()
    server = RouterServer(config, sock, on_ready=ready.set, on_lost=lambda rank, reason: failures.append(reason))

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run, name="router")
    thread.start()
    try:
        assert ready.wait(HANG_SECONDS), f"the router was not ready: {failures}"
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", failures
    finally:
        server.stop()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "the router did not stop"
