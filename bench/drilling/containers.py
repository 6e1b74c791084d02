"""Containers without Docker: hosts made of namespaces (hosts.py) that run one command, with a restart policy.

Images, users, capabilities, memory limits and mounts other than /tmp and /dev/shm are not reproduced.
"""

import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from drilling.hosts import Inside, Network, program_environment
from drilling.server import ROOT

ENTRYPOINT = ROOT / "deploy" / "container" / "entrypoint.sh"
MODEL = ROOT / "deploy" / "demo"
# Docker waits 100 ms, doubles the pause up to a minute, and resets it after a run of 10 s.
FIRST_PAUSE, LAST_PAUSE, LONG_ENOUGH = 0.1, 60.0, 10.0


def services(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the services of docker-compose.yml, with `settings` in place of the environment and .env."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return settings.get(name, default or "")

    pattern = re.compile(r"\$\{(?P<name>\w+)(?::[-?](?P<default>[^}]*))?\}")
    text = pattern.sub(value, (ROOT / "docker-compose.yml").read_text())
    return yaml.safe_load(text)["services"]


class Container(Inside):
    """One command, restarted whenever it ends, until `stop`."""

    def __init__(
        self, network: Network, name: str, command: Sequence[str], *, environment: Mapping[str, Any], folder: Path
    ) -> None:
        super().__init__()
        self.name, self.address, self.log = name, network.addresses[name], folder / f"{name}.log"
        self.log.write_bytes(b"")
        self.starts: list[float] = []
        self.codes: list[int] = []
        self._command = network.separate(name, command)
        self._environment = program_environment({**environment, "MOEYARD_CONTAINER_HOME": ENTRYPOINT.parent})
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        network.at_end(self.stop)

    def _keep(self) -> None:
        """Apply the restart policy."""
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self.starts.append(time.monotonic())
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
                )
                self.codes.append(self.process.wait())
            pause = FIRST_PAUSE if time.monotonic() - self.starts[-1] > LONG_ENOUGH else min(2 * pause, LAST_PAUSE)
            self._stopped.wait(pause)

    def run(self, command: Sequence[str], *, seconds: float) -> tuple[bool, str]:
        """Run a command inside, such as a health check. Return whether it ended with 0 in time, and its output."""
        try:
            inside = self.entering(command)
            done = subprocess.run(inside, capture_output=True, text=True, env=self._environment, timeout=seconds)
        except ProcessLookupError as error:
            return False, str(error)
        except subprocess.TimeoutExpired:
            return False, f"{command[-1]} timed out"
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def stop(self, seconds: float = 10.0) -> int | None:
        """Send SIGTERM, and SIGKILL after `seconds`, like `docker stop`. Return the exit code, None after SIGKILL."""
        self._stopped.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(psutil.Error, IndexError):  # it has ended
                self.processes()[0].send_signal(number)
            self._keeper.join(seconds)
            if number == signal.SIGTERM and not self._keeper.is_alive():
                return self.codes[-1]
        return None
