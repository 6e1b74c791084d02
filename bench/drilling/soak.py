"""A soak drill: load, rough clients and a kill every minute. At the end nothing may be left."""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from drilling.asks import make_asks
from drilling.drive import Drill, Outcome
from drilling.faults import Fault
from drilling.load import Client, Load, references
from drilling.report import COLUMNS, line
from drilling.rough import Rough
from drilling.server import Server, read_json
from drilling.watch import Watch

SAMPLE_SECONDS = 5.0
# Limit for the requests in flight when the load ends.
DRAIN_SECONDS = 120.0
# Allowance for Python's heap. A leak grows with the requests, and a soak has thousands.
RSS_GROWTH, RSS_SLACK = 1.10, 16 * 1024**2
# Files that are opened once, on first use.
FILES_SLACK = 4
# Shared memory in lines of /proc/PID/maps.
SHARED = re.compile(r"(?:/dev/shm/|memfd:)moeyard")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of the router's process and of the largest rank."""

    seconds: float
    router: int
    rank: int


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that the server holds while no request runs."""

    running: int
    pages: int
    connections: int
    files: int
    ranks: int
    # Maxima over ranks: open files, and mapped pieces of shared memory, unnamed files included.
    rank_files: int = 0
    rank_shared: int = 0


async def soak(server: Server, args: argparse.Namespace) -> int:
    """Run load for `args.soak` minutes, print the table and return the exit code."""
    rng = random.Random(args.seed)
    asks = make_asks(args.seed, args.asks, max_tokens=args.max_tokens)
    client = Client(server.url, seconds=args.patience + 60.0)
    known = await references(client, asks, streams=args.streams)
    watch = Watch(server)
    before = await held(server, watch)
    load = Load(client, asks, streams=args.streams, seed=args.seed, max_tokens=args.max_tokens)
    rough = Rough(server.url, asks, clients=args.streams, seed=args.seed + 1)
    drill = Drill(server, client, load=load, watch=watch, known=known, rng=rng, patience=args.patience)
    samples: list[Sample] = []
    sampler = asyncio.create_task(sample(server, samples))
    print(COLUMNS, flush=True)
    outcomes = await kills(drill, rng, seconds=60 * args.soak, every=args.kill_every)
    await rough.close()
    await load.close(DRAIN_SECONDS)
    await client.http.aclose()
    sampler.cancel()
    after = await settled(server, watch)
    beyond = drill.beyond()
    await watch.close()
    code = await asyncio.to_thread(server.stop)
    rows = table(before, after, samples=samples, workers=args.workers)
    rows += [
        (
            "kills survived",
            f"{sum(o.survived for o in outcomes)} of {len(outcomes)}",
            all(o.survived for o in outcomes),
        ),
        ("wrong answers without a fault", str(beyond), not beyond),
        ("exit code on SIGTERM", str(code), code == 0),
        ("files left in /dev/shm", str(len(await left_shared(server))), not await left_shared(server)),
    ]
    print(
        f"{len(load.history)} requests; rough clients: " + ", ".join(f"{k} {v}" for k, v in sorted(rough.seen.items()))
    )
    for name, text, good in rows:
        print(f"{name:<34} {text:<40} {'ok' if good else 'WRONG'}")
    if args.json is not None:
        figures = {"rows": rows, "rough": dict(rough.seen), "samples": [asdict(s) for s in samples]}
        args.json.write_text(json.dumps({**figures, "outcomes": [asdict(o) for o in outcomes]}, indent=1))
    return 0 if all(good for _, _, good in rows) else 1


async def kills(drill: Drill, rng: random.Random, *, seconds: float, every: float) -> list[Outcome]:
    """Kill once every `every` seconds until the time is over or the fleet does not recover."""
    outcomes: list[Outcome] = []
    end, due = time.monotonic() + seconds, time.monotonic() + every
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        outcomes.append(
            await drill.inflict(len(outcomes) + 1, Fault("kill", rng.choice(("prefill", "decode", "exchange"))))
        )
        print(line(outcomes[-1]), flush=True)
        if outcomes[-1].ready_seconds is None:
            return outcomes
        due = max(due + every, time.monotonic())
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    return outcomes


async def sample(server: Server, samples: list[Sample]) -> None:
    """Sample memory until cancelled."""
    begun = time.monotonic()
    while True:
        with contextlib.suppress(psutil.Error):  # a rank was just killed
            ranks = [process.memory_info().rss for process in server.rank_processes()]
            router = server.router_process().memory_info().rss
            samples.append(Sample(time.monotonic() - begun, router, max(ranks, default=0)))
        await asyncio.sleep(SAMPLE_SECONDS)


async def held(server: Server, watch: Watch) -> Held:
    """Return what the server holds now. `pages` excludes pages that only the prefix cache holds."""
    fleet: dict[str, Any] = await read_json(watch.http, "/v1/fleet") or {"inflight": 0, "workers": []}
    snapshots = [worker["snapshot"] for worker in fleet["workers"] if "snapshot" in worker]
    with contextlib.suppress(psutil.Error):
        router = server.router_process()
        established = [c for c in router.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        ranks = server.rank_processes()
        return Held(
            running=fleet["inflight"] + sum(s["num_running"] + s["num_waiting"] for s in snapshots),
            pages=sum(s["kv_pages_total"] - s["kv_pages_free"] for s in snapshots),
            connections=sum(c.laddr.port == port_of(server) for c in established),
            files=router.num_fds(),
            ranks=len(ranks),
            rank_files=max((rank.num_fds() for rank in ranks), default=0),
            rank_shared=max((shared_mappings(rank) for rank in ranks), default=0),
        )
    return Held(running=-1, pages=-1, connections=-1, files=-1, ranks=0)


def shared_mappings(process: psutil.Process) -> int:
    """Count mapped pieces of this program's shared memory. Raises psutil.Error if the process is gone."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    return len(SHARED.findall(maps))


