"""`moeyard demo`: serve the bundled checkpoint, stream one chat completion to the terminal and show its figures."""

import argparse
import http.client
import json
import os
import signal
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from moeyard.local.serve import Running, serve
from moeyard.logs import LogConfig
from moeyard_router.config import DoorConfig
from moeyard_worker.config.engine_config import EngineConfig

# Addresses like this one are what the bundled model read most (deploy/demo/README.md). Sampled, because the greedy text
# of so small a model runs in circles; seeded, so that everybody sees the same.
PROMPT = "Give Abraham Lincoln's State of the Union address of 1862."
MAX_TOKENS = 80
TEMPERATURE = 0.5
SEED = 3
REQUEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one streamed answer, in seconds as its client saw it."""

    num_tokens: int
    time_to_first_token: float
    time_per_output_token: float


def demo(args: argparse.Namespace, config: EngineConfig) -> int:
    """Serve as `moeyard serve` does, and run the demonstration once the fleet is ready."""
    errors: list[Exception] = []

    def show(running: Running) -> None:
        try:
            demonstrate(running)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            errors.append(error)
            print(f"the demonstration failed: {type(error).__name__}: {error}", flush=True)
        if args.once or errors:
            # The router ends in an orderly way on SIGINT, as if Ctrl-C was pressed.
            os.kill(os.getpid(), signal.SIGINT)

    def on_ready(running: Running) -> None:
        # The router answers in this thread's loop, so the client needs one of its own.
        threading.Thread(target=show, args=(running,), name="demo", daemon=True).start()

    # Its figures are for a terminal, with nothing between them that is not wrong.
    code = serve(args, config, door=DoorConfig(), log=LogConfig(level="warning"), on_ready=on_ready)
    return 1 if errors else code


def demonstrate(running: Running) -> None:
    """One chat completion, then the table and the addresses."""
    print(f"\n> {PROMPT}")
    timing = stream_chat(running)
    samples = read_metrics(running.metrics_urls)
    print("\n\n" + table(timing, samples))
    print(
        f"\npage      {running.url}/\nAPI       {running.url}/v1\nmetrics   {running.url}/metrics\nworkers   "
        + "\n          ".join(running.metrics_urls)
    )
    print(
        f"\ntry       curl {running.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f"'{json.dumps({'model': running.model_name, 'messages': [{'role': 'user', 'content': 'Hello'}]})}'"
        "\nstop      Ctrl-C\n",
        flush=True,
    )


def stream_chat(running: Running) -> Timing:
    """Print a streamed answer as it arrives; raises ValueError when the server answers with an error."""
    body = {
        "model": running.model_name,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = urllib.parse.urlsplit(running.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=REQUEST_SECONDS)
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {response.read().decode()}")
    first = last = 0.0
    num_tokens = 0
    for event in events(response):
        if "error" in event:
            raise ValueError(event["error"]["message"])
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            last = time.perf_counter()
            first = first or last
            print(event["choices"][0]["delta"]["content"], end="", flush=True)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    connection.close()
    if not first:
        raise ValueError("the answer has no text")
    return Timing(
        num_tokens=num_tokens,
        time_to_first_token=first - begun,
        time_per_output_token=(last - first) / max(1, num_tokens - 1),
    )


def events(response: http.client.HTTPResponse) -> Iterator[dict]:
    """The JSON objects of a server-sent event stream."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def read_metrics(urls: tuple[str, ...]) -> dict[str, float]:
    """Samples of all workers by name, summed over ranks and labels."""
    totals: dict[str, float] = {}
    for url in urls:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def table(timing: Timing, samples: dict[str, float]) -> str:
    """The demo's figures: latency as the client saw it, cache and exchange as the workers counted them since start."""
    hits, misses = samples["moeyard_expert_cache_hits_total"], samples["moeyard_expert_cache_misses_total"]
    exchanges = samples["moeyard_exchange_seconds_count"]
    # Each layer has one dispatch and one combine.
    per_layer = 2 * samples["moeyard_exchange_seconds_sum"] / exchanges if exchanges else 0.0
    rows = (
        ("tokens", f"{timing.num_tokens}"),
        ("TTFT", f"{timing.time_to_first_token * 1e3:.1f} ms"),
        ("TPOT", f"{timing.time_per_output_token * 1e3:.2f} ms"),
        ("expert-cache hit rate", f"{100 * hits / (hits + misses):.1f} %" if hits + misses else "no access"),
        ("exchange per layer", f"{per_layer * 1e6:.0f} us (dispatch + combine, waiting included)"),
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
