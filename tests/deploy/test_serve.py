"""The real `moeyard serve` and `moeyard demo` with Ray: startup, requests, sockets, memory, idle time, shutdown."""

import base64
import contextlib
import fcntl
import io
import ipaddress
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.torch import load_file
from tests.checkpoints import edit_tensors, make_checkpoint
from tests.limits import HANG_SECONDS
from tests.strangers import mechanism

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "deploy" / "demo")
MARKER = "MOEYARD_TEST_MARKER"
MAX_WORKER_BYTES = 700 * 1024**2
# Per second, for each worker, and for launcher and router together. Ray's main loop causes 100 of a worker's 150.
MAX_IDLE_WAKE_UPS = 200
MAX_IDLE_CORES = 0.06
# Only time shows that no process wakes: after the last request, and during the measurement.
SETTLE_SECONDS, IDLE_SECONDS = 3.0, 10.0
READY = re.compile(
    r"ready: (?P<url>http://127\.0\.0\.1:\d+)/v1 serves (moeyard-)?demo \((float32|bfloat16)\) "
    r"on (1 worker|[2-9] workers), device (cpu|cuda), expert slots \d+/\d+ per worker"
    r"(, exchange (zmq \(ranks compute on CPUs\)|nvlink \(.+ that reach each other\)))?, "
    r"up to \d+ tokens, after \d+\.\d s\n"
)

