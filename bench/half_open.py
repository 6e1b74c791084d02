"""Open connections that never finish their requests: `python bench/half_open.py [--connections 1500] [--url URL]`.

A third of the connections send nothing, a third half a head, a third half a body. Meanwhile whole requests are sent one
after the other. The output shows how long those took before and meanwhile, when the half-open connections were closed
and with which status, and the router's memory and files before, during and after. The exit code is 1 if a whole request
failed, a half-open connection was closed too early, too late or without a 408, or files are left.

Without --url a router stands in front of a paced rank (bench/paced.py), with --header-timeout and --body-timeout.
"""

import argparse
import asyncio
import contextlib
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overload import paced_fleet
from paced import Pace

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# Incomplete requests: nothing, half a head, a head with part of its body.
HALVES = (b"", HEAD + b"X-Half: ", HEAD + b'Content-Length: 100\r\n\r\n{"prompt": [5, ')
ASK = {"prompt": [300, 301, 302], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
# Allowance for timers on a busy machine, and for 1,500 answers in sequence.
SLACK_SECONDS = 5.0


@dataclass(slots=True)
class Cut:
    """One half-open connection: its index in HALVES, the times of connect, send and close, and the server's answer."""

    half: int
    made: float
    sent: float = 0.0
    ended: float = 0.0
    said: bytes = b""


async def hold(url: str, half: int, patience: float) -> Cut:
    """Connect, send an incomplete request, and wait for the end."""
    split = urlsplit(url)
    cut = Cut(half, time.monotonic())
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    with contextlib.suppress(TimeoutError, ConnectionError):
        writer.write(HALVES[half])
        cut.sent = time.monotonic()
        async with asyncio.timeout(patience):
            cut.said = await reader.read()
        cut.ended = time.monotonic()
    writer.close()
    return cut


async def ask_until(url: str, over: asyncio.Event) -> tuple[list[float], Counter[int]]:
    """Send whole requests in sequence, each on a new connection. Return (seconds of each, statuses)."""
    seconds, statuses = [], Counter[int]()
    while not over.is_set():
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            began = time.monotonic()
            statuses[(await client.post("/v1/completions", json=ASK)).status_code] += 1
            seconds.append(time.monotonic() - began)
        await asyncio.sleep(0.05)
    return seconds, statuses


def size(router: psutil.Process | None) -> tuple[int, int]:
    """Return the router's (bytes of memory, open files)."""
    return (0, 0) if router is None else (router.memory_info().rss, router.num_fds())


def describe(seconds: Sequence[float]) -> str:
    """Describe median and maximum in ms."""
    return f"median {1e3 * statistics.median(seconds):.0f} ms, max {1e3 * max(seconds):.0f} ms"


def wrong_cuts(cuts: Sequence[Cut], limits: tuple[float, float]) -> list[str]:
    """Count connections that were not closed as they should be, by kind. `limits` are seconds for a head and a body."""
    wrong = Counter[str]()
    for cut in cuts:
        # A client whose head is late gets the time of a head, because the drill may share its cores with many
        # processes.
        limit, lasted = limits[cut.half == 2], cut.ended - cut.made
        least = min(limits) if cut.sent - cut.made > limits[0] - 0.1 else limit
        if not cut.ended or lasted > limit + SLACK_SECONDS:
            wrong[f"kept beyond {limit:g} s"] += 1
        elif lasted < least - 0.1:
            wrong[f"cut before {limit:g} s"] += 1
        elif not cut.said.startswith(b"HTTP/1.1 408 "):
            wrong[f"cut with {cut.said[:60]!r} behind {HALVES[cut.half][-20:]!r}"] += 1
    return [f"{count} {what}" for what, count in wrong.items()]


async def drill(url: str, router: psutil.Process | None, count: int, limits: tuple[float, float]) -> list[str]:
    """Run the drill and return what is wrong."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, over.set)
    before, _ = await ask_until(url, over)
    was = size(router)
    over.clear()
    asking = asyncio.create_task(ask_until(url, over))
    holding = [asyncio.create_task(hold(url, i % 3, max(limits) + SLACK_SECONDS)) for i in range(count)]
    await asyncio.sleep(0.5 * min(limits))
    during = size(router)
    cuts = [await task for task in holding]
    over.set()
    meanwhile, statuses = await asking
    await asyncio.sleep(0.5)
    after = size(router)
    print(
        f"whole requests before: {describe(before)}; "
        f"meanwhile: {len(meanwhile)}, {describe(meanwhile)}, {dict(statuses)}"
    )
    for half, name in enumerate(("nothing", "half a head", "half a body")):
        lasted = [cut.ended - cut.made for cut in cuts if cut.half == half and cut.ended]
        print(f"{name}: {len(lasted)} cut after {min(lasted, default=0):.2f} to {max(lasted, default=0):.2f} s")
    sizes = [f"{memory >> 20} MB and {files} files" for memory, files in (was, during, after)]
    print(f"router: {sizes[0]} before, {sizes[1]} during, {sizes[2]} after")
    wrong = wrong_cuts(cuts, limits)
    if set(statuses) != {200}:
        wrong.append(f"whole requests were answered with {dict(statuses)}")
    if after[1] > was[1] + 2:
        wrong.append(f"{after[1] - was[1]} files remain")
    return wrong


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--connections", type=int, default=1500)
    add("--url")
    add("--header-timeout", type=float, default=10.0, help="seconds, must equal the router's (default %(default)g)")
    add("--body-timeout", type=float, default=15.0, help="seconds, must equal the router's (default %(default)g)")
    args = parser.parse_args()
    limits = (args.header_timeout, args.body_timeout)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.url is not None:
        wrong = asyncio.run(drill(args.url, None, args.connections, limits))
    else:
        fields = {"header_timeout": limits[0], "body_timeout": limits[1]}
        with paced_fleet(1, Pace(), fields) as (url, router):
            wrong = asyncio.run(drill(url, router, args.connections, limits))
    for line in wrong:
        print(f"half_open: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
