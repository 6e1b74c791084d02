"""A demo fleet and a Prometheus that scrapes it, as processes, for tests of the dashboards and for their pictures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import yaml
from tests.deploy.test_serve import free_port, get
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
# Fewer slots than a rank's 48 experts (16 in each of 3 layers) cause misses and evictions.
EXPERT_SLOTS = 16


class Running:
    """A child process with its output in a file; SIGINT stops it, like Ctrl-C."""

    def __init__(self, command: list[str], log: Path, url: str) -> None:
        folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
        self.log = log
        self.url = url
        with log.open("wb") as output:
            # A separate session makes a group that can be killed whole if it does not stop.
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def wait_for(self, url: str) -> None:
        """Wait until `url` answers 200, or the process ends."""
        deadline = time.monotonic() + HANG_SECONDS
        last = "no answer yet"
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"exit code {self.process.returncode}:\n{self.tail()}"
            try:
                response = get(url)
                if response.status_code == 200:
                    return
                last = f"{response.status_code} {response.text}"
            except httpx.TransportError as error:
                last = str(error)
            time.sleep(0.05)
        raise AssertionError(f"{url} is not ready ({last}):\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self) -> int:
        """Stop the process and return its exit code; the rest of its group is killed."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(HANG_SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def serve_demo(folder: Path, *flags: str) -> Iterator[Running]:
    """Run `moeyard serve` of the demo checkpoint with two ranks, speculation and few expert slots."""
    port = free_port()
    command = [sys.executable, "-m", "moeyard", "serve", str(ROOT / "deploy" / "demo")]
    command += ["--workers", "2", "--port", str(port), "--expert-slots", str(EXPERT_SLOTS), "--speculate", "mtp"]
    command += ["--record-routing", str(folder / "routing"), *flags]
    running = Running(command, folder / "log", f"http://127.0.0.1:{port}")
    try:
        running.wait_for(f"{running.url}/readyz")
        yield running
    finally:
        code = running.stop()
    assert code == 0, f"exit code {code} after Ctrl-C:\n{running.tail()}"


@contextmanager
def scrape(fleet: str, program: str, folder: Path, *, interval: str | None = None) -> Iterator[Running]:
    """Run Prometheus with deploy/prometheus and this fleet's addresses. `interval` replaces all intervals."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["rule_files"] = [str(ROOT / "deploy/prometheus" / name) for name in config["rule_files"]]
    if interval is not None:
        config["global"] = dict.fromkeys(config["global"], interval)
    port = free_port()
    text = yaml.safe_dump(config).replace("router:8000", fleet.removeprefix("http://"))
    text = text.replace("localhost:9090", f"127.0.0.1:{port}")
    if interval is not None:
        text = text.replace("refresh_interval: 15s", f"refresh_interval: {interval}")
    (folder / "prometheus.yml").write_text(text)
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    running = Running(command, folder / "log", f"http://127.0.0.1:{port}")
    try:
        running.wait_for(f"{running.url}/-/ready")
        yield running
    finally:
        running.stop()


def kill_rank(served: Running) -> None:
    """Send SIGKILL to one of the two ranks."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    ranks = [process for process in children if "RankActor" in " ".join(process.cmdline())]
    assert len(ranks) == 2
    ranks[1].kill()