LONG_ANSWER = {"prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
get, post = partial(httpx.get, timeout=HANG_SECONDS), partial(httpx.post, timeout=HANG_SECONDS)


def free_port() -> int:
    """Return a free port that neither the kernel (temporary ports) nor Ray (workers, 10002 to 19999) assigns."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20000, 32000))) as probe:
            return int(probe.getsockname()[1])


def marked(marker: str, word: str = "") -> list[psutil.Process]:
    """Return processes that inherited `marker`, orphans included, with `word` in their command lines.

    A process that was sent SIGKILL is left out, because it may still wait for a core.
    """
    found = []
    for process in psutil.process_iter():
        folder = Path(f"/proc/{process.pid}")
        try:
            inherited = marker.encode() in (folder / "environ").read_bytes().split(b"\0")
            if inherited and word.encode() in (folder / "cmdline").read_bytes():
                pending = re.findall(r"^S\w+Pnd:\s*(\w+)$", (folder / "status").read_text(), re.M)
                if not any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending):
                    found.append(process)
        except OSError:
            continue  # the process has ended, or another user owns it
    return found


class Command:
    """A running command line whose processes are found by a marker in their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        value = secrets.token_hex(8)
        if arguments[0] in ("serve", "demo") and "--device" not in arguments:
            # These tests are about CPUs, also on a machine with GPUs.
            arguments = (*arguments, "--device", "cpu")
        self._marker = f"{MARKER}={value}"
        self.out, self.err = folder / "out", folder / "err"
        # pytest's own folder names are too long for Ray's sockets.
        self.temporary = Path(tempfile.mkdtemp())
        folders = os.pathsep.join(str(ROOT / name) for name in ("worker", "router", "kernels", "deploy"))
        # Without an installation, the needed packages are on the caller's path.
        folders += os.pathsep + os.environ.get("PYTHONPATH", "")
        self._environment = {**os.environ, "PYTHONPATH": folders, "TMPDIR": str(self.temporary)}
        self._shared_before = shared_files()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moeyard", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self._environment, MARKER: value},
                start_new_session=True,
            )
        self.url = ""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command line to its end; it finds only this server's control socket."""
        command = [sys.executable, "-m", "moeyard", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self._environment)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """All living processes of this command, orphans included."""
        return marked(self._marker, word)

    def workers(self) -> list[psutil.Process]:
        """The ranks' processes."""
        return self.processes("ray::RankActor")

    def ranks(self) -> dict[int, psutil.Process]:
        """The process of each present rank, found by the endpoint that the fleet reports."""
        workers = get(f"{self.url}/v1/fleet").json()["workers"]
        ports = {each["rank"]: int(each["endpoint"].rpartition(":")[2]) for each in workers if each["endpoint"]}
        return {rank: process for rank, port in ports.items() for process in self.workers() if listens(process, port)}

    def router(self) -> psutil.Process:
        """The process with the API's port, if there is only one."""
        (found,) = self.processes("multiprocessing.spawn")
        return found

    def wait_ready(self) -> None:
        """Wait for the ready line."""
        self.wait_for(lambda: READY.search(self.out.read_text()) is not None)
        match = READY.search(self.out.read_text())
        assert match is not None
        self.url = match["url"]

    def is_ready(self) -> bool:
        """Return whether a router answers that it is ready."""
        with contextlib.suppress(httpx.TransportError):
            return get(f"{self.url}/readyz").status_code == 200
        return False

    def incidents(self) -> list[dict[str, Any]]:
        return list(get(f"{self.url}/v1/fleet/incidents").json()["incidents"])

    def wait_whole(self, times: int = 1) -> None:
        """Wait until the fleet has recovered `times` times and is ready."""
        self.wait_for(lambda: self.err.read_text().count(" the fleet is whole again ") == times)
        self.wait_for(self.is_ready)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            assert self.process.poll() is None, self.report("the command ended")
            assert time.monotonic() < deadline, self.report("the command hangs")
            time.sleep(0.05)

    def report(self, what: str) -> str:
        """Return `what` with the command's output."""
        return f"{what}; code {self.process.poll()}\n{self.out.read_text()}\n{self.err.read_text()}"

    def check_end(self, code: int) -> None:
        """Wait for a clean exit: its code, no process, no name in shared memory, no folder of sockets."""
        try:
            assert self.process.wait(HANG_SECONDS) == code, self.report("wrong exit code")
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report("the command hangs")) from None
        left = [(p.pid, p.cmdline()) for p in self.processes()]
        assert not left, self.report(f"still running: {left}")
        assert "Traceback" not in self.err.read_text(), self.err.read_text()
        self.check_names()
        assert not list(self.temporary.glob("*moeyard-sockets-*")), "a folder of sockets is left"

    def check_names(self) -> None:
        """Require that no new name in shared memory stays.

        Names are locked by living processes of other tests. Other tests also kill ranks, whose names stay until their
        fleet removes them.
        """
        deadline = time.monotonic() + HANG_SECONDS
        while left := [path for path in shared_files() - self._shared_before if is_left(path)]:
            assert time.monotonic() < deadline, f"shared memory is left: {left}"
            time.sleep(0.1)

    def close(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in self.processes():
            process.kill()
        self.process.wait(HANG_SECONDS)
        shutil.rmtree(self.temporary, ignore_errors=True)


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").glob("moeyard-*"))


def is_left(path: Path) -> bool:
    """Return whether the process that made this file has ended: a living one has it locked (leftovers.py)."""
    with contextlib.suppress(OSError), path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def listens(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp"))
    return False


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start command lines; processes still running at the end are killed."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """One fleet of two workers for all tests that do not damage it; the last of these stops it."""
    served = Command(tmp_path_factory.mktemp("serve"), "serve", DEMO, "--workers", "2", "--port", "0")
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def stream_of(served: Command, **body: Any) -> Iterator[Iterator[str]]:
    """Yield the data of a streamed completion's events."""
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=HANG_SECONDS) as answer:
        yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def text_of(stream: Iterable[str]) -> str:
    """Return the text of a complete stream."""
    *events, last = stream
    assert last == "[DONE]", last
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def answer(served: Command, **other: Any) -> str:
    """Return the whole text of the long answer."""
    return str(post(f"{served.url}/v1/completions", json=LONG_ANSWER | other).json()["choices"][0]["text"])


def chat(url: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    fields = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **body}
    return post(f"{url}/v1/chat/completions", json=fields)


def test_one_ready_line(service: Command) -> None:
    """Scripts wait for the line, so stdout has nothing else; stderr has messages without progress bars."""
    assert READY.fullmatch(service.out.read_text())
    skipped = r"skipped \d+ tensors \(multi-token prediction layer\), [\w.]+ first\n"
    stages = r"starting Ray\nstarting 2 workers, device cpu\n(loading weights: .*\n)*"
    stages += r"weights are there; preparing to step\n"
    loaded = r"loaded [\d.]+ MiB of weights in [\d.]+ s \([\d.]+ GB/s\)\n"
    formats = r"tool calls: none, reasoning: none\n"
    connections = r"served at once: \d+ connections, by the limit of \d+ open files\n"
    assert re.fullmatch(stages + loaded + skipped + formats + connections, service.err.read_text())


def test_page_has_settings_and_waits(service: Command) -> None:
    """The figures of the page at / that only a whole server has."""
    settings = {each["name"]: each for each in get(f"{service.url}/v1/fleet/config").json()["settings"]}
    assert (settings["model"]["value"], settings["model"]["source"]) == ("demo", "flag")
    assert (settings["workers"]["value"], settings["workers"]["source"]) == (2, "flag")
    assert (settings["port"]["value"], settings["port"]["why"]) == (int(service.url.rpartition(":")[2]), "a free port")
    assert settings["max-model-len"]["value"] == get(f"{service.url}/v1/models").json()["data"][0]["max_model_len"]
    chat(service.url)
    (latest, *_) = get(f"{service.url}/v1/fleet/live").json()["requests"]
    spent = latest["prefill"] + latest["decode"]
    assert 0 < latest["lockstep"] < spent, "each step waits for the other rank's plan"
    assert 0 <= latest["fetch"] < spent


def test_listens_on_loopback_only(service: Command) -> None:
    """This includes Ray's processes."""
    addresses = {
        (process.name(), ipaddress.ip_address(connection.laddr.ip))
        for process in service.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses, "no process listens"
    beyond = [(n, ip) for n, ip in addresses if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback]
    assert not beyond


def test_workers_are_locked(service: Command) -> None:
    """Workers accept only the router, also on one host."""
    endpoints = [worker["endpoint"] for worker in get(f"{service.url}/v1/fleet").json()["workers"]]
    assert len(endpoints) == 2
    for endpoint in endpoints:
        assert mechanism(endpoint) == b"CURVE".ljust(20, b"\0")
    assert chat(service.url).status_code == 200


def test_memory_of_workers(service: Command) -> None:
    workers = service.workers()
    assert len(workers) == 2
    sizes = [worker.memory_full_info() for worker in workers]
    print("workers, MiB:", [(s.rss >> 20, s.pss >> 20, s.uss >> 20) for s in sizes], "(RSS, PSS, USS)")
    assert all(size.rss < MAX_WORKER_BYTES for size in sizes)


def test_killed_router_reconnects_to_the_fleet(service: Command) -> None:
    """A new router gets the port; the ranks stay with all their state and drop the dead router's requests."""
    workers = {worker.pid for worker in service.workers()}
    first = chat(service.url).json()
    router = service.router()
    with stream_of(service, **{**LONG_ANSWER, "max_tokens": 900}) as lines:
        next(lines)
        router.kill()
        with pytest.raises(httpx.TransportError):
            list(lines)
    service.wait_for(service.is_ready)
    again = chat(service.url).json()
    assert again["choices"] == first["choices"]
    assert (
        again["system_fingerprint"]
        == first["system_fingerprint"]
        == get(f"{service.url}/version").json()["system_fingerprint"]
    )
    assert {worker.pid for worker in service.workers()} == workers
    ranks = f"{service.url}/v1/fleet/live"
    service.wait_for(lambda: not get(ranks).json()["totals"]["num_running"])
    assert len(re.findall(r"router 0 ended by itself \(exit code -9\)", service.err.read_text())) == 1


def wake_ups(processes: list[psutil.Process]) -> int:
    """Return how often their threads have slept so far. (A process's own count covers only its main thread.)"""
    slept = 0
    for process in processes:
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # the thread has ended
                slept += int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.M)[1])
    return slept


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


