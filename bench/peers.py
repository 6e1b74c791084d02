"""Other routers beside ours: `python bench/peers.py [--streams 64] [--rounds 3]`.

litellm's proxy and vllm-router (each in a virtual environment below --venvs, made on the first run) stand before an
engine that speaks OpenAI's API and streams a token to every request each --step milliseconds; ours stands before the
scripted engine of `bench/router.py`, with the same step. One client with bare sockets reads the streams of each in
turn, --rounds times (of litellm behind the others), and of the HTTP engine without a router, which shows what engine
and client cost. Printed are medians of the rounds: tokens/s that arrived, how long after its step a token came, and
CPU time per token of the router (all its processes). Every token is four characters long, so that one event with two
tokens counts as two.
"""

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import uvloop
from router import MODEL, Engine, run_routers
from tokenizers import Tokenizer

from moeyard_worker.protocol import TokenBatch, Tokens
from moeyard_worker.wire import encode

WIDTH = 4
WARM_UP_SECONDS = 2.0
START_SECONDS = 120.0
BEGIN_SECONDS = 20.0
# A stream is known to both ends by its `max_tokens`, which every router passes on.
FIRST_LIMIT = 50_000
# litellm does not start without one; nobody else looks at it. It is checked once a request.
KEY = f"sk-{secrets.token_hex(16)}"
CONTENT = re.compile(rb'"content": ?"([^"]+)"')
CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1_795_000_000,
    "model": "stub", "choices": [{"index": 0, "delta": {"content": " sea"}, "logprobs": None, "finish_reason": None}],
}  # fmt: skip


class Clock:
    """When each step of an engine was, and at which step each stream began: a file that two processes map."""

    def __init__(self, path: Path) -> None:
        shape = 2_000_000 + FIRST_LIMIT
        path.touch()
        os.truncate(path, shape * 8)
        both = np.memmap(path, np.float64, "r+", shape=(shape,))
        self.times, self.begun = both[:2_000_000], both[2_000_000:]
        self.step = 0

    def tick(self) -> int:
        """It is the time of the next step; its number."""
        self.step += 1
        self.times[self.step] = time.monotonic()
        return self.step


class TimedEngine(Engine):
    """The scripted engine with a clock, and tokens of four plain characters."""

    def __init__(self, step_seconds: float, clock: Path) -> None:
        super().__init__(0, 1, step_seconds)
        self._clock = Clock(clock)
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        texts = ((i, tokenizer.decode([i])) for i in range(300, tokenizer.get_vocab_size()))
        self._ids = [i for i, text in texts if len(text) == WIDTH and text.isalpha() and text.isascii()][:500]

    def _step(self) -> None:
        step = self._clock.step + 1
        rows: dict[bytes, list[Tokens]] = {}
        for name, sequence in self._running.items():
            if not sequence.sent and sequence.submit.sampling.max_tokens >= FIRST_LIMIT:
                self._clock.begun[sequence.submit.sampling.max_tokens - FIRST_LIMIT] = step
            token = self._ids[sequence.sent % len(self._ids)]
            rows.setdefault(sequence.peer, []).append(Tokens(request_id=name, start=sequence.sent, token_ids=(token,)))
            sequence.sent += 1
        frames = [(peer, encode(TokenBatch(rows=tuple(some)))) for peer, some in rows.items()]
        self._clock.tick()  # now that all is written, as the HTTP engine's events are
        for frame in frames:
            self._socket.send_multipart(frame)
        for name, sequence in list(self._running.items()):
            if sequence.sent == sequence.submit.sampling.max_tokens:  # the router's own probe
                self._end(name, sequence, "length")


class HttpEngine(asyncio.Protocol):
    """One connection of the engine that speaks HTTP: answers every GET, streams for every POST."""

    def __init__(self, running: dict[asyncio.Transport, int]) -> None:
        self._running = running
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A request, whole or in part."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not end or (length and len(body) < int(length[1])):
            return
        self._data = b""
        if head.startswith(b"GET"):
            text = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"x","created":0}]}'
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
            )
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._running[self._transport] = -json.loads(body)["max_tokens"]

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._running.pop(self._transport, None)


