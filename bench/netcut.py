"""Cut and heal the network between two hosts, as root: `sudo python bench/netcut.py [--rounds 3] [--deadline 2]`.

Each host is a network namespace (drilling/hosts.py). While the network is cut, no packet passes, and no connection is
notified. Each host runs one rank of the bundled model, without Ray (tests/fleet.py), over TCP and CURVE as between real
hosts. This process is on the first host and acts as router and launcher.

In every round requests run on both ranks. The network is cut during their decoding, for three deadlines. The output
shows after how many seconds each side named the other, and whether it then stood still. When the network is whole
again, the rank on the other side is fenced and replaced by a new process, and the sequences continue. Every token and
log-probability must equal those of an undisturbed run. The exit code is 1 if one did not, or a side was late.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drilling.hosts import Network, enter, missing

from moeyard_worker.config.engine_config import EngineConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fleet import Answer, Fleet, RankProcess, serve, start_fleet

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo"
HOSTS = ("first", "second")
PROMPTS = 6
TOKENS = 160
# A side hears nothing for a deadline, notices at the next heartbeat, and agrees with the peers that it can reach.
SLACK_SECONDS = 2.5


def serve_on(connection: Connection, namespace: str) -> None:
    """Run a rank's process on a host."""
    enter(namespace)
    serve(connection)


class Processes:
    """Replaces ProcessPool."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def make(self, rank: int) -> RankProcess:
        """Start a rank on its host."""
        return RankProcess(serve_on, self._network.namespace(HOSTS[rank]))

    def take(self, count: int) -> list[RankProcess]:
        """Return new processes."""
        return [self.make(rank) for rank in range(count)]

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


def cut(
    fleet: Fleet, network: Network, names: Sequence[str], deadline: float
) -> tuple[list[float], list[dict[str, Any]], bool]:
    """Cut the network for a while. Return (seconds until each side named the other, reports, whether both stood)."""
    answers = [fleet.client.answers[name] for name in names]
    fleet.client.wait_for(lambda: all(len(answer.token_ids) > TOKENS // 8 for answer in answers))
    for rank in fleet.ranks:
        rank.send("wait")
    began = time.monotonic()
    network.cut(HOSTS[1])
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
    network.heal(HOSTS[1])
    return seconds, losses, stood


def heal(fleet: Fleet, losses: list[dict[str, Any]], names: Sequence[str]) -> list[Answer]:
    """Fence the rank on the other side, replace it, and let its sequences continue here."""
    process = fleet.ranks[1].process
    process.kill()
    process.join()
    fleet.recover([1], losses=losses[:1])
    fleet.client.carry_over([1], [0])
    return fleet.client.wait(*names)


def drill(network: Network, args: argparse.Namespace) -> bool:
    """Run all rounds and return whether each was survived."""
    config = EngineConfig(model_path=str(MODEL), num_workers=2, exchange="zmq-tcp", step_deadline=args.deadline)
    survived = True
    processes, hosts = Processes(network), tuple(network.addresses.values())
    with start_fleet(processes, config, hosts=hosts, make=processes.make) as fleet:
        expected = comparable(fleet.client.wait(*ask(fleet, "reference")))
        print("round  named by rank 0, 1 after s  stood still  named          whole after s  different")
        for number in range(1, args.rounds + 1):
            names = ask(fleet, f"round-{number}")
            seconds, losses, stood = cut(fleet, network, names, args.deadline)
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
    if (lacking := missing()) is not None:
        print(f"netcut: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Network(HOSTS) as network:
        network.enter(HOSTS[0])
        return 0 if drill(network, args) else 1


if __name__ == "__main__":
    sys.exit(main())
