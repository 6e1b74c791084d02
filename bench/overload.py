"""A fleet under more load than it can serve: `python bench/overload.py [--url URL] [--factor 10] [--seconds 60]`.

Prompts have --prompt tokens and answers --output. There are five phases, with Poisson arrivals in the second, third and
fifth:

1. a closed loop, which measures the capacity
2. a quiet open loop (--quiet of the capacity)
3. 0.9 of the capacity
4. as many requests at once as an idle fleet has places
5. the flood (--factor times the capacity)

A refused client retries once after Retry-After, up to --patience seconds after the flood. The output has complete
requests per second, the time to the first token of admitted requests, refusals by status, and how many retries were
admitted. It also has the router's memory, CPU and own histograms. "connected" and "refused within" show how late this
client itself is: on a busy machine only the router's own figures count. With --keys the flood uses one API key, and
--light of the capacity another.

Without --url the fleet is a router in front of paced ranks (bench/paced.py). Their steps have a fixed duration,
whatever else the machine does. With --direct all requests wait at the workers, without the router's queue.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from moeyard.clients.bench.workload import arrivals
from moeyard_router.config import AccessConfig, RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer, run_router

sys.path.insert(0, str(Path(__file__).resolve().parent))
from paced import MAX_MODEL_LEN, VOCAB_SIZE, Pace, run_paced

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo"
KEYS = {"flood": "flood-key-1", "light": "light-key-1"}


@dataclass(slots=True)
class Record:
    """One request. Times are `time.perf_counter` seconds."""

    due: float
    sent: float = 0.0
    connected: float = 0.0
    first: float | None = None
    ended: float = 0.0
    status: int = 0
    retry_after: float | None = None
    whole: bool = False
    again: "Record | None" = None

    @property
    def ttft(self) -> float | None:
        """Seconds from its start to the first token, a new connection included."""
        return None if self.first is None else self.first - self.sent


class Exchange(asyncio.Protocol):
    """One request on one connection, read with minimal work."""

    def __init__(self, request: bytes, record: Record) -> None:
        self._request, self._record = request, record
        self.ended = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._record.connected = time.perf_counter()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of it
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Find the first event and the last."""
        record = self._record
        if record.first is None and b"data: " in data:
            record.first = time.perf_counter()
        record.whole = record.whole or b"data: [DONE]" in data
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header (httptools)."""
        if name.lower() == b"retry-after":
            self._record.retry_after = float(value)

    def on_headers_complete(self) -> None:
        """Take the status (httptools)."""
        self._record.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """Take the end of the answer (httptools)."""
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self._record.ended = time.perf_counter()
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True)
class Client:
    """Sends streamed requests. Prompts are token ids, so that the router's work is admission."""

    url: str
    prompt: int
    output: int
    key: str | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def _bytes(self) -> bytes:
        ids = [self.rng.randrange(300, 3000) for _ in range(self.prompt)]
        most = self.rng.randint(self.output // 2, self.output * 3 // 2)
        body = {"prompt": ids, "max_tokens": most, "stream": True, "ignore_eos": True, "temperature": 0}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nConnection: close\r\n"
        if self.key is not None:
            head += f"Authorization: Bearer {self.key}\r\n"
        return (head + f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data

    async def ask(self, due: float | None = None, *, retry_until: float = 0.0) -> Record:
        """Send one request, and another if it is refused with a Retry-After before `retry_until`."""
        now = time.perf_counter()
        record = Record(due=now if due is None else due, sent=now)
        split = urlsplit(self.url)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(self._bytes(), record), split.hostname, split.port
            )
            await connection.ended
        except OSError:
            record.ended = time.perf_counter()
        if record.status == 429 and record.retry_after is not None and record.ended + record.retry_after < retry_until:
            await asyncio.sleep(record.retry_after)
            record.again = await self.ask()
        return record


async def closed_loop(client: Client, concurrency: int, seconds: float) -> list[Record]:
    """Keep `concurrency` requests in flight for `seconds`. Requests that end in the second half count."""
    done: list[Record] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < end:
            done.append(await client.ask())

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return done


async def open_loop(client: Client, rate: float, seconds: float, *, seed: int, patience: float = 0.0) -> list[Record]:
    """Send requests with Poisson arrivals."""
    begun = time.perf_counter()
    tasks = []
    for at in itertools.takewhile(lambda at: at < seconds, arrivals(rate, 1.0, seed)):
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(begun + at, retry_until=begun + seconds + patience)))
    return [await task for task in tasks]


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of them lie, nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row(name: str, records: list[Record], seconds: float) -> str:
    """Format one line of the table."""
    ttft = [a.ttft for a in records if a.whole and a.ttft is not None]
    refused = [a for a in records if a.status == 429]
    waits = [a.retry_after for a in refused if a.retry_after is not None]
    back = [a.again for a in refused if a.again is not None]
    answered = percentile([a.ended - a.connected for a in refused], 0.5)
    late = percentile([a.connected - a.due for a in records if a.connected], 0.99)
    others = Counter(a.status for a in records if not a.whole and a.status != 429)
    admitted = sum(a.status == 200 for a in back)
    return (
        f"| {name} | {len(records)} | {len(ttft) / seconds:.1f} | {percentile(ttft, 0.5) * 1e3:.0f} | "
        f"{percentile(ttft, 0.99) * 1e3:.0f} | {len(refused)} | "
        + (f"{percentile(waits, 0.5):.0f} / {max(waits):.0f}" if waits else "")
        + f" | {f'{admitted} of {len(back)}' if back else ''} | {dict(others) or ''} | {late * 1e3:.0f} | "
        + f"{answered * 1e3:.0f} |"
    )


