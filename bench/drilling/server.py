"""`moeyard serve` as a black box: its processes, their ranks, and what it leaves behind."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
MARKER = "MOEYARD_DRILL_MARKER"
READY = re.compile(r"^ready: (?P<url>\S+)/v1 ", re.M)


class ServerError(RuntimeError):
    """The server did not start, or has ended."""


class Server:
    """A running `moeyard serve` with every process that it has started, orphans included."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.arguments = [sys.executable, "-m", "moeyard", "serve", *arguments]
        self.out, self.err = folder / "serve.out", folder / "serve.err"
        self._value = secrets.token_hex(8)
        self.shared_before = shared_files()
        self.url = ""
        self.begin()

    def begin(self) -> None:
        """Start the server, or start it again."""
        self.begun = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": source_path(), MARKER: self._value}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float) -> float:
        """Wait for the ready line and return the seconds. Raises ServerError with the server's output."""
        while (match := READY.search(self.out.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() - self.begun > seconds:
                raise ServerError(f"the server is not ready after {seconds:g} s:\n{self.err.read_text()[-2000:]}")
            time.sleep(0.05)
        self.url = match["url"]
        return time.monotonic() - self.begun

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of this server."""
        mark = f"{MARKER}={self._value}".encode()
        found = []
        for process in psutil.process_iter():
            # Some have ended, and others belong to other users.
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank_processes(self) -> list[psutil.Process]:
        """Return the ranks' processes, starting ones included."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "".join(process.cmdline()).startswith("ray::RankActor"):
                    found.append(process)
        return found

    def router_process(self) -> psutil.Process:
        """Return the router's process, a child of the launcher. Raises psutil.NoSuchProcess if there is none."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "multiprocessing.spawn" in " ".join(process.cmdline()):
                    return process
        raise psutil.NoSuchProcess(self.process.pid, msg="no router runs")

    def ranks(self, fleet: dict[str, Any]) -> dict[int, psutil.Process]:
        """Return the process of each rank of /v1/fleet (`fleet`): the one that listens at the rank's endpoint."""
        there = [worker for worker in fleet["workers"] if worker["endpoint"]]
        ports = {int(worker["endpoint"].rpartition(":")[2]): worker["rank"] for worker in there}
        found = {}
        for process in self.rank_processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports:
                        found[ports[connection.laddr.port]] = process
        return found

    async def command(self, *words: str) -> tuple[int, str]:
        """Run a `moeyard` command against this server's control address. Return its exit code and last line."""
        port = self.url.rpartition(":")[2]
        environment = {**os.environ, "PYTHONPATH": source_path()}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moeyard", *words, "--port", port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode().strip().rpartition("\n")[2]

    def stop(self, seconds: float = 30.0) -> int | None:
        """Send SIGTERM and return the exit code, None if the server had to be killed. No process remains."""
        code: int | None = None
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
        self.kill()
        return code

    def kill(self) -> None:
        """Kill all remaining processes with SIGKILL."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()
        self.process.wait()

    def shared_left(self) -> set[Path]:
        """Return new files in shared memory since the start, other servers' included."""
        return shared_files() - self.shared_before


def shared_files() -> set[Path]:
    """Return the files of this machine's fleets in shared memory."""
    return set(Path("/dev/shm").glob("moeyard-*"))


def source_path() -> str:
    """Return a PYTHONPATH with this checkout before the caller's."""
    own = [str(ROOT / name) for name in ("worker", "router", "kernels", "deploy")]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))


def serve_flags() -> frozenset[str]:
    """Return the flags of this checkout's `moeyard serve`."""
    environment = {**os.environ, "PYTHONPATH": source_path()}
    command = [sys.executable, "-m", "moeyard", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return frozenset(re.findall(r"--[a-z][a-z-]+", text))


async def read_json(http: httpx.AsyncClient, path: str) -> Any:
    """Return a JSON page of the server, or None if it cannot be read."""
    try:
        response = await http.get(path, timeout=5.0)
        return response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
