"""The router's cost per token: `python bench/router.py [--streams 64] [--workers 1] [--routers 1]`.

Scripted engines in another process speak the workers' protocol and emit a token for every sequence every --step
milliseconds. A client with bare sockets reads the streams. The output covers the middle seconds of the run. It has the
router's CPU time per token (user and system), and the tokens per second that arrived. It also has the delay from a
token's step to its arrival (median and 99th percentile).
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq

from moeyard.fleet.routers import RouterProcesses
from moeyard.listen import bind
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.http.server import RouterServer, run_router
from moeyard_worker.protocol import Abort, Done, Hello, Message, Snapshot, Submit, TokenBatch, Tokens
from moeyard_worker.wire import decode, encode

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo"
VOCAB_SIZE = 8192
MAX_MODEL_LEN = 131072
WARM_UP_SECONDS = 2.0


@dataclass(slots=True)
class Sequence:
    """One sequence of a scripted engine."""

    peer: bytes
    submit: Submit
    sent: int = 0


class Engine:
    """A worker that computes nothing. In every step each sequence gets the token whose id is its position, modulo."""

    def __init__(self, rank: int, world_size: int, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._running: dict[str, Sequence] = {}
        self._snapshot = Snapshot(
            rank=rank,
            world_size=world_size,
            epoch=0,
            step=0,
            state="ready",
            failure=None,
            num_running=0,
            num_waiting=0,
            num_waiting_tokens=0,
            kv_pages_total=100_000,
            kv_pages_free=100_000,
            page_size=16,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
        )

    def run(self) -> None:
        """Run until the process ends."""
        due = time.monotonic()
        while True:
            wait = max(0, int((due - time.monotonic()) * 1000))
            while self._socket.poll(wait):
                self._take(*self._socket.recv_multipart())
                wait = max(0, int((due - time.monotonic()) * 1000))
            due = max(due + self._step_seconds, time.monotonic())
            self._step()

    def _take(self, peer: bytes, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Hello):
            self._send(peer, self._snapshot)
        elif isinstance(message, Submit):
            self._running[message.request_id] = Sequence(peer, message)
        elif isinstance(message, Abort) and message.request_id in self._running:
            self._end(message.request_id, self._running[message.request_id], "abort")

    def _step(self) -> None:
        rows: dict[bytes, list[Tokens]] = {}
        for name, sequence in self._running.items():
            tokens = Tokens(request_id=name, start=sequence.sent, token_ids=(300 + sequence.sent % 3000,))
            rows.setdefault(sequence.peer, []).append(tokens)
            sequence.sent += 1
        for peer, some in rows.items():
            self._send(peer, TokenBatch(rows=tuple(some)))
        for name, sequence in list(self._running.items()):
            if sequence.sent == sequence.submit.sampling.max_tokens:
                self._end(name, sequence, "length")

    def _end(self, name: str, sequence: Sequence, reason: str) -> None:
        del self._running[name]
        prompt = len(sequence.submit.prompt_token_ids)
        done = Done(
            request_id=name,
            finish_reason=reason,
            prompt_tokens=prompt,
            cached_tokens=0,
            completion_tokens=sequence.sent,
        )
        self._send(sequence.peer, done)

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart((peer, encode(message)))


def run_engine(rank: int, world_size: int, step_seconds: float, pipe: Connection) -> None:
    """Run the process of one engine and send its endpoint."""
    engine = Engine(rank, world_size, step_seconds)
    pipe.send(engine.endpoint)
    engine.run()


def run_routers(endpoints: list[str], sock: socket.socket, count: int, pipe: Connection) -> None:
    """Run the router's process, or the one that starts several, and report when they are ready."""
    workers = tuple(WorkerAddress(rank=i, endpoint=endpoint) for i, endpoint in enumerate(endpoints))
    config = RouterConfig(
        model_name="stub",
        model_path=MODEL,
        workers=workers,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        max_inflight=4096,
        port=sock.getsockname()[1],
    )
    if count == 1:
        sock.listen(1024)
        run_router(RouterServer(config, sock, on_ready=lambda: pipe.send("ready")))
    else:
        RouterProcesses(config, sock, count=count, on_ready=lambda: pipe.send("ready"), on_lost=print).run()


class Stream(asyncio.Protocol):
    """One streamed completion, read without a parser: arrival times and the number of events."""

    def __init__(self, port: int, max_tokens: int) -> None:
        body = {"prompt": "Hello there.", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data
        self.arrivals: list[float] = []
        self.events = 0
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events."""
        self.status = self.status or data[:12]
        events = data.count(b"data: ")
        self.events += events
        self.arrivals += [time.monotonic()] * events


def cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """Return user and system time of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(t.user for t in times), sum(t.system for t in times)


async def read_streams(port: int, count: int, seconds: float, router: psutil.Process) -> None:
    """Measure and print."""
    loop = asyncio.get_running_loop()
    streams = [Stream(port, MAX_MODEL_LEN // 2) for _ in range(count)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
    await asyncio.sleep(WARM_UP_SECONDS)
    before, cpu, began = sum(s.events for s in streams), cpu_seconds(router), time.monotonic()
    await asyncio.sleep(seconds)
    events, after, ended = sum(s.events for s in streams) - before, cpu_seconds(router), time.monotonic()
    assert all(s.status == b"HTTP/1.1 200" for s in streams), {s.status for s in streams}
    user, system = after[0] - cpu[0], after[1] - cpu[1]
    gaps = sorted(gap for s in streams for gap in between(s.arrivals, began, ended))
    print(
        f"{count} streams: {(user + system) / events * 1e6:.1f} us of the router's CPU per token "
        f"({user / events * 1e6:.1f} user), {events / (ended - began):.0f} tokens/s, "
        f"{(user + system) / (ended - began):.0%} of a core; between tokens {statistics.median(gaps) * 1e3:.1f} ms, "
        f"p99 {gaps[int(0.99 * len(gaps))] * 1e3:.1f} ms"
    )


def between(arrivals: list[float], began: float, ended: float) -> Iterator[float]:
    """Yield the seconds between arrivals within a window."""
    inside = [t for t in arrivals if began <= t <= ended]
    return (b - a for a, b in itertools.pairwise(inside))


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1, help="router processes on one port")
    parser.add_argument("--step", type=float, default=15.0, metavar="MS")
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for count in args.streams:
        processes, endpoints = [], []
        for rank in range(args.workers):
            mine, theirs = spawn.Pipe()
            processes.append(
                spawn.Process(target=run_engine, args=(rank, args.workers, args.step / 1e3, theirs), daemon=True)
            )
            processes[-1].start()
            endpoints.append(mine.recv())
        sock = bind("127.0.0.1", 0, shared=True)
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=run_routers, args=(endpoints, sock, args.routers, theirs)))
        processes[-1].start()
        assert mine.recv() == "ready"
        try:
            asyncio.run(read_streams(sock.getsockname()[1], count, args.seconds, psutil.Process(processes[-1].pid)))
        finally:
            for process in processes:
                process.terminate()
                process.join()


if __name__ == "__main__":
    main()
