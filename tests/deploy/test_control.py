"""The control socket: the command line finds it, only its user may use it, and each error is one line."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.limits import HANG_SECONDS

from moeyard.cli.commands import main
from moeyard.fleet import control
from moeyard.fleet.control import ControlSocket, Handler, Say, check_changes, commands, open_control
from moeyard.fleet.messages import Refused
from moeyard_worker.config.engine_config import EngineConfig


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of control sockets; pytest's own folder names are too long for a socket."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield control.directory()


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., ControlSocket]]:
    with ExitStack() as stack:

        def start(port: int, **known: Handler) -> ControlSocket:
            control_socket = ControlSocket(port, known)
            stack.callback(control_socket.close)
            return control_socket

        yield start


def echo(fields: Mapping[str, Any], say: Say) -> str:
    say("on its way")
    return json.dumps(fields)


def run(*words: str) -> int:
    """Return the command line's exit code."""
    try:
        return main(list(words))
    except SystemExit as error:
        return int(str(error.code))


def refuse(fields: Mapping[str, Any], say: Say) -> str:
    raise Refused("busy: rank 1 is being drained, for 3 s; wait for its end")


def test_commands_and_answers(serve: Callable[..., ControlSocket], capsys: pytest.CaptureFixture[str]) -> None:
    serve(8000, drain=echo, restart=echo, undrain=refuse, scale=echo)
    assert run("scale", "4", "--drain-timeout", "7") == 0
    assert json.loads(capsys.readouterr().out) == {"command": "scale", "size": 4, "seconds": 7.0}
    assert run("scale", "0") == 2
    assert run("scale") == 2
    capsys.readouterr()
    assert run("drain", "--worker", "1", "--drain-timeout", "2.5") == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == {"command": "drain", "rank": 1, "seconds": 2.5}
    assert output.err == "on its way\n"
    assert run("restart", "--prefill-chunk", "64", "--kv-memory", "1MiB") == 0
    output = capsys.readouterr()
    changes = {"prefill_chunk": 64, "kv_memory": 1024**2}
    assert json.loads(output.out) == {"command": "restart", "ranks": [], "seconds": 30.0, "changes": changes}
    assert run("restart", "--worker", "2", "--drain-timeout", "0") == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [2]
    assert run("undrain", "--worker", "1") == 1
    output = capsys.readouterr()
    assert output.err == "moeyard: busy: rank 1 is being drained, for 3 s; wait for its end\n"
    assert output.out == ""


