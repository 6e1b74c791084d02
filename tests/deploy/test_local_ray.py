"""The processes of a private Ray, played by copies of `sleep` that have its daemons' names."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.limits import HANG_SECONDS

from moeyard.fleet.ray.processes import HEAD, RAYLET, STOPPED_SECONDS, LocalRay

Start = Callable[[str], subprocess.Popen[bytes]]


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a child of a name; all end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str) -> subprocess.Popen[bytes]:
        program = tmp_path / name
        if not program.exists():
            shutil.copy("/bin/sleep", program)
        started.append(subprocess.Popen([program, "600"]))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(HANG_SECONDS)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it. It stays a zombie, as a daemon does for which Ray does not wait."""
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        pass


def test_it_is_known_which_daemon_has_ended(start: Start) -> None:
    head, raylet = start(HEAD), start(RAYLET)
    ray = LocalRay()
    assert ray.ended() is None, "nothing was started"
    ray.find()
    assert ray.ended() is None
    end(head)
    assert ray.ended() == HEAD
    end(raylet)
    assert ray.ended() == RAYLET, "all ranks end with it"
    start(HEAD), start(RAYLET)
    ray.find()
    assert ray.ended() is None, "those of the next Ray are meant"


def test_a_stopped_process_is_killed_after_its_time_while_ranks_start(start: Start) -> None:
    head, raylet, clock = start(HEAD), start(RAYLET), Clock()
    ray = LocalRay(clock=clock)
    ray.find()
    stop(head)
    assert ray.kill_stopped(starting=True) == []
    clock.now += STOPPED_SECONDS - 0.1
    assert ray.kill_stopped(starting=True) == []
    assert ray.kill_stopped(starting=False) == [], "serving needs no daemon"
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == [], "its time begins again"
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True, spare=[head.pid]) == []
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == []
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == [f"{HEAD} (process {head.pid})"]
    assert head.wait(HANG_SECONDS) == -signal.SIGKILL
    assert raylet.poll() is None


# A raylet whose child is a worker process, and then an agent.
TREE = """
import shutil, subprocess, sys
folder = sys.argv[1]
for name in ("ray::RankActor", "ray::SomeAgent"):
    shutil.copy("/bin/sleep", f"{folder}/{name}")
    print(subprocess.Popen([f"{folder}/{name}", "600"]).pid, flush=True)
sys.stdin.read()
"""


def test_a_stopped_worker_process_is_killed_and_an_agent_is_not(tmp_path: Path) -> None:
    """The raylet ends with its agents, and all ranks with the raylet."""
    clock = Clock()
    ray = LocalRay(clock=clock)
    # An interpreter with the raylet's name: this process may have other children that are called "python".
    (tmp_path / RAYLET).symlink_to(sys.executable)
    command = [str(tmp_path / RAYLET), "-c", TREE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None
        worker, agent = (psutil.Process(int(raylet.stdout.readline())) for _ in range(2))
        try:
            ray.find()
            for process in (worker, agent):
                process.suspend()
                while process.status() != psutil.STATUS_STOPPED:
                    pass
            assert ray.kill_stopped(starting=True) == []
            clock.now += STOPPED_SECONDS
            assert ray.kill_stopped(starting=True) == [f"ray::RankActor (process {worker.pid})"]
        finally:
            for process in (worker, agent):
                process.kill()
            raylet.stdin.close()  # type: ignore[union-attr]


# In a process of its own: all that it has started, and is not Python's multiprocessing, ends.
END = """
import subprocess, sys
from moeyard.fleet.ray.processes import LocalRay
router = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # multiprocessing"])
names = ("gcs_server", "raylet", "monitor")
head, raylet, monitor = (subprocess.Popen([f"{sys.argv[1]}/{name}", "600"]) for name in names)
raylet.send_signal(19)
ray = LocalRay()
ray.find()
head.kill()
ray.kill()
print([process.wait(timeout=600) for process in (head, raylet, monitor)], router.poll(), ray.ended())
router.kill()
"""


def test_its_end_spares_the_launchers_own_children(tmp_path: Path) -> None:
    """A router is a child, too: Python's multiprocessing starts it."""
    for name in (HEAD, RAYLET, "monitor"):
        shutil.copy("/bin/sleep", tmp_path / name)
    command = [sys.executable, "-c", END, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert ended.stdout == "[-9, -9, -9] None None\n"