@pytest.mark.slow
@pytest.mark.timing
def test_idle_fleet_sleeps(service: Command) -> None:
    """Workers, launcher and router; Ray's daemons are only printed."""
    time.sleep(SETTLE_SECONDS)
    workers = service.workers()
    router = [psutil.Process(service.process.pid), service.router()]
    rest = [p for p in service.processes() if p not in workers + router]
    groups = {"workers": workers, "router": router, "Ray": rest}
    before = {name: (wake_ups(group), cpu_seconds(group)) for name, group in groups.items()}
    begun = time.monotonic()
    time.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - begun
    woken = {name: (wake_ups(group) - before[name][0]) / seconds for name, group in groups.items()}
    cores = {name: (cpu_seconds(group) - before[name][1]) / seconds for name, group in groups.items()}
    print("idle, wake-ups per second:", woken, "cores:", cores)
    assert woken["workers"] < len(workers) * MAX_IDLE_WAKE_UPS
    assert woken["router"] < MAX_IDLE_WAKE_UPS
    # No process spins. A wake-up costs 65 us on an idle host, and twice that on a busy one.
    assert cores["workers"] + cores["router"] < MAX_IDLE_CORES


def test_ctrl_c_in_a_terminal(service: Command) -> None:
    """SIGINT reaches every process of the group, Ray's included. This is the last test of the shared fleet."""
    os.killpg(service.process.pid, signal.SIGINT)
    service.check_end(0)
    assert READY.fullmatch(service.out.read_text())
    with pytest.raises(httpx.ConnectError):
        get(service.url)