async def settled(server: Server, watch: Watch) -> Held:
    """Return what is held when nothing runs any more, or after DRAIN_SECONDS."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while True:
        now = await held(server, watch)
        # The watch has its own connection.
        if (not now.running and not now.pages and now.connections <= 1) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(1.0)


def table(before: Held, after: Held, *, samples: list[Sample], workers: int) -> list[tuple[str, str, bool]]:
    """Return rows of (name, figures, whether they are right)."""
    files = after.files - after.connections - (before.files - before.connections)
    flat_files = after.rank_files <= before.rank_files + FILES_SLACK
    flat_shared = after.rank_shared <= before.rank_shared
    rows = [
        ("requests still running", str(after.running), after.running == 0),
        ("KV pages not released", str(after.pages), after.pages == 0),
        ("client connections still open", str(after.connections - 1), after.connections == 1),
        ("router's other open files", f"{files:+d}", files <= FILES_SLACK),
        ("open files of a rank, at most", f"{before.rank_files} to {after.rank_files}", flat_files),
        ("shared memory mapped by a rank", f"{before.rank_shared} to {after.rank_shared} pieces", flat_shared),
        # With --standby one process waits in addition to the ranks.
        ("rank processes", f"{after.ranks} of {before.ranks}", after.ranks == before.ranks >= workers),
    ]
    for name in ("router", "rank"):
        first, last = early_and_late([getattr(s, name) for s in samples])
        flat = last <= RSS_GROWTH * first + RSS_SLACK
        rows.append((f"RSS of the {name}, MiB, early / late", f"{first / 2**20:.0f} / {last / 2**20:.0f}", flat))
    return rows


def early_and_late(values: list[int]) -> tuple[float, float]:
    """Return the medians of the second and the last fifth. The first fifth is warm-up."""
    fifth = max(1, len(values) // 5)
    early = values[fifth : 2 * fifth] or values[:1] or [0]
    return statistics.median(early), statistics.median(values[-fifth:] or [0])


async def left_shared(server: Server) -> set[Any]:
    """Return remaining files in /dev/shm. Other fleets have files there only while their ranks connect."""
    if first := server.shared_left():
        await asyncio.sleep(5.0)
        return first & server.shared_left()
    return first


def port_of(server: Server) -> int:
    """Return the port of the server's API."""
    return int(server.url.rpartition(":")[2])
