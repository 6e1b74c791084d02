"""The control socket of a running `moeyard serve`.

A Unix socket in a directory of its user (mode 0700). The system's permissions decide who may send commands, so no key
is needed. Both sides send one JSON object per line. A client sends {"command": NAME, ...}. The server answers with
{"say": TEXT} for progress, then {"done": TEXT} or {"error": TEXT, "code": EXIT_CODE}.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import socketserver
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeyard.fleet.messages import Refused
from moeyard.options import CHANGEABLE, with_flags
from moeyard_worker.config.engine_config import EngineConfig

log = logging.getLogger(__name__)

Say = Callable[[str], None]
# Takes a command's fields and a progress callback. Returns the final text, or raises Refused or ValueError.
Handler = Callable[[Mapping[str, Any], Say], str]

MAX_LINE = 64 * 1024
_READ_SECONDS = 5.0
_MOST = 16  # connections at once
_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: process, user, group


def directory() -> Path:
    """Return the folder of the control sockets of this user's servers."""
    return Path(tempfile.gettempdir()) / f"moeyard-control-{os.getuid()}"


def is_ours(folder: Path) -> bool:
    """Return whether only this user can access a directory. Otherwise the socket in it may be another user's."""
    with contextlib.suppress(OSError):  # boundary: it is not there
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


class _ControlServer(socketserver.ThreadingUnixStreamServer):
    """A thread per connection, up to a limit."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, commands: Mapping[str, Handler]) -> None:
        self.commands = commands
        self._places = threading.BoundedSemaphore(_MOST)
        super().__init__(str(path), _CommandHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept only this user and root, even if the directory's mode has changed."""
        found = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(found)[1]
        return user in (0, os.getuid()) and self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request, then release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a bug in a command. Its client sees the connection close."""
        log.exception("a command on the control socket failed")


class _CommandHandler(socketserver.StreamRequestHandler):
    """One command."""

    timeout = _READ_SECONDS
    server: _ControlServer

    def handle(self) -> None:
        """Read a command, run it and answer. The command continues if its client disconnects."""
        try:
            fields = json.loads(self.rfile.readline(MAX_LINE))
            name = str(fields.get("command"))
        except (ValueError, AttributeError, TimeoutError):
            self._answer(error="a command is one line with a JSON object", code=2)
            return
        command = self.server.commands.get(name)
        if command is None:
            known = ", ".join(sorted(self.server.commands))
            self._answer(error=f"this server knows no command '{name:.40}', but {known}", code=2)
            return
        log.info("control socket: %s", json.dumps(fields)[:200])
        try:
            done = command(fields, lambda text: self._answer(say=text))
        except ValueError as error:
            self._answer(error=str(error), code=getattr(error, "exit_code", 2))
        else:
            self._answer(done=done)

    def _answer(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # boundary: it has left
            self.connection.sendall(json.dumps(fields).encode() + b"\n")


class ControlSocket:
    """Listens from construction to `close`. Raises OSError, or ValueError if others can access the directory."""

    def __init__(self, port: int, commands: Mapping[str, Handler]) -> None:
        folder = directory()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_ours(folder):
            raise ValueError(f"{folder} is not this user's alone")
        self._path = folder / f"{port}-{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)
        self._server = _ControlServer(self._path, commands)
        self._thread = threading.Thread(target=self._server.serve_forever, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more commands. The fleet ends commands that run."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def _seconds(fields: Mapping[str, Any]) -> float:
    seconds = float(fields["seconds"])
    if not seconds >= 0:
        raise TypeError(f"seconds is {seconds}, expected 0 or more")
    return seconds


def commands(run: Callable[..., str], config: EngineConfig) -> dict[str, Handler]:
    """Return the handlers of a fleet's commands. `run(name, say, **fields)` runs one, or raises Refused."""

    def drain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"ranks": (int(fields["rank"]),), "seconds": _seconds(fields)}

    def undrain(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"ranks": (int(fields["rank"]),)}

    def restart(fields: Mapping[str, Any]) -> dict[str, Any]:
        ranks, seconds = tuple(int(rank) for rank in fields["ranks"]), _seconds(fields)
        return {"ranks": ranks, "seconds": seconds, "changes": check_changes(config, fields["changes"])}

    def scale(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"size": int(fields["size"]), "seconds": _seconds(fields)}

    def command(name: str, read: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Handler:
        def carry_out(fields: Mapping[str, Any], say: Say) -> str:
            try:
                known = read(fields)
            except (KeyError, TypeError) as error:
                # The client has another version.
                raise Refused(f"a field of the command is missing or of another type: {error}", 2) from error
            return run(name, say, **known)

        return carry_out

    return {read.__name__: command(read.__name__, read) for read in (drain, undrain, restart, scale)}


def check_changes(config: EngineConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed fields of a rank. Raises Refused for fields that must be equal on all ranks or are invalid."""
    alike = sorted(changes.keys() - set(CHANGEABLE))
    if alike:
        raise Refused(f"{', '.join(alike)} must be the same on all ranks: restart the server", 2)
    try:
        dataclasses.replace(config, expert_memory=None, **changes)
    except ValueError as error:
        raise Refused(with_flags(str(error)), 2) from error
    return dict(changes)


def open_control(port: int, known: Mapping[str, Handler]) -> ControlSocket | None:
    """Open the control socket of the server at `port`. Log a warning and return None if that fails."""
    try:
        return ControlSocket(port, known)
    except (OSError, ValueError) as error:
        log.warning("no control socket, so `moeyard drain` and `moeyard restart` do not find this server: %s", error)
        return None
