"""Compare routers: `python bench/peers.py [--streams 64] [--rounds 3] [--of moeyard vllm-router litellm]`.

Every engine gives each stream a token every --step milliseconds. Our router is in front of a scripted engine that sends
ids over ZMQ. vllm-router and litellm's proxy each have a virtual environment below --venvs, made on the first run. They
are in front of an engine with OpenAI's API, of one kind or both:

- `--events made`: the same scripted engine, and an API server process that detokenizes its ids and makes each event
  when the ids arrive, as in vLLM V1. The work between ids and the client's bytes then equals ours.
- `--events ready`: an engine with prepared events. The row shows the cost of the router itself.

One client with bare sockets reads the streams of each router in turn, --rounds times (litellm last). It also reads the
HTTP engines without a router, which shows the cost of engine and client. The output has medians over rounds of tokens/s
that arrived, and of the delay from a token's step to its arrival. It also has the CPU time per token of the router (all
its processes) and of its API server, and each round's p99. Every token has four characters, so that one event with two
tokens counts as two.
"""

import argparse
import importlib.metadata
import itertools
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import uvloop
from peering.engines import FIRST_LIMIT, Clock, run_made_events, run_ready_events, run_timed_engine
from peering.programs import START_SECONDS, Litellm, VllmRouter, end
from peering.streams import Seen, Target, read_streams
from router import run_routers

from moeyard.listen import bind

OURS, PROXY, LITELLM = "moeyard", "vllm-router", "litellm"


class Processes:
    """The processes of this program: Python processes, which report when they are ready, and the peers'."""

    def __init__(self) -> None:
        self._spawn, self._mine = multiprocessing.get_context("spawn"), []
        self.peers: list[subprocess.Popen[bytes]] = []
        self.passing: list[subprocess.Popen[bytes]] = []  # peers that restart for each round

    def start(self, target: Callable[..., None], *more: Any) -> tuple[Any, psutil.Process]:
        """Run `target` with a pipe as its last argument. Return its message and the process."""
        mine, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=target, args=(*more, theirs))
        process.start()
        self._mine.append(process)
        if not mine.poll(START_SECONDS):
            raise SystemExit(f"{target.__name__} did not start")
        return mine.recv(), psutil.Process(process.pid)

    def end(self) -> None:
        """End all processes."""
        end(self.peers + self.passing)
        for process in reversed(self._mine):
            process.terminate()
            process.join()


def make_targets(args: argparse.Namespace, scratch: Path, processes: Processes) -> list[Target]:
    """Return all routers to measure, in order, with the engines behind them."""
    step = args.step / 1e3
    endpoint, _ = processes.start(run_timed_engine, step, scratch / "ids")
    ids = Clock(scratch / "ids")
    engines: list[tuple[str, str, Clock, psutil.Process | None]] = []
    if "ready" in args.events:
        url, _ = processes.start(run_ready_events, step, scratch / "ready")
        engines.append(("ready events", url, Clock(scratch / "ready"), None))
    if "made" in args.events:
        url, process = processes.start(run_made_events, endpoint)
        engines.append(("made events", url, ids, process))
    targets = [
        Target(f"no router, {kind}", int(url.rpartition(":")[2]), clock, behind=behind)
        for kind, url, clock, behind in engines
    ]
    for count in args.routers if OURS in args.of else ():
        sock = bind("127.0.0.1", 0, shared=count > 1)
        _, process = processes.start(run_routers, [endpoint], sock, count)
        name = f"moeyard {importlib.metadata.version('moeyard')}" + (f", {count} processes" if count > 1 else "")
        targets.append(Target(name, sock.getsockname()[1], ids, process))
    for kind, url, clock, behind in engines if PROXY in args.of else ():
        proxy = VllmRouter(args.venvs, url, scratch)
        processes.peers.append(proxy.start())
        process = psutil.Process(processes.peers[-1].pid)
        targets.append(Target(f"{proxy.name}, {kind}", proxy.port, clock, process, behind))
    for kind, url, clock, behind in engines if LITELLM in args.of else ():
        peer = Litellm(args.venvs, url, scratch)

        def renew(peer: Litellm = peer) -> int:
            end(processes.passing)
            processes.passing.append(peer.start())
            return processes.passing[-1].pid

        targets.append(Target(f"{peer.name}, {kind}", peer.port, clock, behind=behind, renew=renew))
    return targets


def measure(targets: list[Target], count: int, args: argparse.Namespace, numbers: "itertools.count[int]") -> None:
    """Run the rounds of one number of streams, the targets in turn, and print the table."""
    seen: dict[str, list[Seen]] = {target.name: [] for target in targets}
    loads = []
    # A litellm that fell behind works on its backlog for minutes after its clients have left. It is restarted for each
    # round, and no other router is measured meanwhile.
    turns = [t for _ in range(args.rounds) for t in targets if t.renew is None]
    for target in turns + [t for t in targets if t.renew is not None] * args.rounds:
        if target.renew is not None:
            target.process = psutil.Process(target.renew())
        seen[target.name].append(uvloop.run(read_streams(target, count, args.seconds, numbers)))
        loads.append(os.getloadavg()[0])
        print(f"  {target.name}: {seen[target.name][-1]}", file=sys.stderr, flush=True)
        time.sleep(0.5)
    print(
        f"{count} streams, a token every {args.step:g} ms: {count / args.step * 1e3:.0f} tokens/s requested; "
        f"medians of {args.rounds}, load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"
    )
    print(f"{'':34}{'streams':>8}{'tokens/s':>9}{'late ms':>9}{'p99 ms':>9}{'router us':>10}{'API us':>8}  each p99")
    for target in targets:
        rounds = seen[target.name]
        begun, rate, median, p99, cpu, behind = (
            statistics.median(getattr(s, k) for s in rounds) for k in Seen.__slots__
        )
        print(
            f"{target.name:34}{begun:8.0f}{rate:9.0f}{median:9.2f}{p99:9.2f}"
            f"{f'{cpu:.1f}' if target.process else '':>10}{f'{behind:.1f}' if target.behind else '':>8}  "
            + " ".join(f"{s.p99:.2f}" for s in rounds),
            flush=True,
        )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=(OURS, PROXY, LITELLM), default=(OURS, PROXY, LITELLM))
    parser.add_argument("--events", nargs="+", choices=("ready", "made"), default=("ready", "made"))
    parser.add_argument("--routers", type=int, nargs="+", default=[1], help="moeyard router processes on one port")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--step", type=float, default=15.0, metavar="MS")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, default=Path("/tmp/moeyard-clients"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # child processes end with this one
    processes, numbers = Processes(), itertools.count(FIRST_LIMIT + 1)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            targets = make_targets(args, Path(scratch), processes)
            for count in args.streams:
                measure(targets, count, args, numbers)
        finally:
            processes.end()


if __name__ == "__main__":
    main()