async def serve_http_engine(step_seconds: float, path: Path, pipe: Connection) -> None:
    """Until the process ends."""
    clock, loop = Clock(path), asyncio.get_running_loop()
    running: dict[asyncio.Transport, int] = {}
    server = await loop.create_server(lambda: HttpEngine(running), "127.0.0.1", 0, backlog=1024)
    pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    whole = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"
    # litellm ends a stream that says the same a hundred times.
    events = [whole.replace(b" sea", b" %03d" % i) for i in range(500)]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    due = time.monotonic()
    while True:
        due = max(due + step_seconds, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        step = clock.tick()
        chunk = chunks[step % len(chunks)]
        for transport, limit in running.items():
            if limit < 0:
                clock.begun[-limit - FIRST_LIMIT] = step
                running[transport] = -limit
            transport.write(chunk)


def run_http_engine(step_seconds: float, clock: Path, pipe: Connection) -> None:
    """Process of the engine that speaks HTTP; sends its address."""
    uvloop.run(serve_http_engine(step_seconds, clock, pipe))


def run_timed_engine(step_seconds: float, clock: Path, pipe: Connection) -> None:
    """Process of the engine that speaks our workers' protocol; sends its endpoint."""
    engine = TimedEngine(step_seconds, clock)
    pipe.send(engine.endpoint)
    engine.run()


@dataclass(slots=True)
class Target:
    """What is measured: its port, the clock of the engine behind it, and its process."""

    name: str
    port: int
    clock: Clock
    process: psutil.Process | None = None
    renew: Callable[[], int] | None = None  # kills the process and starts another; its id

    def cpu_seconds(self) -> float:
        """User and system time of all processes of the router."""
        if self.process is None:
            return 0.0
        family = [self.process, *self.process.children(recursive=True)]
        return sum(p.cpu_times().user + p.cpu_times().system for p in family)


class Stream(asyncio.Protocol):
    """One streamed chat, read without parsing it as JSON: when each token came."""

    def __init__(self, port: int, limit: int) -> None:
        body = {"model": "stub", "messages": [{"role": "user", "content": "Hello there."}], "max_tokens": limit}
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = (
            head.encode() + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        self._rest = b""
        self.limit = limit
        self.arrivals: list[float] = []
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        now = time.monotonic()
        self.status = self.status or data[:12]
        whole, cut, rest = (self._rest + data).rpartition(b"\n\n")
        self._rest = rest
        if cut:
            count = sum(len(text) for text in CONTENT.findall(whole)) // WIDTH
            self.arrivals += [now] * count


@dataclass(frozen=True, slots=True)
class Seen:
    """One round: streams that had a token, tokens per second, and milliseconds and microseconds per token."""

    begun: int
    rate: float
    median: float
    p99: float
    cpu: float


async def read_streams(target: Target, count: int, seconds: float, numbers: "itertools.count[int]") -> Seen:
    """Open the streams, let them run in, look for some seconds, close them."""
    loop = asyncio.get_running_loop()
    streams = [Stream(target.port, next(numbers)) for _ in range(count)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", target.port)
    deadline = time.monotonic() + BEGIN_SECONDS
    while not all(s.arrivals for s in streams) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # litellm's first answers take it seconds
    await asyncio.sleep(WARM_UP_SECONDS)
    cpu, began = target.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    used, ended = target.cpu_seconds() - cpu, time.monotonic()
    for stream in streams:
        stream.transport.abort()
    begun = [s for s in streams if s.arrivals]
    assert all(s.status == b"HTTP/1.1 200" for s in begun), (target.name, {s.status for s in streams})
    late: list[float] = []
    for stream in begun:
        first = int(target.clock.begun[stream.limit - FIRST_LIMIT])
        assert first, f"{target.name}: a stream never began"
        steps = target.clock.times[first : first + len(stream.arrivals)]
        late += [a - s for a, s in zip(stream.arrivals, steps, strict=True) if began <= a <= ended]
    late.sort()
    assert late, f"{target.name}: no token came within {seconds} s"
    assert late[0] >= 0, f"{target.name}: a token came before its step"
    return Seen(
        begun=len(begun),
        rate=len(late) / (ended - began),
        median=float(statistics.median(late)) * 1e3,
        p99=float(late[int(0.99 * len(late))]) * 1e3,
        cpu=used / len(late) * 1e6,
    )


def environment(directory: Path, package: str) -> tuple[Path, str]:
    """The `bin` of a virtual environment with this package, and the package's version."""
    home = directory / re.sub(r"\W+", "_", package)
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", package], check=True)
        (home / "ready").touch()
    (site,) = home.glob("lib/*/site-packages")
    (found,) = importlib.metadata.distributions(name=package.partition("[")[0], path=[str(site)])
    return home / "bin", found.version


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start(command: list[Any], port: int, path: str, log: Path) -> "subprocess.Popen[bytes]":
    """A peer's process, once it answers."""
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": KEY,
        "RUST_LOG": "error",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=out, env={**os.environ, **quiet}, cwd=log.parent
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return process
    process.kill()
    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()}")


def end(peers: "list[subprocess.Popen[bytes]]") -> None:
    """Kill them: asked to end, litellm waits for its streams."""
    for peer in peers:
        peer.kill()
        peer.wait()


def litellm_config(engine: str) -> str:
    """One model behind one address; nothing is looked up, written or retried."""
    params = {"model": "openai/stub", "api_base": f"{engine}/v1", "api_key": "none"}
    return json.dumps({"model_list": [{"model_name": "stub", "litellm_params": params}]})


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--step", type=float, default=15.0, metavar="MS")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=Path("/tmp/moeyard-clients"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the peers end with this process
    spawn, processes, peers = multiprocessing.get_context("spawn"), [], []

    def process(target: Any, *more: Any) -> tuple[Any, int]:
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(*more, theirs), daemon=True))
        processes[-1].start()
        if not mine.poll(START_SECONDS):
            raise SystemExit(f"{target.__name__} did not start")
        return mine.recv(), processes[-1].pid

    with tempfile.TemporaryDirectory() as scratch:
        http_clock, our_clock = Path(scratch) / "http", Path(scratch) / "ours"
        step = args.step / 1e3
        try:
            url, _ = process(run_http_engine, step, http_clock)
            endpoint, _ = process(run_timed_engine, step, our_clock)
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            _, pid = process(run_routers, [endpoint], sock, 1)
            http, ours = Clock(http_clock), Clock(our_clock)
            targets = [
                Target("no router, HTTP engine", int(url.rpartition(":")[2]), http),
                Target(f"moeyard {importlib.metadata.version('moeyard')}", port, ours, psutil.Process(pid)),
            ]
            bin_directory, version = environment(args.venvs, "vllm-router")
            port = free_port()
            command = [bin_directory / "vllm-router", "--worker-urls", url, "--port", port, "--policy", "round_robin"]
            command += ["--prometheus-port", free_port()]
            peers.append(start(command, port, "/health", args.venvs / "vllm-router.log"))
            targets.append(Target(f"vllm-router {version}", port, http, psutil.Process(peers[-1].pid)))
            bin_directory, version = environment(args.venvs, "litellm[proxy]")
            port = free_port()
            (Path(scratch) / "litellm.yaml").write_text(litellm_config(url))
            litellm = [bin_directory / "litellm", "--config", f"{scratch}/litellm.yaml", "--port", port]
            litellm += ["--host", "127.0.0.1"]

            def renew() -> int:
                end(peers[1:])
                peers[1:] = [start(litellm, port, "/health/liveliness", args.venvs / "litellm.log")]
                return int(peers[1].pid)

            targets.append(Target(f"litellm proxy {version}", port, http, renew=renew))
            numbers = itertools.count(FIRST_LIMIT + 1)
            for count in args.streams:
                measure(targets, count, args, numbers)
        finally:
            end(peers)
            for one in processes:
                one.terminate()
                one.join()


