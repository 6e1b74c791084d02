"""The control socket of a running `moeyard serve`.

A Unix socket in a directory of its user (mode 0700). The system's permissions decide who may send commands, so no key
is needed. Both sides send one JSON object per line. A client sends {"command": NAME, ...}. The server answers with
{"say": TEXT} for progress, then {"done": TEXT} or {"error": TEXT, "code": EXIT_CODE}.

A connection that begins with an HTTP method speaks HTTP, for the API of trainers (`weights_api.py`). The same API is
served on a TCP port to clients with a key, if an operator wants it.
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
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from moeyard.fleet.messages import Refused
from moeyard.fleet.weights_api import Answer, WeightsApi, error
from moeyard.options import CHANGEABLE, with_flags
from moeyard_router.config import AccessConfig
from moeyard_router.http.credentials import KeyRing
from moeyard_router.http.trainers import MAX_BODY
from moeyard_worker.config.engine_config import EngineConfig

log = logging.getLogger(__name__)

Say = Callable[[str], None]
# Takes a command's fields and a progress callback. Returns the final text, or raises Refused or ValueError.
Handler = Callable[[Mapping[str, Any], Say], str]

MAX_LINE = 64 * 1024
_IDLE_SECONDS = 60.0  # an HTTP connection without a request is closed after this time
_READ_SECONDS = 5.0
_MOST = 16  # connections at once
_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: process, user, group


def directory() -> Path:
    """Return the folder of the control sockets of this user's servers."""
    return Path(tempfile.gettempdir()) / f"moeyard-control-{os.getuid()}"


def socket_path(port: int) -> Path:
    """Return the path of this process's control socket. `port`: that of its API."""
    return directory() / f"{port}-{os.getpid()}.sock"


def is_ours(folder: Path) -> bool:
    """Return whether only this user can access a directory. Otherwise the socket in it may be another user's."""
    with contextlib.suppress(OSError):  # boundary: it is not there
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


class _Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """A thread per connection, up to a limit."""

    daemon_threads = True
    block_on_close = False
    api: WeightsApi | None
    keys: KeyRing | None = None
    places: threading.BoundedSemaphore

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request, then release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a bug in a command. Its client sees the connection close."""
        log.exception("a command on the control socket failed")


class _ControlServer(_Server, socketserver.UnixStreamServer):
    def __init__(self, path: Path, commands: Mapping[str, Handler], api: WeightsApi | None) -> None:
        self.commands, self.api = commands, api
        self.places = threading.BoundedSemaphore(_MOST)
        super().__init__(str(path), _CommandHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept only this user and root, even if the directory's mode has changed."""
        found = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(found)[1]
        return user in (0, os.getuid()) and self.places.acquire(blocking=False)


class ControlPort(_Server, socketserver.TCPServer):
    """The API of trainers on a TCP port, for clients with a key. Listens from construction to `close`.

    Raises ValueError if the port is taken or the file of keys cannot be used.
    """

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, key_file: Path, api: WeightsApi) -> None:
        self.api, self.keys = api, KeyRing(AccessConfig(api_key_file=key_file))
        self.places = threading.BoundedSemaphore(_MOST)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), HttpHandler)
        except OSError as error:
            raise ValueError(f"--control-listen {host}:{port}: {error.strerror}") from error
        threading.Thread(target=self.serve_forever, name="control-port", daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept a limited number of connections."""
        return self.places.acquire(blocking=False)

    def close(self) -> None:
        """Accept no more connections."""
        self.shutdown()
        self.server_close()


class HttpHandler(BaseHTTPRequestHandler):
    """A connection that speaks HTTP. Each answer is JSON, with a status that `WeightsApi` gives."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "moeyard", ""
    timeout = _IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, body = self._checked()
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", 'Bearer realm="moeyard"')
        self.end_headers()
        with contextlib.suppress(OSError):  # boundary: the client has disconnected
            self.wfile.write(data)

    def _checked(self) -> Answer:
        """Return the answer, after the checks of key and length."""
        keys, api = self.server.keys, self.server.api
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else self.headers.get("x-api-key", "")
        length = self.headers.get("Content-Length", "0")
        # An unread body would be taken for the next request.
        self.close_connection = True
        if keys is not None:
            keys.refresh()
            if keys.name_of(key.encode("latin-1")) is None:
                if length.isdecimal() and int(length) <= MAX_LINE:
                    self.rfile.read(int(length))  # a reset would overtake the answer
                return error(401, "a key of --control-key-file is needed: 'Authorization: Bearer KEY'")
        if api is None:
            return error(404, "this server has no API of trainers")
        if not length.isdecimal() or int(length) > MAX_BODY or self.headers.get("Transfer-Encoding"):
            return error(413, f"a body has a Content-Length of at most {MAX_BODY}")
        data = self.rfile.read(int(length))
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        log.info("control: %s %s %s", self.command, self.path[:200], data[:200].decode("utf-8", "replace"))
        return api.answer(self.command, self.path, data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because `_checked` logs requests."""


class _CommandHandler(socketserver.StreamRequestHandler):
    """One command."""

    timeout = _READ_SECONDS
    server: _ControlServer

    def handle(self) -> None:
        """Read a command, run it and answer. The command continues if its client disconnects."""
        with contextlib.suppress(OSError):  # boundary: the client sends nothing
            # An HTTP request begins with its method.
            if self.connection.recv(4, socket.MSG_PEEK).startswith((b"GET ", b"POST")):
                HttpHandler(self.connection, ("control", 0), self.server)
                return
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
        with contextlib.suppress(OSError):  # boundary: the client has disconnected
            self.connection.sendall(json.dumps(fields).encode() + b"\n")


class ControlSocket:
    """Listens from construction to `close`. Raises OSError, or ValueError if others can access the directory."""

    def __init__(self, port: int, commands: Mapping[str, Handler], api: WeightsApi | None = None) -> None:
        folder = directory()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_ours(folder):
            raise ValueError(f"{folder} is not this user's alone")
        self._path = socket_path(port)
        self._path.unlink(missing_ok=True)
        self._server = _ControlServer(self._path, commands, api)
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


def open_control(port: int, known: Mapping[str, Handler], api: WeightsApi | None = None) -> ControlSocket | None:
    """Open the control socket of the server at `port`. Log a warning and return None if that fails."""
    try:
        return ControlSocket(port, known, api)
    except (OSError, ValueError) as error:
        log.warning("no control socket, so `moeyard drain` and `moeyard restart` do not find this server: %s", error)
        return None
