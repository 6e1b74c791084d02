"""`moeyard drain | undrain | restart | scale`: clients of the control socket of a server on this machine."""

import argparse
import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

from moeyard.fleet import control
from moeyard.fleet.messages import Refused
from moeyard.options import CHANGEABLE

CONNECT_SECONDS = 5.0


def connect(port: int | None) -> socket.socket:
    """Return the control socket of the only server here, or of the one at `port`. Raises Refused otherwise."""
    folder = control.directory()
    paths = sorted(folder.glob(f"{'*' if port is None else port}-*.sock")) if control.is_ours(folder) else []
    connected: list[tuple[Path, socket.socket]] = []
    for path in paths:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except OSError:  # boundary: a killed server left this socket
            connection.close()
            continue
        connected.append((path, connection))
    if len(connected) == 1:
        return connected[0][1]
    for _, connection in connected:
        connection.close()
    if connected:
        ports = ", ".join(path.name.partition("-")[0] for path, _ in connected)
        raise Refused(f"several servers of this user run here, at ports {ports}; name one with --port", 2)
    where = "" if port is None else f" at port {port}"
    raise Refused(f"no server of this user runs here{where} (its control socket would be in {folder})")


def send(args: argparse.Namespace) -> int:
    """Run a command with progress on stderr and its final text on stdout. Raises Refused."""
    with contextlib.closing(connect(args.port)) as connection:
        connection.sendall(json.dumps(order(args)).encode() + b"\n")
        connection.settimeout(None)
        for line in connection.makefile("rb"):
            said = json.loads(line)
            if "say" in said:
                print(said["say"], file=sys.stderr, flush=True)
            elif "error" in said:
                raise Refused(said["error"], int(said["code"]))
            else:
                print(said["done"], flush=True)
                return 0
    raise Refused("the server ended before the command did")


def order(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a command, as `control_commands` reads them."""
    seconds = {} if args.command == "undrain" else {"seconds": args.drain_timeout}
    found: dict[str, Any] = {"command": args.command, **seconds}
    if args.command == "scale":
        return {**found, "size": args.size}
    if args.command != "restart":
        return {**found, "rank": args.worker}
    changes = {name: value for name in CHANGEABLE if (value := getattr(args, name)) is not None}
    return {**found, "ranks": [] if args.worker is None else [args.worker], "changes": changes}
