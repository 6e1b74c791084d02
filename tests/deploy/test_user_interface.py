"""The command line's user interface: addresses, startup messages, interrupts, the doctor, shell completion."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.gpus import pretend
from tests.limits import HANG_SECONDS

from moeyard.cli.commands import main, with_subject
from moeyard.clients.chat import read_message
from moeyard.clients.doctor import (
    check_files,
    check_gpus,
    check_instructions,
    check_packages,
    check_port,
    check_python,
    check_shared,
    usable_cores,
)
from moeyard.last_resort import ENDING
from moeyard.listen import bind, check_ports, outside_url, reachable_url
from moeyard.local.startup import Startup
from moeyard.signals import Interrupts, last_resort, noted, run_apart

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8132"),
        ("localhost", "http://localhost:8132"),
        ("::1", "http://[::1]:8132"),
        ("::", "http://[::1]:8132"),
        ("0.0.0.0", "http://127.0.0.1:8132"),
    ],
)
def test_url_is_clickable(host: str, url: str) -> None:
    assert reachable_url(host, 8132) == url
    outside = outside_url(host, 8132)
    assert (outside is None) or (host in ("::", "0.0.0.0") and outside.endswith(":8132"))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_accept_both_families() -> None:
    with bind("::", 0) as sock:
        port = sock.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=HANG_SECONDS).close()


def test_errors_of_addresses() -> None:
    with pytest.raises(
        ValueError, match=r"--host 'no\.such\.host\.invalid' is unknown: .*; give an address"
    ) as refused:
        bind("no.such.host.invalid", 8000)
    assert "port" not in str(refused.value)
    with pytest.raises(ValueError, match="no address of this machine; choose another --host"):
        bind("203.0.113.7", 8000)
    with (
        bind("127.0.0.1", 0) as taken,
        pytest.raises(ValueError, match="stop what listens there, or choose another --port"),
    ):
        bind("127.0.0.1", taken.getsockname()[1])


def start_report(captures: bool, *, tty: bool = False) -> tuple[Startup, io.StringIO, list[float]]:
    """Return a start that writes to a string, with this clock."""
    out, now = io.StringIO(), [0.0]
    out.isatty = lambda: tty  # type: ignore[method-assign]
    return Startup(captures=captures, out=out, clock=lambda: now[0], interval=5.0), out, now


def test_log_gets_occasional_progress_lines() -> None:
    start, out, now = start_report(captures=True)
    start.stage("starting Ray")
    start.loading(0, 0)
    for second in range(12):
        now[0] = second
        start.loading(second << 28, 12 << 28)
    for _ in range(3):
        start.loading(12 << 28, 12 << 28)
    assert out.getvalue().splitlines() == [
        "starting Ray",
        "loading weights: 0 B of 3 GiB (0 %)",
        "loading weights: 1.25 GiB of 3 GiB (42 %)",
        "loading weights: 2.5 GiB of 3 GiB (83 %)",
        "weights are there; capturing CUDA graphs",
    ]


def test_terminal_gets_a_progress_bar() -> None:
    start, out, _ = start_report(captures=False, tty=True)
    start.loading(1 << 20, 4 << 20)
    start.loading(4 << 20, 4 << 20)
    assert "loading weights:   0%|" in out.getvalue()
    assert out.getvalue().endswith("weights are there; preparing to step\n")


def test_signals_are_raised_at_safe_points(capfd: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        with noted() as interrupts:
            interrupts.check()
            for number in ENDING:
                signal.raise_signal(number)  # nothing is raised here
            assert interrupts.count == 3
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
        assert [signal.getsignal(number) for number in before] == [signal.SIG_IGN] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capfd.readouterr().err == "stopping\n"


def test_repeated_interrupts_end_a_start_that_hangs() -> None:
    """With a frozen clock the process is patient; with a running one it exits with its child at the third signal."""
    code = (
        "import itertools, signal, subprocess, sys; from moeyard.signals import Interrupts;"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True);"
        "interrupts = Interrupts(patience=1.0, clock=itertools.count(step=float(sys.argv[1])).__next__);"
        "signal.signal(signal.SIGINT, interrupts.note);"
        "[signal.raise_signal(signal.SIGINT) for _ in range(3)]; child.kill(); child.wait(); sys.exit(3)"
    )
    for step, expected in (("0", 3), ("2", 130)):
        done = run_python(code, step)
        assert done.returncode == expected, done.stderr
        check_gone(int(done.stdout))


def run_python(code: str, *args: str, path: str = str(ROOT / "deploy")) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_SECONDS)


def check_gone(child: int) -> None:
    """Wait until a killed process has ended; an orphan may stay a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        until = time.monotonic() + HANG_SECONDS
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_block_without_cleanup_ends_at_once() -> None:
    """A block does not begin if a signal came before it."""
    code = (
        "import signal, subprocess, sys; from moeyard.signals import Interrupts; interrupts = Interrupts();"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True);"
        "signal.signal(signal.SIGINT, interrupts.note); block = interrupts.at_once(); block.__enter__();"
        "signal.raise_signal(signal.SIGINT); sys.exit(3)"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (130, "stopping\n")
    check_gone(int(done.stdout))
    interrupts = Interrupts()
    interrupts.count = 1
    with pytest.raises(KeyboardInterrupt), interrupts.at_once():
        pytest.fail("begun")


