"""Containers without Docker: kernel namespaces for processes, mounts, network and names, and a restart policy.

Each runs one service of docker-compose.yml with its command and environment. Its PID namespace ends with its first
process. It has an address on a bridge, and its own /tmp and /dev/shm. Images, users, capabilities and memory limits are
not reproduced. This needs root; `enter_private_network` keeps everything off the machine.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from drilling.server import MARKER, ROOT, source_path

NETWORK = "10.77.0"
ENTERED = "MOEYARD_DRILL_NETWORK"
ENTRYPOINT = ROOT / "deploy" / "container" / "entrypoint.sh"
# Docker waits 100 ms, doubles the pause up to a minute, and resets it after a run of 10 s.
FIRST_PAUSE, LAST_PAUSE, LONG_ENOUGH = 0.1, 60.0, 10.0
# The process that `init: true` adds: it forwards signals, reaps, and exits with its only child.
INIT = '"$@" & p=$!; trap "kill -TERM $p" TERM; wait $p; c=$?; [ $c -lt 128 ] || wait $p; exit $c'


def enter_private_network() -> None:
    """Run this program again inside private namespaces, which leave nothing behind. Return when inside."""
    if os.environ.get(ENTERED) is None:
        os.environ[ENTERED] = "1"
        wrap = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp(wrap[0], [*wrap, sys.executable, *sys.argv])
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    for command in (
        "mount -t tmpfs tmpfs /run/netns",
        "ip link set lo up",
        "ip link add fleet type bridge",
        f"ip address add {NETWORK}.1/24 dev fleet",
        "ip link set fleet up",
    ):
        subprocess.run(command.split(), check=True)


def services(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the services of docker-compose.yml, with `settings` in place of the environment and .env."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return settings.get(name, default or "")

    pattern = re.compile(r"\$\{(?P<name>\w+)(?::[-?](?P<default>[^}]*))?\}")
    text = pattern.sub(value, (ROOT / "docker-compose.yml").read_text())
    return yaml.safe_load(text)["services"]


class Container:
    """One service, restarted whenever it ends, until `stop`."""

    def __init__(self, name: str, service: Mapping[str, Any], *, address: str, hosts: Path, folder: Path) -> None:
        assert service["restart"] == "unless-stopped"
        self.name, self.address, self.log = name, address, folder / f"{name}.log"
        self.log.write_bytes(b"")
        self.starts: list[float] = []
        self.codes: list[int] = []
        self._command = [str(ENTRYPOINT), *(str(part).replace("/model", model()) for part in service["command"])]
        self._check = [str(ENTRYPOINT), *service["healthcheck"]["test"][2:]]
        self._hosts = hosts
        self._environment = {
            **{key: value for key, value in os.environ.items() if key in ("LANG", "HOME", "TERM")},
            **{key: str(value) for key, value in service["environment"].items()},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": source_path(),
            "MOEYARD_CONTAINER_HOME": str(ENTRYPOINT.parent),
            MARKER: name,
        }
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._network()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _network(self) -> None:
        index = self.address.rpartition(".")[2]
        for command in (
            f"ip netns add {self.name}",
            f"ip link add veth{index} type veth peer name eth0 netns {self.name}",
            f"ip link set veth{index} master fleet up",
            f"ip -n {self.name} link set lo up",
            f"ip -n {self.name} address add {self.address}/24 dev eth0",
            f"ip -n {self.name} link set eth0 up",
        ):
            subprocess.run(command.split(), check=True)

    def _keep(self) -> None:
        """Apply the restart policy."""
        # Mount the hosts file first, because it may lie in the /tmp that is hidden next.
        inside = (
            f"hostname {self.name}; mount --bind {self._hosts} /etc/hosts; mount -t tmpfs tmpfs /tmp; "
            f"mount -t tmpfs -o size=1g tmpfs /dev/shm; exec bash -c '{INIT}' init \"$@\""
        )
        wrap = ["ip", "netns", "exec", self.name, "unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child"]
        command = [*wrap, "--mount-proc", "bash", "-c", inside, "container", *self._command]
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self.starts.append(time.monotonic())
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
                )
                self.codes.append(self._process.wait())
            pause = FIRST_PAUSE if time.monotonic() - self.starts[-1] > LONG_ENOUGH else min(2 * pause, LAST_PAUSE)
            self._stopped.wait(pause)

    def processes(self) -> list[psutil.Process]:
        """Return all live processes inside, the first one first."""
        found = []
        if self._process is not None:
            with contextlib.suppress(psutil.Error):  # it is restarting
                found = psutil.Process(self._process.pid).children(recursive=True)
        return found

    def find(self, what: str) -> psutil.Process | None:
        """Return the innermost process with `what` in its command line. "container" is the first process."""
        found = None
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if what == "container":
                    return process
                if what in " ".join(process.cmdline()) and process.name() not in ("bash", "sh"):
                    found = process
        return found

    def healthy(self) -> tuple[bool, str]:
        """Run the health check. Return its result and output."""
        inside = self.processes()
        if not inside:
            return False, "it is not running"
        command = ["nsenter", "-t", str(inside[0].pid), "-n", "-p", "-m", "-u", *self._check]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=15)
        except subprocess.TimeoutExpired:
            return False, "the check timed out"
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def stop(self) -> None:
        """Stop like `docker stop`: SIGTERM, and SIGKILL after 10 s."""
        self._stopped.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(psutil.Error, IndexError):  # it has ended
                self.processes()[0].send_signal(number)
            self._keeper.join(10.0)


def model() -> str:
    """Return the checkpoint that appears at /model."""
    return str(ROOT / "deploy" / "demo")