HEAD = (
    "| phase | requests | whole/s | TTFT p50, ms | p99, ms | 429 | Retry-After median / max, s | retries admitted "
    "| other | connected late p99, ms | refused within, ms |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def buckets(page: str, name: str) -> dict[float, float]:
    """Return the cumulative counts of a histogram, summed over its labels."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                found[float(sample.labels["le"])] = sample.value
    return found


def bounds(before: dict[float, float], after: dict[float, float]) -> str:
    """Return upper bounds, in ms, of median and 99th percentile of the observations in between."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[float("inf")]
    at = [next((b for b, count in counts.items() if count >= share * total), float("nan")) for share in (0.5, 0.99)]
    return f"{total:.0f}, half within {at[0] * 1e3:.0f} ms, 99 % within {at[1] * 1e3:.0f} ms"


class Watch:
    """Samples the router during a phase: memory, CPU, and waiting requests."""

    def __init__(self, url: str, router: psutil.Process | None, key: str | None) -> None:
        self._url, self._router = url, router
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.memory: list[int] = []
        self.inflight: list[int] = []
        self.cpu = 0.0

    async def run(self) -> None:
        """Sample until cancelled."""
        before = self._cpu()
        async with httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=30) as client:
            while True:
                self.inflight.append((await client.get("/v1/fleet")).json()["inflight"])
                if self._router is not None:
                    self.memory.append(self._router.memory_info().rss)
                    self.cpu = self._cpu() - before
                await asyncio.sleep(0.5)

    def _cpu(self) -> float:
        if self._router is None:
            return 0.0
        times = self._router.cpu_times()
        return times.user + times.system

    def __str__(self) -> str:
        said = f"at most {max(self.inflight, default=0)} sequences in the fleet"
        if self.memory:
            said += f"; router {self.memory[0] >> 20} MB at the start, {self.memory[-1] >> 20} MB at the end"
            said += f", {self.cpu:.1f} s of CPU"
        return said