def test_lost_worker_fails_no_request(command: Callable[..., Command]) -> None:
    """A stream keeps its text: the other worker takes the experts over, and returns them later.

    Then both are lost, and the launcher stops during the recovery.
    """
    served = command("serve", DEMO, "--workers", "2", "--port", "0")
    served.wait_ready()
    expected, victim = answer(served), served.workers()[1]
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        victim.kill()
        assert text_of([first, *lines]) == expected
    served.wait_whole()
    back, lost = served.incidents()
    assert re.search(r"rank [01] lost (at|after) step \d+", json.dumps(lost)), lost
    assert re.search(r"rank [01] is back", json.dumps(back)), back
    then = r"(.*\n)* ?.* the fleet is whole again [\d.]+ s after rank \1 is back"
    assert re.search(rf" serves without rank ([01]) [\d.]+ s after rank \1 lost {then}", served.err.read_text())
    for worker in served.workers():
        worker.kill()
    served.wait_for(lambda: "recovering" in get(f"{served.url}/readyz").text)
    assert get(f"{served.url}/livez").status_code == 200
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)


@pytest.mark.slow
def test_worker_lost_too_often_ends_the_server(command: Callable[..., Command]) -> None:
    """The server exits with one line and a code that a restart policy sees; open requests end with an error."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--restart-limit", "1")
    served.wait_ready()
    victim = served.workers()[1]
    with stream_of(served, **LONG_ANSWER) as lines:
        next(lines)
        victim.kill()
        *_, last = lines
    how = r"(rank [01] lost|the process of rank [01] has|worker [01] at \S+ is gone)"
    said = rf"rank [01] was lost 1 times in 60 s: {how}"
    assert re.search(rf'"error".*{said}', last), last
    served.check_end(1)
    assert len(re.findall(rf" moeyard.fleet.machine the fleet has failed: {said}", served.err.read_text())) == 1


@pytest.mark.slow
def test_ray_is_restarted_with_all_ranks(command: Callable[..., Command]) -> None:
    """Without Ray's head the ranks serve until one is lost; without the raylet all are lost. No stream notices."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0")
    served.wait_ready()
    expected, router = answer(served), served.router()
    (head,) = served.processes("/gcs_server")
    head.kill()
    notice = (
        " moeyard.fleet.machine Ray's gcs_server has ended: serving goes on; when a rank is lost, Ray and all ranks are"
    )
    served.wait_for(lambda: notice in served.err.read_text())
    assert answer(served) == expected
    assert [get(f"{served.url}/{page}").status_code for page in ("livez", "readyz")] == [200, 200]
    workers = served.workers()
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        workers[1].kill()
        assert text_of([first, *lines]) == expected
    served.wait_whole()
    assert len(served.workers()) == 2
    assert not any(worker.is_running() for worker in workers)
    (raylet,) = served.processes("/raylet/raylet")
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        raylet.kill()
        assert text_of([first, *lines]) == expected
    served.wait_whole(2)
    assert served.router() == router
    served.process.send_signal(signal.SIGTERM)
    served.check_end(0)


