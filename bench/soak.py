"""Run random load for a long time and check that nothing is left: `python bench/soak.py [--seconds 900] [--url URL]`.

Clients act at random, from a seed: streams and whole answers, several choices, invalid requests, cancellation while
waiting or running, slow readers, readers that never read, bursts. Then the load ends, and the server must release
everything within --drain seconds. No sequences may be in flight, waiting, running or queued, all pages must be free,
and the router must have as many open files as before. The output is a table of actions and outcomes, and what was left.
The exit code is 1 if anything was left.

`ACTIONS` lists what can happen. A new kind, such as killing a worker, needs one function and its weight.

Without --url the fleet is a router in front of paced ranks (bench/paced.py).
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overload import paced_fleet
from paced import Pace


@dataclass(slots=True)
class Soak:
    """One run: address, random source, and results as (action, outcome) -> number."""

    url: str
    rng: random.Random
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def body(self, **given: Any) -> bytes:
        """Return a request of random size."""
        ids = [self.rng.randrange(5, 390) for _ in range(self.rng.randint(1, 50))]
        body = {"prompt": ids, "max_tokens": self.rng.randint(1, 80), "ignore_eos": True, **given}
        return json.dumps(body).encode()

    async def open(self, body: bytes, *, buffer: int = 65536) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a new connection. At most `buffer` bytes of its answer are buffered unread."""
        split = urlsplit(self.url)
        assert split.hostname is not None
        reader, writer = await asyncio.open_connection(split.hostname, split.port, limit=buffer)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {split.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer


async def read_all(reader: asyncio.StreamReader, *, pause: float = 0.0) -> str:
    """Read an answer to its end. Return its status, and whether a stream is complete."""
    begin = end = b""
    while part := await reader.read(4096):
        begin, end = begin or part, (end + part)[-16:]
        await asyncio.sleep(pause)
    status = begin[9:12].decode() or "nothing"
    return status if status != "200" or end.endswith((b"\r\n0\r\n\r\n", b"}")) else "200, cut"


async def stream(soak: Soak) -> str:
    """Read a stream."""
    reader, writer = await soak.open(soak.body(stream=True))
    with contextlib.closing(writer):
        return await read_all(reader)


async def whole(soak: Soak) -> str:
    """Read a whole answer of several choices."""
    reader, writer = await soak.open(soak.body(n=soak.rng.randint(1, 4)))
    with contextlib.closing(writer):
        return await read_all(reader)


async def leave(soak: Soak) -> str:
    """Leave at any moment, with a close or an abort."""
    _, writer = await soak.open(soak.body(stream=True, n=soak.rng.randint(1, 3)))
    await asyncio.sleep(soak.rng.expovariate(5.0))
    (writer.close if soak.rng.random() < 0.5 else writer.transport.abort)()
    return "left"


async def wrong(soak: Soak) -> str:
    """Send an invalid request."""
    body = soak.rng.choice(
        [b"{", b'{"prompt": []}', b'{"prompt": "x", "n": 0}', b'{"prompt": [99999999]}', b"\xff" * 99]
    )
    reader, writer = await soak.open(body)
    with contextlib.closing(writer):
        return await read_all(reader)


async def slow(soak: Soak) -> str:
    """Read a stream with pauses."""
    reader, writer = await soak.open(soak.body(stream=True, logprobs=5), buffer=1024)
    with contextlib.closing(writer):
        return await read_all(reader, pause=0.05)


async def never(soak: Soak) -> str:
    """Never read, and leave after a while if the server has not closed the connection."""
    _, writer = await soak.open(soak.body(stream=True, logprobs=20, n=4, max_tokens=200), buffer=1024)
    await asyncio.sleep(soak.rng.uniform(0.5, 5.0))
    gone = writer.transport.is_closing()
    writer.transport.abort()
    return "cut off" if gone else "left"


async def burst(soak: Soak) -> str:
    """Send many requests at once."""
    answers = await asyncio.gather(*(stream(soak) for _ in range(soak.rng.randint(20, 100))))
    for answer in answers[1:]:
        soak.outcomes["burst", answer] += 1
    return answers[0]


# Actions and their weights.
ACTIONS: tuple[tuple[Callable[[Soak], Awaitable[str]], float], ...] = (
    (stream, 10.0),
    (whole, 4.0),
    (leave, 4.0),
    (wrong, 2.0),
    (slow, 1.0),
    (never, 0.5),
    (burst, 0.1),
)


async def act(soak: Soak, action: Callable[[Soak], Awaitable[str]]) -> None:
    """Run an action and count its outcome."""
    try:
        outcome = await action(soak)
    except OSError as error:
        outcome = type(error).__name__
    soak.outcomes[action.__name__, outcome] += 1


async def load(soak: Soak, *, rate: float, seconds: float) -> None:
    """Start `rate` actions per second on average. Return when the last one has ended."""
    begun = time.monotonic()
    actions, weights = zip(*ACTIONS, strict=True)
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < begun + seconds:
            await asyncio.sleep(soak.rng.expovariate(rate))
            group.create_task(act(soak, soak.rng.choices(actions, weights)[0]))


async def left_over(client: httpx.AsyncClient) -> list[str]:
    """Return descriptions of what the fleet still holds."""
    fleet = (await client.get("/v1/fleet")).json()
    found = [f"{fleet[name]} {name}" for name in ("inflight", "waiting") if fleet[name]]
    for worker in fleet["workers"]:
        s = worker["snapshot"]
        held = s["kv_pages_total"] - s["kv_pages_free"]
        for what, count in (("running", s["num_running"]), ("queued", s["num_waiting"]), ("pages held", held)):
            if count:
                found.append(f"rank {worker['rank']}: {count} {what}")
    return found


async def run(soak: Soak, router: psutil.Process | None, args: argparse.Namespace) -> list[str]:
    """Run the load, wait, and return what is left at the end."""
    url = soak.url
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        await load(soak, rate=args.rate, seconds=min(2.0, args.seconds / 4))  # creates everything that is created once
        await settle(client, router, files=10**9, seconds=args.drain)
        files, memory = (router.num_fds(), router.memory_info().rss) if router else (0, 0)
        await load(soak, rate=args.rate, seconds=args.seconds)
        found = await settle(client, router, files=files, seconds=args.drain)
    if router is not None:
        print(f"router: {memory >> 20} MB before, {router.memory_info().rss >> 20} MB after, {files} files open before")
    return found


async def settle(client: httpx.AsyncClient, router: psutil.Process | None, *, files: int, seconds: float) -> list[str]:
    """Wait up to `seconds` until everything is released, and return what is not."""
    end = time.monotonic() + seconds
    while True:
        found = await left_over(client)
        # The connection of this check counts too.
        if router is not None and router.num_fds() > files + 1:
            found.append(f"{router.num_fds()} open files, {files} before")
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", help="URL of a running fleet (default: a paced one)")
    add("--seconds", type=float, default=900.0)
    add("--rate", type=float, default=12.0, help="actions per second (default %(default)s)")
    add("--drain", type=float, default=15.0)
    add(
        "--send-timeout", type=float, default=2.0, help="send timeout of the paced fleet's router (default %(default)s)"
    )
    add("--workers", type=int, default=2)
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url, router = args.url, None
        if url is None:
            fields = {"worker_places": 8, "max_inflight": 512, "send_timeout": args.send_timeout}
            url, router = stack.enter_context(paced_fleet(args.workers, Pace(max_num_seqs=8), fields))
        soak = Soak(url, random.Random(args.seed))
        found = asyncio.run(run(soak, router, args))
    print("\n| action | outcome | number |\n|---|---|---|")
    for (action, outcome), count in sorted(soak.outcomes.items()):
        print(f"| {action} | {outcome} | {count} |")
    print("nothing was left" if not found else f"left: {', '.join(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
