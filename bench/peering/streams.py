"""The client of `bench/peers.py`: it reads streams from bare sockets and records how late each token was."""

import asyncio
import itertools
import json
import re
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import psutil
from peering.engines import FIRST_LIMIT, WIDTH, Clock

_WARM_UP_SECONDS = 2.0
_BEGIN_SECONDS = 20.0
# litellm does not start without a key and checks it once per request. The others ignore it.
KEY = f"sk-{secrets.token_hex(16)}"
_CONTENT = re.compile(rb'"content": ?"([^"]+)"')


@dataclass(slots=True)
class Target:
    """A measured router: its port, its engine's clock, its process, and the process of the API server behind it."""

    name: str
    port: int
    clock: Clock
    process: psutil.Process | None = None
    behind: psutil.Process | None = None
    renew: Callable[[], int] | None = None  # kills the process and starts another; returns its id


def _cpu_seconds(process: psutil.Process | None) -> float:
    """Return user and system time of a process and its children."""
    if process is None:
        return 0.0
    family = [process, *process.children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in family)


class Stream(asyncio.Protocol):
    """One streamed chat, read without a JSON parser: the arrival time of each token."""

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
        """Send the request."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events."""
        now = time.monotonic()
        self.status = self.status or data[:12]
        whole, cut, rest = (self._rest + data).rpartition(b"\n\n")
        self._rest = rest
        if cut:
            count = sum(len(text) for text in _CONTENT.findall(whole)) // WIDTH
            self.arrivals += [now] * count


@dataclass(frozen=True, slots=True)
class Seen:
    """One round: streams with a token, tokens per second, milliseconds late, and microseconds of CPU per token."""

    begun: int
    rate: float
    median: float
    p99: float
    cpu: float
    behind: float


async def read_streams(target: Target, count: int, seconds: float, numbers: "itertools.count[int]") -> Seen:
    """Open the streams, warm up, measure for `seconds`, and close them."""
    loop = asyncio.get_running_loop()
    streams = [Stream(target.port, next(numbers)) for _ in range(count)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", target.port)
    deadline = time.monotonic() + _BEGIN_SECONDS
    while not all(s.arrivals for s in streams) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # litellm's first answers take seconds
    await asyncio.sleep(_WARM_UP_SECONDS)
    cpu, behind, began = _cpu_seconds(target.process), _cpu_seconds(target.behind), time.monotonic()
    await asyncio.sleep(seconds)
    cpu, behind = _cpu_seconds(target.process) - cpu, _cpu_seconds(target.behind) - behind
    ended = time.monotonic()
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
        cpu=cpu / len(late) * 1e6,
        behind=behind / len(late) * 1e6,
    )