def test_process_blocked_in_c_code_ends() -> None:
    """ray.init may hold the interpreter's lock for good; here a C function does."""
    code = (
        "import ctypes, signal, subprocess; from moeyard.signals import last_resort;"
        "signal.signal(signal.SIGTERM, lambda *_: None);"
        "child = subprocess.Popen(['sleep', '600']); block = last_resort(); block.__enter__();"
        "print(child.pid, flush=True); libc = ctypes.PyDLL(None); mutex = ctypes.create_string_buffer(64);"
        "libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "deploy")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as held:
        assert held.stdout is not None
        child = int(held.stdout.readline())
        held.send_signal(signal.SIGTERM)
        _, err = held.communicate(timeout=HANG_SECONDS)
    assert (held.returncode, err) == (-signal.SIGKILL, "stopping: Ray holds the launcher up, so it is killed\n")
    check_gone(child)


def test_last_resort_ends_with_its_block() -> None:
    with last_resort():
        # A new process may not have its command line yet.
        while not (helpers := [p for p in psutil.Process().children() if "moeyard.last_resort" in p.cmdline()]):
            pass
        (helper,) = helpers
    assert not helper.is_running()
    assert signal.set_wakeup_fd(-1) == -1


def test_main_thread_handles_signals_while_ray_starts() -> None:
    """A handler runs during the call, the call's exception is raised, and the kernel needs its thread to stay."""
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    threads = []

    def call() -> None:
        threads.append(threading.current_thread())
        assert signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(HANG_SECONDS)
        raise ConnectionError("as said")

    try:
        with pytest.raises(ConnectionError, match="as said"):
            run_apart(call)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert threads[0].is_alive()
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_nohup_is_respected() -> None:
    """A signal that was ignored at the start stays ignored."""
    code = (
        "import signal; from moeyard.signals import noted, ending_signals\n"
        "with noted() as interrupts:\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    assert interrupts.count == 0 and signal.SIGTERM in ending_signals()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "deploy")}
    subprocess.run(
        ["nohup", sys.executable, "-c", code], check=True, env=env, timeout=HANG_SECONDS, stdin=subprocess.DEVNULL
    )


def test_interrupt_during_imports_is_silent() -> None:
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'moeyard.options': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from moeyard.entry import main\n"
        "sys.exit(main())"
    )
    folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
    done = run_python(code, "--version", path=folders)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


class Scarce(socket.socket):
    """A machine with 20 free ports."""

    bound = 0

    def bind(self, address: Any) -> None:
        Scarce.bound += 1
        if Scarce.bound > 20:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def test_start_without_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ray would wait for ever (docs/decisions.md)."""
    check_ports("127.0.0.1", num_workers=2)
    monkeypatch.setattr(socket, "socket", Scarce)
    with pytest.raises(
        ValueError, match=r"only 20 ports are free on 127\.0\.0\.1, 2 workers and Ray need 32 \(.* in use"
    ):
        check_ports("127.0.0.1", num_workers=2)


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON and as lines, with the demo's checkpoint, and with a port and a checkpoint that are unavailable."""
    demo = str(ROOT / "deploy" / "demo")
    code = main(["doctor", demo, "--port", "0", "--json"])
    result = json.loads(capsys.readouterr().out)
    found = {each["subject"]: each for each in result["findings"]}
    assert {"python", "torch", "ray", "cores", "memory", "shm", "files", "port", "clock", "gpus", "fit"} <= set(found)
    assert found["model"]["text"].startswith("demo: 6 layers, 32 experts")
    assert found["fit"]["level"] == "ok"
    assert result["problem"] == sum(each["level"] == "problem" for each in result["findings"])
    assert code == (1 if result["problem"] else 0)
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--port", port, "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        (model,) = [each for each in result["findings"] if each["subject"] == "model"]
        assert "not checked" in model["text"]
        assert [each["level"] for each in result["findings"] if each["subject"] == "port"] == ["problem"]
        assert main(["doctor", "/no/such/checkpoint", "--port", port]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("problem port") and "choose another --port" in line for line in lines)
    # A missing file is no question of model families.
    assert any(line.startswith("problem model") and "/no/such/checkpoint" in line for line in lines)
    assert not any("README" in line for line in lines)
    assert all(line.split()[0] in ("ok", "warning", "problem") for line in lines[:-2])


def test_doctor_reports_a_file_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other findings remain. A link to itself cannot be opened by any user."""
    for file in (ROOT / "deploy" / "demo").iterdir():
        (tmp_path / file.name).symlink_to("tokenizer.json" if file.name == "tokenizer.json" else file)
    assert main(["doctor", str(tmp_path), "--port", "0", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (text,) = [each["text"] for each in findings if each["level"] == "problem" and each["subject"] == "model"]
    assert text == f"{tmp_path}/tokenizer.json: Too many levels of symbolic links"


def test_findings_of_the_doctor() -> None:
    assert check_python("3.14.1", ">=3.11,<3.14").level == "problem"
    assert check_python("3.13.4", ">=3.11,<3.14").level == "ok"
    versions = {"ray": "2.40", "torch": "2.11"}
    requires = ["ray>=2.50,<3", "torch>=2.11", "zmq", "winloop; platform_system == 'Windows'", "ruff; extra == 'dev'"]
    levels = [(f.subject, f.level) for f in check_packages(requires, versions.get)]
    assert levels == [("ray", "problem"), ("torch", "ok"), ("zmq", "problem"), ("packages", "ok")]
    assert check_files(256, 2).level == "problem"
    assert "160 connections" in check_files(256, 2).text
    assert check_files(1024, 2).level == "warning"
    assert check_files(65536, 2).level == "ok"
    assert check_shared(64 << 20).level == "problem"
    assert check_shared(1 << 30).level == "ok"
    assert usable_cores(8, "150000 100000\n") == 1.5
    assert usable_cores(8, "max 100000\n") == 8
    assert usable_cores(8, "") == 8
    cpu = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"
    assert "AMX" in check_instructions("x86_64", cpu, on_cpu=True).text
    assert check_instructions("x86_64", "flags : avx2", on_cpu=True).level == "warning"
    assert check_instructions("x86_64", "flags : avx2", on_cpu=False).level == "ok"
    assert check_port("127.0.0.1", 0).level == "ok"


def test_gpu_findings_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per GPU, then the requested one, or one per worker."""

    def said(device: str, num_workers: int = 1) -> list[tuple[str, str]]:
        return [(f.subject, f.level) for f in check_gpus(device, num_workers) if f.subject != "driver"]

    pretend(monkeypatch, (9, 0), (8, 0))
    each = [("cuda:0", "ok"), ("cuda:1", "warning")]
    assert said("cpu") == said("cuda") == said("cuda:0") == each
    assert said("cuda:1") == said("cuda:9") == said("cuda", 2) == said("cuda", 3) == [*each, ("gpus", "problem")]
    *_, last = check_gpus("cuda:9")
    assert str(last).endswith("--device cuda:9: there are 2 GPUs, the last is cuda:1; choose one of these")
    *_, last = check_gpus("cuda:1")
    assert last.text.startswith("--device cuda:1: NVIDIA A100 has compute capability 8.0, the kernels need 9.0")
    pretend(monkeypatch, (9, 0), (9, 0))
    *_, last = check_gpus("cuda", 4)
    assert last.text.startswith("--device cuda --workers 4 takes a GPU each: there are 2 GPUs")
    assert last.advice == "lower --workers"
    pretend(monkeypatch, (9, 0), free=torch.AcceleratorError("CUDA error: out of memory"))
    *_, last = check_gpus("cuda")
    assert last.level == "warning"
    assert "end what runs there" in str(last)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "doctor", "expert-slots", "prompt-tokens"):
        assert word in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=HANG_SECONDS)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = (
        "COMP_WORDS=(moeyard bench server --con); COMP_CWORD=3; COMP_LINE='moeyard bench server --con';"
        'COMP_POINT=${#COMP_LINE}; _shtab_moeyard; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    assert done.stdout.split() == ["--concurrency"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["bench", "http://host:1"], ["bench", "server", "http://host:1"]),
        (["bench", "--rate", "3"], ["bench", "server", "--rate", "3"]),
        (["bench", "engine", "--json"], ["bench", "engine", "--json"]),
        (["bench", "server"], ["bench", "server"]),
        (["bench", "--help"], ["bench", "--help"]),
        (["bench"], ["bench"]),
        (["serve", "bench"], ["serve", "bench"]),
    ],
)
def test_bench_needs_no_subject(given: list[str], meant: list[str]) -> None:
    assert with_subject(given) == meant


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "def f():", "    pass", '"""'], "def f():\n    pass"),
        (['"""one', 'two"""'], "one\ntwo"),
        ([EOFError()], None),
        ([KeyboardInterrupt()], ""),
    ],
)
def test_messages_with_several_lines(
    typed: list[str | BaseException], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(typed)

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert read_message() == message
    assert list(lines) == []
