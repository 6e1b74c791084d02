"""`moeyard demo`: serve the bundled checkpoint, stream one chat completion to the terminal and show its figures."""

import argparse
import http.client
import json
import os
import signal
import threading
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from moeyard.clients.api_client import StreamedAnswer, stream_chat
from moeyard.clients.bench.figures import latencies
from moeyard.clients.target_config import parse_target
from moeyard.local.serve import Running, serve
from moeyard.local.settings import engine_config
from moeyard.logs import LogConfig
from moeyard_router.config import AccessConfig

# Addresses like this one are what the bundled model read most (deploy/demo/README.md). Sampled, because the greedy text
# of so small a model runs in circles; seeded, so that everybody sees the same.
PROMPT = "Give Abraham Lincoln's State of the Union address of 1862."
MAX_TOKENS = 80
TEMPERATURE = 0.5
SEED = 3
REQUEST_SECONDS = 60.0


def demo(args: argparse.Namespace) -> int:
    """Serve as `moeyard serve` does, and run the demonstration once the fleet is ready."""
    errors: list[Exception] = []

    def show(running: Running) -> None:
        try:
            demonstrate(running)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            if running.stopping():
                return
            errors.append(error)
            print(f"the demonstration failed: {type(error).__name__}: {error}", flush=True)
        if args.once or errors:
            # Not SIGINT: a shell's `&` has that ignored.
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(running: Running) -> None:
        # The router answers in this thread's loop, so the client needs one of its own.
        threading.Thread(target=show, args=(running,), name="demo", daemon=True).start()

    # Its figures are for a terminal, with nothing between them that is not wrong.
    code = serve(args, engine_config(args), access=AccessConfig(), log=LogConfig(level="warning"), on_ready=on_ready)
    return 1 if errors else code


def demonstrate(running: Running) -> None:
    """One chat completion, then the table and the addresses."""
    print(f"\n> {PROMPT}")
    reply = ask(running)
    samples = read_metrics(running.metrics_urls)
    print("\n\n" + table(reply, samples))
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


def ask(running: Running) -> StreamedAnswer:
    """Print a streamed answer as it arrives; raises ValueError when there is none."""
    body = {
        "model": running.model_name,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "seed": SEED,
    }
    reply = stream_chat(parse_target(running.url), body, lambda text, _: print(text, end="", flush=True))
    if reply.error is not None or not reply.text:
        raise ValueError(reply.error or "the answer has no text")
    return reply


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


def table(reply: StreamedAnswer, samples: dict[str, float]) -> str:
    """The demo's figures: latency as the client saw it, cache and exchange as the workers counted them since start."""
    hits, misses = samples["moeyard_expert_cache_hits_total"], samples["moeyard_expert_cache_misses_total"]
    exchanges = samples["moeyard_exchange_seconds_count"]
    # Each layer has one dispatch and one combine.
    per_layer = 2 * samples["moeyard_exchange_seconds_sum"] / exchanges if exchanges else 0.0
    found = latencies(reply)
    rows = (
        ("tokens", f"{reply.output_tokens}"),
        ("TTFT", f"{(found['ttft'] or 0.0) * 1e3:.1f} ms"),
        ("TPOT", f"{(found['tpot'] or 0.0) * 1e3:.2f} ms"),
        ("expert-cache hit rate", f"{100 * hits / (hits + misses):.1f} %" if hits + misses else "no access"),
        ("exchange per layer", f"{per_layer * 1e6:.0f} us (dispatch + combine, waiting included)"),
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
