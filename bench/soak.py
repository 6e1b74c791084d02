"""Random load for a long time, and nothing left at its end: `python bench/soak.py [--seconds 900] [--url URL]`.

Clients do what clients do, drawn from a seed: streams and whole answers, several choices, requests that are wrong, ones
that are cancelled while they wait or run, readers that are slow or never read, bursts. Then the load ends, and all
must be given back within --drain seconds: sequences in flight and waiting 0, running and queued on every rank 0, all
pages free, the router's open files as before. Printed is a table of what was done and how it ended, and what was left;
the exit code is 1 if anything was.

`ACTIONS` is the list of what can happen: one more kind, such as killing a worker, is one more function and its weight.

Without --url the fleet is a router before paced ranks (bench/paced.py).
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
    """One run: where to, with which dice, and what came of it: (action, outcome) -> number."""

    url: str
    rng: random.Random
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def body(self, **given: Any) -> bytes:
        """A request of random size."""
        ids = [self.rng.randrange(5, 390) for _ in range(self.rng.randint(1, 50))]
        asked = {"prompt": ids, "max_tokens": self.rng.randint(1, 80), "ignore_eos": True, **given}
        return json.dumps(asked).encode()

    async def open(self, body: bytes, *, buffer: int = 65536) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request has been sent; at most `buffer` bytes of its answer are taken up unread."""
        split = urlsplit(self.url)
        assert split.hostname is not None
        reader, writer = await asyncio.open_connection(split.hostname, split.port, limit=buffer)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {split.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer


async def read_all(reader: asyncio.StreamReader, *, pause: float = 0.0) -> str:
    """The status of an answer that is read to its end, and whether a stream came whole."""
    begin = end = b""
    while part := await reader.read(4096):
        begin, end = begin or part, (end + part)[-16:]
        await asyncio.sleep(pause)
    status = begin[9:12].decode() or "nothing"
    return status if status != "200" or end.endswith((b"\r\n0\r\n\r\n", b"}")) else "200, cut"


async def stream(soak: Soak) -> str:
    """A stream that is read."""
    reader, writer = await soak.open(soak.body(stream=True))
    with contextlib.closing(writer):
        return await read_all(reader)


async def whole(soak: Soak) -> str:
    """An answer in one piece, of several choices."""
    reader, writer = await soak.open(soak.body(n=soak.rng.randint(1, 4)))
    with contextlib.closing(writer):
        return await read_all(reader)


async def leave(soak: Soak) -> str:
    """A client that leaves at any moment, with or without a farewell."""
    _, writer = await soak.open(soak.body(stream=True, n=soak.rng.randint(1, 3)))
    await asyncio.sleep(soak.rng.expovariate(5.0))
    (writer.close if soak.rng.random() < 0.5 else writer.transport.abort)()
    return "left"


async def wrong(soak: Soak) -> str:
    """A request that is none."""
    body = soak.rng.choice(
        [b"{", b'{"prompt": []}', b'{"prompt": "x", "n": 0}', b'{"prompt": [99999999]}', b"\xff" * 99]
    )
    reader, writer = await soak.open(body)
    with contextlib.closing(writer):
        return await read_all(reader)


async def slow(soak: Soak) -> str:
    """A stream that is read, in pauses."""
    reader, writer = await soak.open(soak.body(stream=True, logprobs=5), buffer=1024)
    with contextlib.closing(writer):
        return await read_all(reader, pause=0.05)


async def never(soak: Soak) -> str:
    """A reader that never reads, and leaves after a while if it is not cut off before."""
    _, writer = await soak.open(soak.body(stream=True, logprobs=20, n=4, max_tokens=200), buffer=1024)
    await asyncio.sleep(soak.rng.uniform(0.5, 5.0))
    gone = writer.transport.is_closing()
    writer.transport.abort()
    return "cut off" if gone else "left"


async def burst(soak: Soak) -> str:
    """Many at once."""
    answers = await asyncio.gather(*(stream(soak) for _ in range(soak.rng.randint(20, 100))))
    for answer in answers[1:]:
        soak.outcomes["burst", answer] += 1
    return answers[0]


# What may happen, and how often.
ACTIONS: tuple[tuple[Callable[[Soak], Awaitable[str]], float], ...] = (
    (stream, 10.0), (whole, 4.0), (leave, 4.0), (wrong, 2.0), (slow, 1.0), (never, 0.5), (burst, 0.1),
)  # fmt: skip


async def act(soak: Soak, action: Callable[[Soak], Awaitable[str]]) -> None:
    """Do it, and count how it ended."""
    try:
        outcome = await action(soak)
    except OSError as error:
        outcome = type(error).__name__
    soak.outcomes[action.__name__, outcome] += 1


async def load(soak: Soak, *, rate: float, seconds: float) -> None:
    """Actions as they come, `rate` a second on average; returns when the last has ended."""
    begun = time.monotonic()
    actions, weights = zip(*ACTIONS, strict=True)
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < begun + seconds:
            await asyncio.sleep(soak.rng.expovariate(rate))
            group.create_task(act(soak, soak.rng.choices(actions, weights)[0]))


async def left_over(client: httpx.AsyncClient) -> list[str]:
    """What the fleet still holds, in words."""
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
    """Load, then wait; what was left at the end."""
    url = soak.url
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        await load(soak, rate=args.rate, seconds=min(2.0, args.seconds / 4))  # so that what is made once is made
        await settle(client, router, files=10**9, seconds=args.drain)
        files, memory = (router.num_fds(), router.memory_info().rss) if router else (0, 0)
        await load(soak, rate=args.rate, seconds=args.seconds)
        found = await settle(client, router, files=files, seconds=args.drain)
    if router is not None:
        print(f"router: {memory >> 20} MB before, {router.memory_info().rss >> 20} MB after, {files} files open before")
    return found


async def settle(client: httpx.AsyncClient, router: psutil.Process | None, *, files: int, seconds: float) -> list[str]:
    """Wait until all is given back, for so long; what is not."""
    end = time.monotonic() + seconds
    while True:
        found = await left_over(client)
        # The connection that asks is one of them.
        if router is not None and router.num_fds() > files + 1:
            found.append(f"{router.num_fds()} open files, {files} before")
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", help="a fleet that runs (default: a paced one)")
    add("--seconds", type=float, default=900.0)
    add("--rate", type=float, default=12.0, help="actions per second (default %(default)s)")
    add("--drain", type=float, default=15.0)
    add("--send-timeout", type=float, default=2.0, help="of the paced fleet's router (default %(default)s)")
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
