"""Cut and heal the network between two hosts, as root: `sudo python bench/netcut.py [--rounds 3] [--deadline 2]`.

Each host is a network namespace, and a veth pair connects them. While a side is down, no packet passes, and no
connection is notified. Each host runs one rank of the bundled model, without Ray (tests/fleet.py), over TCP and CURVE
as between real hosts. This process is on the first host and acts as router and launcher.

In every round requests run on both ranks. The link goes down during their decoding and stays down for three deadlines.
The output shows after how many seconds each side named the other, and whether it then stood still. When the link is up
again, the rank on the other side is fenced and replaced by a new process, and the sequences continue. Every token and
log-probability must equal those of an undisturbed run. The exit code is 1 if one did not, or a side was late.
"""

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeyard_worker.config.engine_config import EngineConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fleet import Answer, Fleet, RankProcess, serve, start_fleet

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo"
CLONE_NEWNET = 0x40000000  # sched.h
NAMES = tuple(f"moeyard-{os.getpid()}-{side}" for side in "ab")
WIRES = tuple(f"my{os.getpid()}{side}" for side in "ab")
HOSTS = ("10.213.7.1", "10.213.7.2")
PROMPTS = 6
TOKENS = 160
# A side hears nothing for a deadline, notices at the next heartbeat, and agrees with the peers that it can reach.
SLACK_SECONDS = 2.5


def ip(*arguments: str, check: bool = True) -> None:
    """Run the `ip` command."""
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Create both namespaces and the veth pair between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", WIRES[0], "netns", NAMES[0], "type", "veth", "peer", "name", WIRES[1], "netns", NAMES[1])
        for name, wire, host in zip(NAMES, WIRES, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", wire)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", wire, "up")
        yield
    finally:
        for name in NAMES:
            ip("netns", "del", name, check=False)


def enter(name: str) -> None:
    """Enter a host's namespace with this thread, and with the threads and processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def serve_on(connection: Connection, name: str) -> None:
    """Run a rank's process on a host."""
    enter(name)
    serve(connection)


def make_rank(rank: int) -> RankProcess:
    """Start a rank on its host."""
    return RankProcess(serve_on, NAMES[rank])


class Processes:
    """Replaces ProcessPool."""

    def take(self, count: int) -> list[RankProcess]:
        """Return new processes."""
        return [make_rank(rank) for rank in range(count)]

    def keep(self, ranks: Sequence[RankProcess]) -> None:
        """End the processes with their fleet."""
        for rank in ranks:
            rank.hang_up()
        for rank in ranks:
            rank.join()


def ask(fleet: Fleet, name: str) -> list[str]:
    """Submit requests on both ranks and return their names."""
    names = []
    for number in range(PROMPTS):
        names.append(f"{name}-{number}")
        prompt = [300 + (7 * number + i * i) % 2000 for i in range(20 + 11 * number)]
        sampling: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, "seed": number}
        fleet.client.submit(number % 2, names[-1], prompt, temperature=float(number % 3 > 0), **sampling)
    return names


def comparable(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    """Return everything that must be equal."""
    return [(tuple(each.token_ids), tuple(each.logprobs), each.end.finish_reason) for each in answers if each.end]


def cut(fleet: Fleet, names: Sequence[str], deadline: float) -> tuple[list[float], list[dict[str, Any]], bool]:
    """Take the link down for a while. Return (seconds until each side named the other, reports, whether both stood)."""
    answers = [fleet.client.answers[name] for name in names]
    fleet.client.wait_for(lambda: all(len(answer.token_ids) > TOKENS // 8 for answer in answers))
    for rank in fleet.ranks:
        rank.send("wait")
    began = time.monotonic()
    ip("-n", NAMES[0], "link", "set", WIRES[0], "down")
    losses, seconds = [], []
    for rank in fleet.ranks:
        losses.append(rank.result())
        seconds.append(time.monotonic() - began)
    # Read everything that was in flight. Nothing must come after that.
    while fleet.client.pump(0.2):
        pass
    before = [len(answer.token_ids) for answer in answers]
    while time.monotonic() - began < 3 * deadline:
        fleet.client.pump(0.2)
    stood = before == [len(answer.token_ids) for answer in answers] and all(each.end is None for each in answers)
    ip("-n", NAMES[0], "link", "set", WIRES[0], "up")
    return seconds, losses, stood


def heal(fleet: Fleet, losses: list[dict[str, Any]], names: Sequence[str]) -> list[Answer]:
    """Fence the rank on the other side, replace it, and let its sequences continue here."""
    process = fleet.ranks[1].process
    process.kill()
    process.join()
    fleet.recover([1], losses=losses[:1])
    fleet.client.carry_over([1], [0])
    return fleet.client.wait(*names)


def drill(args: argparse.Namespace) -> bool:
    """Run all rounds and return whether each was survived."""
    config = EngineConfig(model_path=str(MODEL), num_workers=2, exchange="zmq-tcp", step_deadline=args.deadline)
    survived = True
    with start_fleet(Processes(), config, hosts=HOSTS, make=make_rank) as fleet:
        expected = comparable(fleet.client.wait(*ask(fleet, "reference")))
        print("round  named by rank 0, 1 after s  stood still  named          whole after s  different")
        for number in range(1, args.rounds + 1):
            names = ask(fleet, f"round-{number}")
            seconds, losses, stood = cut(fleet, names, args.deadline)
            healed = time.monotonic()
            answers = comparable(heal(fleet, losses, names))
            different = sum(a != b for a, b in zip(answers, expected, strict=True))
            named = [tuple(loss["ranks"]) for loss in losses]
            still = "yes" if stood else "NO"
            print(
                f"{number:5}  {seconds[0]:15.2f}, {seconds[1]:.2f}        {still:<11}  {named!s:<13}  "
                f"{time.monotonic() - healed:13.1f}  {different:9}",
                flush=True,
            )
            survived &= (
                stood and named == [(1,), (0,)] and not different and max(seconds) < args.deadline + SLACK_SECONDS
            )
    return survived


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=2.0, help="the step deadline, in seconds")
    args = parser.parse_args()
    with hosts():
        enter(NAMES[0])
        return 0 if drill(args) else 1


if __name__ == "__main__":
    sys.exit(main())
