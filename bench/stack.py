"""Inject faults into the Compose stack, without Docker: does it heal, and do its health checks notice?

    sudo python bench/stack.py [--workers 2] [--only NAME ...] [--patience 120] [--json FILE]

Head, workers and router run with the commands, environment and restart policy of docker-compose.yml, each in its own
namespaces (drilling/hosts.py). First the router asks for one rank more than there are workers. It must wait for
that worker and not restart repeatedly. Then single processes are killed, and every container. After each fault the
router must become ready again and give the same answer, without operator action.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from drilling.containers import ENTRYPOINT, MODEL, Container, services
from drilling.hosts import Network, missing

# (container, process to end, signal). The stack must heal after each.
FAULTS = (
    ("worker-1", "RankActor", "kill"),
    ("worker-1", "RankActor", "suspend"),
    ("worker-1", "raylet/raylet", "kill"),
    ("worker-2", "container", "kill"),
    ("router", "moeyard serve", "kill"),
    ("router", "raylet/raylet", "kill"),
    ("router", "container", "kill"),
    ("ray-head", "gcs_server", "kill"),
    ("ray-head", "container", "kill"),
)
BODY = {"model": "demo", "prompt": [500, 600, 700], "max_tokens": 24, "temperature": 0, "logprobs": 2}


@dataclass(slots=True, kw_only=True)
class Healing:
    """The result of one fault. `seconds` is None if it did not heal; `seen` lists the failed health checks."""

    fault: str
    seconds: float | None = None
    same: bool = False
    restarts: dict[str, int] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    @property
    def healed(self) -> bool:
        """Whether it is ready again, with the same answer."""
        return self.seconds is not None and self.same


class Stack:
    """The containers of one fleet."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        workers = len(network.addresses) - 2
        self._services = services({"RAY_AUTH_TOKEN": "drill" * 8, "MOEYARD_WORKERS": str(workers)})
        self.url = f"http://{network.addresses['router']}:8000"
        self.containers: dict[str, Container] = {}

    def start(self, name: str) -> Container:
        """Start one more container."""
        service = self._service(name)
        assert service["restart"] == "unless-stopped"
        command = [str(ENTRYPOINT), *(str(part).replace("/model", str(MODEL)) for part in service["command"])]
        self.containers[name] = Container(
            self._network, name, command, environment=service["environment"], folder=self._folder
        )
        return self.containers[name]

    def healthy(self, name: str) -> tuple[bool, str]:
        """Run a container's health check. Return its result and output."""
        check = self._service(name)["healthcheck"]["test"]
        return self.containers[name].run([str(ENTRYPOINT), *check[2:]], seconds=15.0)

    def _service(self, name: str) -> dict[str, Any]:
        return self._services[name.rpartition("-")[0] if name.startswith("worker") else name]

    def ready(self) -> bool:
        """Return whether the router accepts requests."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=3).status_code == 200
        except httpx.HTTPError:
            return False

    def answer(self) -> object:
        """Return the answer to BODY, or the error."""
        try:
            return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60).json().get("choices")
        except (httpx.HTTPError, ValueError) as error:
            return str(error)


def wait(what: str, condition: Callable[[], bool], seconds: float) -> float:
    """Wait for a condition and return the seconds. Raises TimeoutError."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.25)
    return time.monotonic() - begun


def bring_up(stack: Stack, workers: int, patience: float) -> int:
    """Start in Compose's order, with the last worker late. Return how often the router had started by then."""
    head = stack.start("ray-head")
    print(f"ray-head healthy after {wait('ray-head', lambda: stack.healthy(head.name)[0], patience):.1f} s", flush=True)
    for i in range(workers - 1):
        worker = stack.start(f"worker-{i + 1}")
        wait(worker.name, lambda name=worker.name: stack.healthy(name)[0], patience)  # type: ignore[misc]
    router = stack.start("router")
    wait("the router waits", lambda: "waiting for the cluster" in router.log.read_text(), patience)
    time.sleep(10.0)  # longer than a loop of restarts would take
    starts = len(router.starts)
    print(f"with one worker missing: router started {starts} times, {stack.healthy('router')[1][:100]}", flush=True)
    stack.start(f"worker-{workers}")
    print(f"ready {wait('ready', stack.ready, patience):.1f} s after the last worker came", flush=True)
    return starts


def find(container: Container, what: str) -> psutil.Process | None:
    """Return the innermost process with `what` in its command line. "container" is the first process."""
    if what == "container":
        return next(iter(container.processes()), None)
    return next(reversed(container.find(what)), None)


def inflict(stack: Stack, name: str, what: str, how: str, *, expected: object, patience: float) -> Healing:
    """Inject one fault and follow its effects."""
    healing = Healing(fault=f"{how} {what} of {name}" if what != "container" else f"{how} container {name}")
    starts = {n: len(c.starts) for n, c in stack.containers.items()}
    # Others may serve again before the victim of the previous fault is back.
    until = time.monotonic() + patience
    while (victim := find(stack.containers[name], what)) is None:
        if time.monotonic() > until:
            healing.seen.append("no such process")
            return healing
        time.sleep(0.2)
    begun = time.monotonic()
    getattr(victim, how)()
    ill, quiet = False, time.monotonic()
    while time.monotonic() - begun < patience:
        ready = stack.ready()
        if ill and ready:
            healing.seconds = time.monotonic() - begun
            break
        ill = ill or not ready
        if not ill and time.monotonic() - quiet > 90.0:
            healing.seconds = 0.0  # the router never missed it
            break
        for each in {name, "router"} - {seen.split(":")[0] for seen in healing.seen}:
            well, words = stack.healthy(each)
            if not well:
                healing.seen.append(f"{each}: {words[:90]}")
        time.sleep(0.1)
    healing.same = healing.seconds is not None and stack.answer() == expected
    healing.restarts = {n: k for n, c in stack.containers.items() if (k := len(c.starts) - starts[n])}
    return healing


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[], help="only faults with one of these words")
    parser.add_argument("--patience", type=float, default=120.0, metavar="S")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the containers' logs there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if (lacking := missing()) is not None:
        print(f"stack: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = ["ray-head", *(f"worker-{i + 1}" for i in range(args.workers)), "router"]
    with Network(names) as network, tempfile.TemporaryDirectory(prefix="moeyard-stack-") as name:
        network.enter()
        folder = args.logs or Path(name)
        folder.mkdir(exist_ok=True)
        stack, found = Stack(network, folder), list[Healing]()
        try:
            starts = bring_up(stack, args.workers, args.patience)
            expected = stack.answer()
            for container, what, how in FAULTS:
                if args.only and not any(word in f"{how} {what} of {container}" for word in args.only):
                    continue
                found.append(inflict(stack, container, what, how, expected=expected, patience=args.patience))
                h = found[-1]
                duration = "never" if h.seconds is None else f"{h.seconds:6.1f} s"
                print(f"{h.fault:<40} {duration:>8} {'same' if h.same else 'NOT':<5} {h.restarts} {h.seen}", flush=True)
                if not h.healed:
                    break
        except (TimeoutError, subprocess.SubprocessError) as error:
            print(f"stack: {error}", file=sys.stderr)
            return 1
        if args.json is not None:
            args.json.write_text(json.dumps({"starts": starts, "faults": [asdict(h) for h in found]}, indent=1))
    return 0 if starts == 1 and all(h.healed for h in found) else 1


if __name__ == "__main__":
    sys.exit(main())
