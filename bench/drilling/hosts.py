"""Hosts on one machine, made of kernel namespaces, and the network between them. Needs root and iproute2.

A network is a bridge in a namespace of its own, so nothing appears on the machine. The link of a host can be cut.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

import psutil
from drilling.server import source_path

NETWORK = "10.77.0"
CLONE_NEWNET = 0x40000000  # sched.h
BRIDGE = "bridge"
CHECKOUT = Path(__file__).resolve().parents[2]
# First process of a host, like Docker's `init: true`: it forwards SIGTERM, reaps, and exits with its only child.
INIT = '"$@" & p=$!; trap "kill -TERM $p" TERM; wait $p; c=$?; [ $c -lt 128 ] || { wait $p; c=$?; }; exit $c'


def missing() -> str | None:
    """Return what this process lacks to create hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]:
        return f"{', '.join(absent)} not found: install iproute2 and util-linux"
    done = subprocess.run(["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


def ip(*arguments: str, check: bool = True) -> None:
    """Run the `ip` command. Raises CalledProcessError unless `check` is false."""
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def enter(namespace: str) -> None:
    """Move this thread to a network namespace, with all threads and processes that it starts later."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class Network:
    """Hosts with these names, and the links between them. Use it as a context: its end removes everything.

    `aliases` are further names, each of a host. Every host resolves all names.
    """

    def __init__(self, names: Sequence[str], *, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self.addresses = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(names)}
        self._aliases = dict(aliases)
        self._prefix = f"moeyard-{secrets.token_hex(4)}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeyard-network-")))
            known = {**self.addresses, **{alias: self.addresses[name] for alias, name in self._aliases.items()}}
            # Without a name server a lookup of an unknown name fails at once.
            self._names = {"/etc/hosts": folder / "hosts", "/etc/resolv.conf": folder / "resolv.conf"}
            self._names["/etc/resolv.conf"].touch()
            self._names["/etc/hosts"].write_text(
                "".join(f"{ip} {name}\n" for name, ip in {"localhost": "127.0.0.1", **known}.items())
            )
            for name in (BRIDGE, *self.addresses):
                stack.callback(ip, "netns", "delete", self.namespace(name), check=False)
                ip("netns", "add", self.namespace(name))
                ip("-n", self.namespace(name), "link", "set", "lo", "up")
            self._connect()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def at_end(self, stop: Callable[[], object]) -> None:
        """Call `stop` at the end, the latest first, before the namespaces are removed."""
        self._stack.callback(stop)

    def _connect(self) -> None:
        bridge = self.namespace(BRIDGE)
        ip("-n", bridge, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", bridge, "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("-n", bridge, "link", "set", BRIDGE, "up")
        for name, address in self.addresses.items():
            host = self.namespace(name)
            ip("-n", bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("-n", bridge, "link", "set", name, "master", BRIDGE, "up")
            ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            # Ray asks the kernel which of its addresses leads to the internet.
            ip("-n", host, "route", "add", "default", "via", f"{NETWORK}.1")

    def namespace(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._prefix}-{name}"

    def cut(self, name: str) -> None:
        """Let no packet of a host pass. Its own link stays up, so no process is told."""
        ip("-n", self.namespace(BRIDGE), "link", "set", name, "nomaster")

    def heal(self, name: str) -> None:
        """Let packets of a host pass again."""
        ip("-n", self.namespace(BRIDGE), "link", "set", name, "master", BRIDGE)

    def enter(self, name: str = BRIDGE) -> None:
        """Move this thread to a host's network, with all threads and processes that it starts later."""
        enter(self.namespace(name))

    def separate(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command line that runs `command` as the first process of a host.

        Host name, process ids, /tmp and /dev/shm are the host's own; /tmp shows nothing but the checkout, if it is
        there. All processes end with the first one.
        """
        # Mount the names first, because their files may lie in the /tmp that is hidden next.
        inside = [f"hostname {name}", *(f"mount --bind {file} {path}" for path, file in self._names.items())]
        hide = ["mount -t tmpfs tmpfs /tmp"]
        if CHECKOUT.is_relative_to("/tmp"):
            hide = [f"mount --bind {CHECKOUT} /mnt", *hide, f"mkdir -p {CHECKOUT}", f"mount --bind /mnt {CHECKOUT}"]
        inside += [
            *hide,
            "mount -t tmpfs -o size=1g tmpfs /dev/shm",
            f"exec bash -c '{INIT}' init \"$@\"",
        ]
        wrap = ["ip", "netns", "exec", self.namespace(name), "unshare", "--pid", "--mount", "--uts", "--fork"]
        return [*wrap, "--kill-child", "--mount-proc", "bash", "-c", " && ".join(inside), "host", *command]


class Inside:
    """The processes of a host or container. `process` is the `unshare` that started it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def processes(self) -> list[psutil.Process]:
        """Return all live processes inside, the first one first."""
        if self.process is not None:
            with contextlib.suppress(psutil.Error):  # it has ended
                return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, what: str) -> list[psutil.Process]:
        """Return the processes with `what` in their command lines, the innermost one last, without shells."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if what in " ".join(process.cmdline()) and process.name() not in ("bash", "sh"):
                    found.append(process)
        return found

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return a command line that runs `command` inside. Raises ProcessLookupError if nothing runs there."""
        first = next(iter(self.processes()), None)
        if first is None:
            raise ProcessLookupError("it is not running")
        return ["nsenter", "-t", str(first.pid), "-n", "-p", "-m", "-u", *command]


class Host(Inside):
    """A machine that runs commands until `stop`."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self.name, self.address = name, network.addresses[name]
        self._shells: list[subprocess.Popen[bytes]] = []
        self.process = subprocess.Popen(network.separate(name, ["sleep", "infinity"]), stdin=subprocess.DEVNULL)
        network.at_end(self.stop)
        # Not the shell before it: that one still mounts.
        while not any(process.name() == "sleep" for process in self.find("sleep infinity")):
            if self.process.poll() is not None:
                raise RuntimeError(f"the host {name} ended with {self.process.returncode}")
            time.sleep(0.01)

    def start(self, script: str, *, out: IO[bytes] | int) -> "subprocess.Popen[bytes]":
        """Start a shell script with this checkout's programs on the PATH. Its output goes to `out`."""
        shell = subprocess.Popen(
            self.entering(["bash", "-e", "-c", script]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=program_environment(),
        )
        self._shells.append(shell)
        return shell

    def stop(self) -> None:
        """Kill all processes at once."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error, IndexError):  # it has ended
            self.processes()[0].send_signal(signal.SIGKILL)
        for process in (self.process, *self._shells):
            process.wait()


def program_environment(more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return an environment with this checkout's programs and packages, and `more`. No other setting is inherited."""
    return {
        **{key: value for key, value in os.environ.items() if key in ("LANG", "HOME", "TERM")},
        **{key: str(value) for key, value in (more or {}).items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": source_path(),
    }