@pytest.mark.slow
def test_hanging_replacements_are_replaced_up_to_the_limit(command: Callable[..., Command]) -> None:
    """Replacements are stopped as soon as they appear: first one, while a request waits; then all."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--expert-takeover", "never")
    served.wait_ready()
    expected, known = answer(served), {worker.pid for worker in served.workers()}

    def new() -> list[psutil.Process]:
        return [worker for worker in served.workers() if worker.pid not in known]

    served.workers()[1].kill()
    served.wait_for(lambda: bool(new()))
    (hung,) = new()
    hung.suspend()
    assert answer(served) == expected, "the request must wait"
    assert f"(process {hung.pid}) of Ray was stopped for 5 s, and is killed" in served.err.read_text()
    served.wait_whole()
    known |= {worker.pid for worker in served.workers()}
    served.workers()[1].kill()
    while served.process.poll() is None:
        for process in new():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(0.05)
    served.check_end(1)
    assert re.search(r" the fleet has failed: rank [01] was lost 3 times ", served.err.read_text())


@pytest.mark.slow
def test_error_restarts_the_only_worker(command: Callable[..., Command], tmp_path: Path) -> None:
    """A token has a NaN embedding: the request that uses it fails, and a new process serves the others."""
    model = make_checkpoint(tmp_path / "spoilt", "qwen3_moe", tokenizer=True)
    name = "model.embed_tokens.weight"
    embedding = load_file(model / "model.safetensors")[name]
    embedding[7] = float("nan")
    edit_tensors(model, add={name: embedding})
    served = command("serve", str(model), "--workers", "1", "--port", "0", "--served-model-name", "demo")
    served.wait_ready()
    body = {"prompt": [5, 6, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    before = post(f"{served.url}/v1/completions", json=body).json()["choices"]
    (worker,) = served.workers()
    bad = post(f"{served.url}/v1/completions", json={**body, "prompt": [5, 7]})
    named = r"rank 0: logits of step \d+ are not finite: request cmpl-\w+-0"
    assert bad.status_code == 503
    assert re.search(named, bad.json()["error"]["message"])
    end = rf"process {worker.pid} still runs, and is killed"
    lost, whole = rf" lost rank 0: {named}; replacing; rank 0: {end}\n", r" the fleet is whole again [\d.]+ s after "
    again = rf"{lost}(.*\n)* ?.*{whole}{named} \(losses .* s\)\n"
    served.wait_for(lambda: re.search(again, served.err.read_text()) is not None)
    served.wait_for(served.is_ready)
    assert post(f"{served.url}/v1/completions", json=body).json()["choices"] == before
    (replaced,) = served.workers()
    assert replaced.pid != worker.pid
    # A killed worker is also replaced.
    replaced.kill()
    served.wait_whole(2)
    assert post(f"{served.url}/v1/completions", json=body).json()["choices"] == before
    # Like a closed terminal: to the whole group.
    os.killpg(served.process.pid, signal.SIGHUP)
    served.check_end(0)


def test_serves_random_weights_and_sigterm_ends_streams(command: Callable[..., Command]) -> None:
    """Random weights and no tokenizer: token ids in and out. A service manager stops it during an answer."""
    shape = ("--load-format", "dummy", "--shape", "moeyard-demo", "--layers", "2")
    served = command("serve", *shape, "--enable-return-routed-experts", "--port", "0")
    served.wait_ready()
    assert "prompts are token ids" in served.err.read_text()
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    answer = post(f"{served.url}/v1/completions", json=body).json()
    assert answer["model"] == "moeyard-demo"
    assert len(answer["choices"][0]["token_ids"]) == 4
    sampling = {"max_tokens": 4, "temperature": 0}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
    (choice,) = post(f"{served.url}/inference/v1/generate", json=body).json()["choices"]
    assert choice["token_ids"] == answer["choices"][0]["token_ids"]
    assert choice["routed_experts"] == answer["choices"][0]["routed_experts"]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert (experts.shape, experts.dtype) == ((6, 2, 4), np.uint8)
    assert not experts[:, 0].any(), "the first layer is dense"
    assert post(f"{served.url}/v1/completions", json={"prompt": "text"}).status_code == 400
    with stream_of(served, prompt=[1], max_tokens=300, ignore_eos=True, model="moeyard-demo") as lines:
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        *_, last = lines
    assert last == "[DONE]" or "stopping" in last or "shutting down" in last, last
    served.check_end(0)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("after", ["starting Ray", "starting 1 worker", "weights are there"])
def test_three_interrupts_while_starting(command: Callable[..., Command], after: str) -> None:
    """In a terminal they reach Ray's processes too; the server stops cleanly at once, whatever it was starting."""
    started = command("serve", DEMO, "--workers", "1", "--port", "0")
    started.wait_for(lambda: after in started.err.read_text())
    for pause in (0.2, 0.05, 0.0):
        os.killpg(started.process.pid, signal.SIGINT)
        time.sleep(pause)  # like a person: all of it while Ray starts or stops
    started.check_end(130)
    assert started.out.read_text() == ""
    # A line that was being written may follow the handler's line; no later stage does.
    said = started.err.read_text().splitlines()
    assert "stopping" in said
    assert not [line for line in said if line.startswith("ready: ")]


def test_sigterm_while_starting(command: Callable[..., Command]) -> None:
    """The signal arrives during ray.init; everything that it started ends too."""
    started = command("serve", DEMO, "--workers", "1", "--port", "0")
    started.wait_for(lambda: bool(started.processes("/gcs_server")))
    started.process.send_signal(signal.SIGTERM)
    started.check_end(130)
    # Ray's gRPC rarely reports a thread that it cannot start during shutdown.
    said = [line for line in started.err.read_text().splitlines() if "thd.cc" not in line]
    assert said == ["starting Ray", "stopping"]


