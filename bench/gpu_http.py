"""The cost of router and sockets per token: TPOT of a shape over HTTP, and in process.

    python bench/gpu_http.py [--shape Qwen3-30B-A3B] [--layers N] [--streams 1 8 64] [--tokens 128] [--device cuda]

This needs no Ray. A worker runs in one process, the router in another, and the client in this one. Each figure comes
with the worker's own time per step over the same answers, from its /metrics. The difference is the cost.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import uvloop

from moeyard.clients.bench.bench_config import ENGINE_OPTIONS
from moeyard.clients.bench.engine import engine_config
from moeyard.clients.bench.scenarios import Decode
from moeyard.options import add_options
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.shapes import SHAPES, served_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tests.fleet
from tests.fleet import ProcessPool, start_fleet

PROMPT = 128


def route(config: RouterConfig, sock: socket.socket, ready: Event) -> None:
    """Run a router's process."""
    server = RouterServer(config, sock, on_ready=ready.set, on_lost=lambda _rank, reason: sys.exit(reason))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve())


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Start a worker and its router. Yield host, port and the worker's metrics URL."""
    pool = ProcessPool()
    config = engine_config(args, [Decode(streams=max(args.streams), prompt=PROMPT, output=args.tokens)])
    model = served_model(config)
    with start_fleet(pool, config) as fleet:
        address = fleet.endpoints[0]
        options = RouterConfig(
            model_name="m",
            model_path=None,
            workers=(WorkerAddress(rank=0, endpoint=address["frontend"], metrics_url=address["metrics_url"]),),
            max_model_len=fleet.reports[0]["max_model_len"],
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            shutdown_grace=0.2,
            recovery_timeout=0.0,
            keys=fleet.keys.of_router(),
        )
        sock, context = socket.create_server(("127.0.0.1", 0)), get_context("spawn")
        ready = context.Event()
        router = context.Process(target=route, args=(options, sock, ready), daemon=True)
        router.start()
        assert ready.wait(60), "the router was not ready"
        yield "127.0.0.1", sock.getsockname()[1], address["metrics_url"]
        router.terminate()
        router.join(10)
    pool.close()


async def one(host: str, port: int, prompt: list[int], tokens: int) -> list[float]:
    """Return the arrival times (seconds) of each event of a streamed completion."""
    body = json.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise RuntimeError(line + await reader.read())
    writer.close()
    # The last event only has the finish reason.
    return times[:tokens]


def steps(url: str) -> tuple[float, float]:
    """Return seconds and number of all steps so far, by the worker's device."""
    page = urllib.request.urlopen(url, timeout=5).read().decode()
    found = []
    for part in ("sum", "count"):
        match = re.search(rf"^moeyard_step_device_seconds_{part}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        match = match or re.search(rf"^moeyard_step_seconds_{part}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        assert match is not None, "no such metric"
        found.append(float(match[1]))
    return found[0], found[1]


async def measure(args: argparse.Namespace, host: str, port: int, metrics: str, vocab: int) -> None:
    """Print a line for each number of streams."""
    chance = random.Random(3)
    for streams in args.streams:
        for _ in range(2):
            prompts = [[chance.randrange(vocab) for _ in range(PROMPT)] for _ in range(streams)]
            before = steps(metrics)
            answers = await asyncio.gather(*(one(host, port, prompt, args.tokens) for prompt in prompts))
            after = steps(metrics)
        tpot = [(times[-1] - times[0]) / (args.tokens - 1) * 1e3 for times in answers]
        # Use the time in which all streams decoded.
        begun, ended = max(times[0] for times in answers), min(times[-1] for times in answers)
        gaps = [(b - a) * 1e3 for times in answers for a, b in itertools.pairwise(times) if begun <= a and b <= ended]
        print(
            json.dumps(
                {
                    "streams": streams,
                    "tpot_ms_p50": statistics.median(tpot),
                    "itl_ms_mean": statistics.mean(gaps),
                    "itl_ms_p99": sorted(gaps)[int(len(gaps) * 0.99)],
                    "worker_step_ms_mean": (after[0] - before[0]) / (after[1] - before[1]) * 1e3,
                    "steps": after[1] - before[1],
                    "events": [len(times) for times in answers[:2]],
                }
            ),
            flush=True,
        )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    add_options(parser, EngineConfig, only=ENGINE_OPTIONS, choices={"shape": tuple(SHAPES)})
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.set_defaults(model=None, chunk=None, shape="Qwen3-30B-A3B")
    args = parser.parse_args()
    vocab = SHAPES[args.shape]["vocab_size"]
    # With an empty Triton cache a worker may take more than a minute to start.
    tests.fleet.CALL_SECONDS = 300.0
    with served(args) as (host, port, metrics):
        asyncio.run(measure(args, host, port, metrics, vocab))
    return 0


if __name__ == "__main__":
    sys.exit(main())
