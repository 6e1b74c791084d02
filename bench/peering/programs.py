"""The other routers that `bench/peers.py` measures, from PyPI, each in its own virtual environment and process."""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peering.streams import KEY

START_SECONDS = 120.0


def environment(directory: Path, package: str) -> tuple[Path, str]:
    """Return the `bin` of a virtual environment with this package, and the package's version."""
    home = directory / re.sub(r"\W+", "_", package)
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", package], check=True)
        (home / "ready").touch()
    (site,) = home.glob("lib/*/site-packages")
    (found,) = importlib.metadata.distributions(name=package.partition("[")[0], path=[str(site)])
    return home / "bin", found.version


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start(
    command: list[Any],
    port: int,
    path: str,
    log: Path,
    *,
    seconds: float = START_SECONDS,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> "subprocess.Popen[bytes]":
    """Start a peer's process, with more environment `variables`, and return it when it answers within `seconds`."""
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": KEY,
        "RUST_LOG": "error",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=out,
            stderr=out,
            env={**os.environ, **quiet, **variables},
            cwd=log.parent,
        )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return process
    process.kill()
    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()}")


def end(peers: "list[subprocess.Popen[bytes]]") -> None:
    """Kill the peers, because litellm waits for its streams on SIGTERM."""
    for peer in peers:
        peer.kill()
        peer.wait()
    peers.clear()


class VllmRouter:
    """vllm-router in front of one engine."""

    def __init__(self, venvs: Path, engine: str, scratch: Path) -> None:
        directory, version = environment(venvs, "vllm-router")
        self.name, self.port = f"vllm-router {version}", free_port()
        self._log = scratch / f"{self.port}.log"
        self._command = [directory / "vllm-router", "--worker-urls", engine, "--port", self.port]
        self._command += ["--policy", "round_robin", "--prometheus-port", free_port()]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process and return it when it answers."""
        return start(self._command, self.port, "/health", self._log)


class Litellm:
    """litellm's proxy in front of one engine: one model at one address, without lookups, writes or retries."""

    def __init__(self, venvs: Path, engine: str, scratch: Path) -> None:
        directory, version = environment(venvs, "litellm[proxy]")
        self.name, self.port = f"litellm {version}", free_port()
        self._log = scratch / f"{self.port}.log"
        params = {"model": "openai/stub", "api_base": f"{engine}/v1", "api_key": "none"}
        config = scratch / f"{self.port}.json"
        config.write_text(json.dumps({"model_list": [{"model_name": "stub", "litellm_params": params}]}))
        self._command = [directory / "litellm", "--config", config, "--port", self.port, "--host", "127.0.0.1"]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process and return it when it answers."""
        return start(self._command, self.port, "/health/liveliness", self._log)