@pytest.mark.slow
def test_metrics_port_in_use(command: Callable[..., Command]) -> None:
    """One rank fails after it reserved its host's shared resources; none of these remain."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        started = command("serve", DEMO, "--workers", "2", "--port", "0", "--metrics-port-base", str(port - 1))
        started.check_end(2)
    last = started.err.read_text().splitlines()[-1]
    assert re.fullmatch(
        rf"moeyard: metrics of worker 1 cannot listen on 127\.0\.0\.1:{port}: .* --metrics-port-base", last
    )


def test_demo_once(command: Callable[..., Command]) -> None:
    """It stops by itself, even if a shell's `&` ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shown = command("demo", "--once", "--port", "0")
    finally:
        signal.signal(signal.SIGINT, before)
    shown.check_end(0)
    out = shown.out.read_text()
    assert "Fellow-Citizens of the Senate and House of Representatives" in out
    for row in ("tokens +80", r"TTFT +[\d.]+ ms", r"TPOT +[\d.]+ ms", r"expert-cache hit rate +[\d.]+ %"):
        assert re.search(f"(?m)^{row}$", out), out
    assert re.search(r"(?m)^exchange per layer +\d+ us ", out)
    assert re.search(r"(?m)^API +http://127\.0\.0\.1:\d+/v1$", out)
    assert len(re.findall(r"(?m)http://127\.0\.0\.1:\d+/metrics$", out)) == 3


@pytest.mark.sampled(0)
def test_interrupt_during_the_demonstration(command: Callable[..., Command]) -> None:
    """The user ended it at once, by a second Ctrl-C, so it has not failed."""
    shown = command("demo", "--port", "0")
    shown.wait_for(lambda: "> Give" in shown.out.read_text())
    for _ in range(2):
        shown.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    shown.check_end(0)
    assert "failed" not in shown.out.read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one node with a token, started by someone else. It claims two GPUs, 1 and 0."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's own value, 15, they wait for every other test
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    port = free_port()
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = ["start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--num-gpus=2"]
    with (tmp_path / "ray").open("wb") as log:
        head = subprocess.Popen(
            [*ray, *start, "--block", "--include-dashboard=false"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while b"Ray runtime started" not in (tmp_path / "ray").read_bytes():
            assert head.poll() is None, (tmp_path / "ray").read_text()
            assert time.monotonic() < deadline, (tmp_path / "ray").read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        children = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(HANG_SECONDS)
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
def test_serves_on_a_running_cluster(cluster: str, command: Callable[..., Command]) -> None:
    served = command(
        "serve", DEMO, "--workers", "2", "--port", "0", "--ray-address", cluster, "--worker-host", "127.0.0.1"
    )
    served.wait_ready()
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = post(f"{served.url}/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 4
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)
    # The cluster belongs to the operator: it continues, with the workers' CPUs free for the next fleet.
    again = command(
        "serve", DEMO, "--workers", "2", "--port", "0", "--ray-address", cluster, "--worker-host", "127.0.0.1"
    )
    again.wait_ready()
    assert post(f"{again.url}/v1/completions", json=body).json()["choices"] == answer["choices"]
    again.process.send_signal(signal.SIGINT)
    again.check_end(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_while_the_gcs_of_its_cluster_is_stopped(
    cluster: str, command: Callable[..., Command], number: signal.Signals
) -> None:
    """A scale-up is refused by name meanwhile, and requests are answered. The ranks end once the GCS continues."""
    served = command(
        "serve", DEMO, "--workers", "2", "--port", "0", "--ray-address", cluster, "--worker-host", "127.0.0.1"
    )
    served.wait_ready()
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    (head,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
    ranks = [child for child in psutil.Process().children(recursive=True) if "RankActor" in child.name()]
    assert len(ranks) == 2
    head.suspend()
    try:
        refused = served.run("scale", "3")
        assert "Ray's GCS has not answered for 5 s" in refused.stderr, refused
        assert refused.returncode == 1
        assert post(f"{served.url}/v1/completions", json=body).status_code == 200
        served.process.send_signal(number)
        served.check_end(0)
    finally:
        head.resume()
    psutil.wait_procs(ranks, timeout=HANG_SECONDS)
    assert not any(rank.is_running() for rank in ranks)
