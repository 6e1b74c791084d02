"""The processes of a private Ray, played by copies of `sleep` with the names of its daemons."""

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
    """Start a child with this name; all end with the test."""
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
    """Kill a process. It stays a zombie, like a daemon that Ray does not reap."""
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        pass


def test_ended_daemon_is_named(start: Start) -> None:
    head, raylet = start(HEAD), start(RAYLET)
    ray = LocalRay()
    assert ray.ended() is None, "no daemon was started"
    ray.find()
    assert ray.ended() is None
    end(head)
    assert ray.ended() == HEAD
    end(raylet)
    assert ray.ended() == RAYLET, "the raylet must be reported first"
    start(HEAD), start(RAYLET)
    ray.find()
    assert ray.ended() is None, "only the new daemons may count"


def test_stopped_daemon_is_killed_while_ranks_start(start: Start) -> None:
    head, raylet, clock = start(HEAD), start(RAYLET), Clock()
    ray = LocalRay(clock=clock)
    ray.find()
    stop(head)
    assert ray.kill_stopped(starting=True) == []
    clock.now += STOPPED_SECONDS - 0.1
    assert ray.kill_stopped(starting=True) == []
    assert ray.kill_stopped(starting=False) == [], "serving ranks need no daemon"
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == [], "the time limit must start again"
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True, spare=[head.pid]) == []
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == []
    clock.now += STOPPED_SECONDS
    assert ray.kill_stopped(starting=True) == [f"{HEAD} (process {head.pid})"]
    assert head.wait(HANG_SECONDS) == -signal.SIGKILL
    assert raylet.poll() is None


# A raylet with a worker process, and then an agent, as children.
TREE = """
import shutil, subprocess, sys
folder = sys.argv[1]
for name in ("ray::RankActor", "ray::SomeAgent"):
    shutil.copy("/bin/sleep", f"{folder}/{name}")
    print(subprocess.Popen([f"{folder}/{name}", "600"]).pid, flush=True)
sys.stdin.read()
"""


def test_stopped_worker_is_killed_and_an_agent_is_not(tmp_path: Path) -> None:
    """A raylet ends with its agents, and the raylet must be reported first."""
    clock = Clock()
    ray = LocalRay(clock=clock)
    # An interpreter with the raylet's name, because this process may have other children named "python".
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


# In its own process, where all children end except those of Python's multiprocessing.
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


def test_kill_spares_the_launchers_own_children(tmp_path: Path) -> None:
    """A router is also a child, started by Python's multiprocessing."""
    for name in (HEAD, RAYLET, "monitor"):
        shutil.copy("/bin/sleep", tmp_path / name)
    command = [sys.executable, "-c", END, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert ended.stdout == "[-9, -9, -9] None None\n"


# In its own process, as above. A raylet that is killed leaves its agent to init.
ORPHAN = """
import subprocess, sys
import psutil
from moeyard.fleet.ray.processes import LocalRay, _lives
command = [f"{sys.argv[1]}/raylet", "-c", sys.argv[2], sys.argv[1]]
raylet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
family = [psutil.Process(int(raylet.stdout.readline())) for _ in range(2)]
ray = LocalRay()
ray.find()
raylet.kill()
raylet.wait()
alone = [_lives(process) for process in family]
ray.kill()
print(alone, [_lives(process) for process in family])
"""


def test_agents_end_with_a_raylet_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / RAYLET).symlink_to(sys.executable)
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), TREE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert ended.stdout == "[True, True] [False, False]\n"