def test_choice_of_the_server(
    serve: Callable[..., ControlSocket], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("drain", "--worker", "0") == 1
    text = f"moeyard: no server of this user runs here (its control socket would be in {folder})\n"
    assert capsys.readouterr().err == text
    serve(8000, drain=echo)
    serve(8001, drain=refuse)
    # A killed server leaves its socket.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "8002-1.sock"))
    assert run("drain", "--worker", "0") == 2
    said = "several servers of this user run here, at ports 8000, 8001; name one with --port"
    assert capsys.readouterr().err == f"moeyard: {said}\n"
    assert run("drain", "--worker", "0", "--port", "8000") == 0
    assert run("drain", "--worker", "0", "--port", "8002") == 1
    assert "no server of this user runs here at port 8002" in capsys.readouterr().err
    assert run("drain", "--worker", "x") == 2
    assert run("drain") == 2, "drain must require one rank"


def test_only_its_user_may_connect(serve: Callable[..., ControlSocket], folder: Path) -> None:
    serve(8000, drain=echo)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    assert run("drain", "--worker", "0") == 1, "a folder open to others must be refused"
    assert open_control(8001, {}) is None, "a server must start without a control socket"
    folder.chmod(0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its user")
def test_other_users_are_refused_for_any_file_mode(serve: Callable[..., ControlSocket], folder: Path) -> None:
    control_socket = serve(8000, drain=echo)
    for path in (folder.parent, folder):
        path.chmod(0o777)
    control_socket._path.chmod(0o777)
    said = """if True:
        import os, socket, sys
        os.setuid(int(sys.argv[2]))
        end = socket.socket(socket.AF_UNIX)
        end.connect(sys.argv[1])
        try:
            end.sendall(b"{}\\n")
            print(end.recv(1000))
        except OSError:
            print(b"")
    """
    command = [sys.executable, "-I", "-c", said, str(control_socket._path)]
    for user, heard in ((65534, False), (0, True)):
        output = subprocess.run([*command, str(user)], capture_output=True, text=True, check=True).stdout
        assert ("knows no command" in output) == heard


def test_invalid_commands_get_an_error(serve: Callable[..., ControlSocket]) -> None:
    control_socket = serve(8000, drain=echo, scale=echo)

    def ask(line: bytes) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(control_socket._path))
            end.sendall(line)
            return dict(json.loads(end.makefile().readline()))

    bad = {"error": "a command is one line with a JSON object", "code": 2}
    for line in (b"\n", b"PUT / HTTP/1.1\r\n", b"[]\n", b"7\n", b'{"command": "drain"' + b" " * 70000 + b"\n"):
        assert ask(line) == bad
    assert ask(b'{"command": "fly"}\n') == {"error": "this server knows no command 'fly', but drain, scale", "code": 2}
    assert ask(b'{"command": null}\n')["code"] == 2
    assert ask(b"{}\n")["code"] == 2


def test_disconnect_stops_no_command(serve: Callable[..., ControlSocket]) -> None:
    left, done = threading.Event(), threading.Event()

    def slow(fields: Mapping[str, Any], say: Say) -> str:
        assert left.wait(HANG_SECONDS)
        for _ in range(100):
            say("x" * 1000)
        done.set()
        return ""

    control_socket = serve(8000, drain=slow)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(control_socket._path))
        end.sendall(b'{"command": "drain"}\n')
    left.set()
    assert done.wait(HANG_SECONDS)


def test_fields_of_commands() -> None:
    config = EngineConfig(model_path="x", num_workers=2, exchange="zmq")
    given: list[tuple[str, dict[str, Any]]] = []

    def carry_out(name: str, say: Say, **fields: Any) -> str:
        given.append((name, fields))
        return "done"

    known = commands(carry_out, config)
    assert sorted(known) == ["drain", "restart", "scale", "undrain"]
    for name, fields in (
        ("drain", {}),
        ("drain", {"rank": None, "seconds": 1}),
        ("undrain", {"rank": []}),
        ("restart", {"ranks": 1, "seconds": 1, "changes": {}}),
        ("scale", {"size": None, "seconds": 1}),
        ("scale", {"size": 2, "seconds": float("nan")}),
        ("drain", {"rank": 1, "seconds": -1}),
        ("scale", {"size": 2}),
    ):
        with pytest.raises(Refused, match="a field of the command is missing or of another type"):
            known[name](fields, print)
    assert given == []
    assert known["scale"]({"size": 2, "seconds": 1.0}, print) == "done"
    known["drain"]({"rank": 9, "seconds": 1}, print)
    known["undrain"]({"rank": 1}, print)
    known["restart"]({"ranks": [1, 0], "seconds": 0.0, "changes": {"threads": 2}}, print)
    assert given == [
        ("scale", {"size": 2, "seconds": 1.0}),
        ("drain", {"ranks": (9,), "seconds": 1.0}),
        ("undrain", {"ranks": (1,)}),
        ("restart", {"ranks": (1, 0), "seconds": 0.0, "changes": {"threads": 2}}),
    ]
    assert check_changes(config, {"threads": 2}) == {"threads": 2}
    with pytest.raises(Refused, match=r"dtype, page_size must be the same on all ranks: restart the server"):
        check_changes(config, {"page_size": 8, "dtype": "float32"})
    with pytest.raises(Refused, match=r"--threads must be 1 or 2, got 3|threads must be 1 or 2, got 3"):
        check_changes(config, {"threads": 3})