async def drill(args: argparse.Namespace, url: str, router: psutil.Process | None) -> None:
    """Run all phases."""
    flood_key, light_key = (KEYS["flood"], KEYS["light"]) if args.keys else (args.api_key, args.api_key)

    def client(key: str | None, seed: int) -> Client:
        return Client(url, args.prompt, args.output, key, random.Random(seed))

    await closed_loop(client(flood_key, 0), args.places, args.calm / 2)
    begun = time.perf_counter()
    full = await closed_loop(client(flood_key, 1), args.places, args.calm)
    seconds = time.perf_counter() - begun
    capacity = sum(a.whole for a in full) / seconds
    print(
        f"capacity: {capacity:.1f} requests/s at {args.places} at once\n\n{HEAD}\n{row('closed loop', full, seconds)}"
    )
    quiet = await open_loop(client(light_key, 2), args.quiet * capacity, args.calm, seed=args.seed)
    print(row(f"quiet, {args.quiet:g}x", quiet, args.calm))
    busy = await open_loop(client(light_key, 3), 0.9 * capacity, args.calm, seed=args.seed + 1)
    print(row("0.9x", busy, args.calm), flush=True)
    # Fill all places without a flood first, because a flood begins with that.
    begun = time.perf_counter()
    burst = await asyncio.gather(*(client(light_key, 100 + i).ask() for i in range(args.places)))
    print(row("burst, all places", burst, time.perf_counter() - begun), flush=True)
    headers = {} if flood_key is None else {"authorization": f"Bearer {flood_key}"}
    before = httpx.get(f"{url}/metrics", headers=headers).text
    watch = Watch(url, router, flood_key)
    watching = asyncio.create_task(watch.run())
    flood = open_loop(
        client(flood_key, 4), args.factor * capacity, args.seconds, seed=args.seed + 2, patience=args.patience
    )
    if args.keys:
        light = open_loop(client(light_key, 5), args.light * capacity, args.seconds, seed=args.seed + 3)
        flooded, lit = await asyncio.gather(flood, light)
        print(row(f"flood, {args.factor:g}x", flooded, args.seconds))
        print(row(f"light load, {args.light:g}x", lit, args.seconds))
    else:
        flooded = await flood
        print(row(f"flood, {args.factor:g}x", flooded, args.seconds))
    # Until then the flood fills free places, and these prompts take their own time.
    since = min(record.due for record in flooded) + 1.0
    print(row("after its first second", [record for record in flooded if record.due >= since], args.seconds - 1.0))
    watching.cancel()
    await asyncio.wait([watching])
    print(f"\nin the flood: {watch}")
    after = httpx.get(f"{url}/metrics", headers=headers).text
    for name in ("moeyard_time_to_first_token_seconds", "moeyard_router_queue_seconds"):
        print(f"{name}: {bounds(buckets(before, name), buckets(after, name))}")


def run_router_process(endpoints: list[str], sock: socket.socket, fields: dict[str, Any], pipe: Connection) -> None:
    """Run the router's process."""
    workers = tuple(WorkerAddress(rank=i, endpoint=endpoint) for i, endpoint in enumerate(endpoints))
    config = RouterConfig(
        model_name="paced",
        model_path=MODEL,
        workers=workers,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        port=sock.getsockname()[1],
        prefix_caching=False,
        **fields,
    )
    sock.listen(4096)
    run_router(RouterServer(config, sock, on_ready=lambda: pipe.send("ready")))


@contextlib.contextmanager
def paced_fleet(num_workers: int, pace: Pace, fields: dict[str, Any]) -> Iterator[tuple[str, psutil.Process]]:
    """Start a router in front of paced ranks, each in its own process. Yield its URL and its process."""
    spawn = multiprocessing.get_context("spawn")
    processes, endpoints = [], []

    def start(target: Callable[..., None], *given: Any) -> Any:
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(*given, theirs), daemon=True))
        processes[-1].start()
        return mine.recv()

    try:
        endpoints = [start(run_paced, rank, num_workers, pace) for rank in range(num_workers)]
        sock = socket.create_server(("127.0.0.1", 0))
        assert start(run_router_process, endpoints, sock, fields) == "ready"
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", psutil.Process(processes[-1].pid)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.join()


def parse() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", help="URL of a running fleet (default: a paced one)")
    add("--api-key", help="for --url")
    add("--workers", type=int, default=2)
    add("--places", type=int, default=64, help="concurrent sequences of the fleet (default %(default)s)")
    add("--factor", type=float, default=10.0)
    add("--seconds", type=float, default=60.0)
    add("--calm", type=float, default=10.0, help="seconds of every other phase")
    add("--quiet", type=float, default=0.3)
    add("--light", type=float, default=0.3)
    add("--patience", type=float, default=60.0)
    add("--prompt", type=int, default=100)
    add("--output", type=int, default=160)
    add("--keys", action="store_true")
    add("--direct", action="store_true")
    add("--max-queue-seconds", type=float)
    add("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run the drill."""
    args = parse()
    with contextlib.ExitStack() as stack:
        url, router = args.url, None
        if url is None:
            pace = Pace(max_num_seqs=args.places // args.workers)
            fields: dict[str, Any] = {"max_inflight": args.workers * (pace.max_num_seqs + 1024)}
            if not args.direct:
                fields |= {"worker_places": pace.max_num_seqs, "max_queue_seconds": args.max_queue_seconds}
            if args.keys:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                (folder / "keys").write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
                fields["access"] = AccessConfig(api_key_file=folder / "keys")
            url, router = stack.enter_context(paced_fleet(args.workers, pace, fields))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(drill(args, url, router))


if __name__ == "__main__":
    main()
