"""`moeyard serve` as a black box: its processes, which of them is which rank, and what it leaves behind."""

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
        """Start it, for the first time or anew."""
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
        """Seconds from the start to the ready line; raises ServerError with what the server said."""
        while (match := READY.search(self.out.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() - self.begun > seconds:
                raise ServerError(f"the server is not ready after {seconds:g} s:\n{self.err.read_text()[-2000:]}")
            time.sleep(0.05)
        self.url = match["url"]
        return time.monotonic() - self.begun

    def processes(self) -> list[psutil.Process]:
        """All living processes of this server."""
        mark = f"{MARKER}={self._value}".encode()
        found = []
        for process in psutil.process_iter():
            # Some have ended meanwhile; others are not ours to read.
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank_processes(self) -> list[psutil.Process]:
        """The ranks' processes, those that are being started included."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if "".join(process.cmdline()).startswith("ray::RankActor"):
                    found.append(process)
        return found

    def router_process(self) -> psutil.Process:
        """The router's process, a child of the launcher; raises psutil.NoSuchProcess while there is none."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if "multiprocessing.spawn" in " ".join(process.cmdline()):
                    return process
        raise psutil.NoSuchProcess(self.process.pid, msg="no router runs")

    def ranks(self, fleet: dict[str, Any]) -> dict[int, psutil.Process]:
        """The process of each rank that /v1/fleet (`fleet`) tells of: it listens at the rank's endpoint."""
        there = [worker for worker in fleet["workers"] if worker["endpoint"]]
        ports = {int(worker["endpoint"].rpartition(":")[2]): worker["rank"] for worker in there}
        found = {}
        for process in self.rank_processes():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports:
                        found[ports[connection.laddr.port]] = process
        return found

    async def command(self, *words: str) -> tuple[int, str]:
        """`moeyard` with these words, said to this server's control door: its exit code, and the last it said."""
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
        """SIGTERM; its exit code, None if it had to be killed. Nothing of it runs afterwards."""
        code: int | None = None
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
        self.kill()
        return code

    def kill(self) -> None:
        """SIGKILL for all that is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                process.kill()
        self.process.wait()

    def shared_left(self) -> set[Path]:
        """Files in shared memory that came since it was started, other servers' included."""
        return shared_files() - self.shared_before


def shared_files() -> set[Path]:
    """What fleets of this machine have in shared memory."""
    return set(Path("/dev/shm").glob("moeyard-*"))


def source_path() -> str:
    """PYTHONPATH of this checkout, ahead of the caller's."""
    own = [str(ROOT / name) for name in ("worker", "router", "kernels", "deploy")]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))


def serve_flags() -> frozenset[str]:
    """Flags that this checkout's `moeyard serve` knows."""
    environment = {**os.environ, "PYTHONPATH": source_path()}
    command = [sys.executable, "-m", "moeyard", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return frozenset(re.findall(r"--[a-z][a-z-]+", text))


async def read_json(http: httpx.AsyncClient, path: str) -> Any:
    """A page of the server; None when it cannot be had."""
    try:
        response = await http.get(path, timeout=5.0)
        return response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