def measure(targets: list[Target], count: int, args: argparse.Namespace, numbers: "itertools.count[int]") -> None:
    """The rounds of one number of streams, the targets in turn, and the table."""
    seen: dict[str, list[Seen]] = {target.name: [] for target in targets}
    loads = []
    # A litellm that could not follow works on what it has for minutes after its clients have left: it is started anew
    # for each round, and nobody is measured beside it.
    turns = [t for _ in range(args.rounds) for t in targets if t.renew is None]
    for target in turns + [t for t in targets if t.renew is not None] * args.rounds:
        if target.renew is not None:
            target.process = psutil.Process(target.renew())
        seen[target.name].append(uvloop.run(read_streams(target, count, args.seconds, numbers)))
        loads.append(os.getloadavg()[0])
        print(f"  {target.name}: {seen[target.name][-1]}", file=sys.stderr, flush=True)
        time.sleep(0.5)
    print(f"{count} streams, a token each {args.step:g} ms: {count / args.step * 1e3:.0f} tokens/s asked for; "
          f"medians of {args.rounds}, load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")  # fmt: skip
    print(f"{'':28}{'streams':>9}{'tokens/s':>10}{'late ms':>10}{'p99 ms':>10}{'CPU us/token':>14}")
    for name, rounds in seen.items():
        begun, rate, median, p99, cpu = (statistics.median(getattr(s, k) for s in rounds) for k in Seen.__slots__)
        print(f"{name:28}{begun:9.0f}{rate:10.0f}{median:10.2f}{p99:10.2f}{cpu:14.1f}", flush=True)


if __name__ == "__main__":
    main()
