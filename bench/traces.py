"""Measure the cost of traces: pairs of rounds on a server that exports traces and on one that does not.

    moeyard serve --port 8000                                                          # the bundled model
    moeyard serve --port 8001 --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces
    python bench/traces.py --off http://127.0.0.1:8000 --on http://127.0.0.1:8001 --collector 4318

The program also serves as the collector and counts the bytes it receives. Both servers answer the same requests in
turns, in alternating order. Each workload prints two lines: the time, and the CPU time of the router's process
(`process_cpu_seconds_total`). A line has the medians of the rounds, and the median, minimum and maximum of the ratios.
"""

import argparse
import asyncio
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_SECONDS = 600.0
# Name, requests per round, concurrent requests, fields of a request.
_WORKLOADS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("one token", 64, 8, {"max_tokens": 1}),
    ("streams of 64", 32, 16, {"max_tokens": 64, "stream": True}),
    ("one stream of 256", 1, 1, {"max_tokens": 256, "stream": True}),
)


class Collector(ThreadingHTTPServer):
    """A collector that accepts every export. `received`: the bytes of all exports."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.received = 0
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Collector

    def do_POST(self) -> None:
        self.server.received += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


async def seconds_of(client: httpx.AsyncClient, url: str, count: int, at_once: int, fields: dict[str, Any]) -> float:
    """Return the time of a round. Raises httpx.HTTPStatusError."""
    places = asyncio.Semaphore(at_once)

    async def ask(number: int) -> None:
        prompt = [(7 * i + number) % 250 + 3 for i in range(32)]
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        async with places, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass

    begun = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(count)))
    return time.perf_counter() - begun


async def cpu_of(client: httpx.AsyncClient, url: str) -> float:
    """Return the CPU seconds of a server's router so far."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("process_cpu_seconds_total")).split()[1])


async def measure(off: str, on: str, rounds: int) -> None:
    async with httpx.AsyncClient(timeout=_SECONDS) as client:
        for name, count, at_once, fields in _WORKLOADS:
            pairs: dict[str, list[tuple[float, float]]] = {"time": [], "router's CPU": []}
            for number in range(rounds + 1):
                urls = (off, on) if number % 2 else (on, off)
                seconds, used = {}, {}
                for url in urls:
                    before = await cpu_of(client, url)
                    seconds[url] = await seconds_of(client, url, count, at_once, fields)
                    used[url] = await cpu_of(client, url) - before
                if number:  # the first round warms both up
                    pairs["time"].append((seconds[off], seconds[on]))
                    pairs["router's CPU"].append((used[off], used[on]))
            for kind, found in pairs.items():
                without, traced = (statistics.median(each) / count * 1e3 for each in zip(*found, strict=True))
                ratios = [traced / without for without, traced in found if without]
                middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
                print(
                    f"{name}, {kind} per request: {without:.2f} ms, {traced:.2f} ms with traces, "
                    f"x {middle:.3f} ({low:.3f} to {high:.3f})"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", required=True, help="URL of the server without traces")
    parser.add_argument("--on", required=True, help="URL of the server with traces")
    parser.add_argument("--collector", type=int, default=4318, help="port that the collector listens on")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    collector = Collector(args.collector)
    asyncio.run(measure(args.off, args.on, args.rounds))
    time.sleep(6.0)  # OpenTelemetry exports every 5 s
    if not collector.received:
        raise SystemExit("the collector has received nothing; check --otlp-traces-endpoint")
    print(f"{collector.received} bytes of traces received")


if __name__ == "__main__":
    main()
