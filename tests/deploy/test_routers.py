"""The launcher's view of its routers, message by message, without processes."""

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe

import psutil
import pytest
from tests.limits import HANG_SECONDS

from moeyard.fleet import routers
from moeyard.fleet.routers import RouterProcesses
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.orders import UNKNOWN, Drain
from moeyard_router.http.process import Obeyed

CONFIG = RouterConfig(
    model_name="tiny",
    model_path=None,
    workers=(WorkerAddress(rank=0, endpoint="tcp://127.0.0.1:9"),),
    max_model_len=64,
    vocab_size=50,
)


class FakeRouter(routers._Router):
    """A router without a process; `theirs` is its end of the pipe."""

    def __init__(self) -> None:
        self.pipe, self.theirs = Pipe()
        self.answer, self.owed, self.replacing = 0, 0, False


class Launcher:
    """Two routers whose ends of the pipes are `pipes`; `answers` are the results that the launcher got."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.sock = socket.socket()
        self.routers = RouterProcesses(
            CONFIG, self.sock, count=2, on_ready=lambda: None, on_lost=lambda rank, reason: None
        )
        played = [FakeRouter(), FakeRouter()]
        self.pipes = [each.theirs for each in played]
        self.routers._routers = list[routers._Router](played)

    def order(self, **order: bool) -> None:
        self.routers.obey(Drain(ranks=(0,), rank=0, **order), self.answers.append)
        self.routers._told(self.routers._heard.recv())

    def say(self, index: int, sequences: int) -> None:
        """Let router `index` answer its oldest open order."""
        assert isinstance(self.pipes[index].recv(), Drain)
        self.pipes[index].send(Obeyed(sequences))
        self.routers._take(self.routers._routers[index])

    def close(self) -> None:
        self.sock.close()
        for pipe in (*self.pipes, self.routers._heard, self.routers._tell, *(r.pipe for r in self.routers._routers)):
            pipe.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def test_order_needs_answers_of_all_routers(launcher: Launcher) -> None:
    launcher.order()
    launcher.say(0, 3)
    assert launcher.answers == []
    launcher.say(1, 2)
    assert launcher.answers == [5]
    launcher.order()
    launcher.say(1, UNKNOWN)
    launcher.say(0, 3)
    assert launcher.answers == [5, UNKNOWN]


def test_late_answer_belongs_to_its_own_order(launcher: Launcher) -> None:
    """A router that is busy or starting for longer than an order's time limit answers each order in turn."""
    launcher.order()
    launcher.say(0, 3)
    launcher.order(leaves=True)
    launcher.say(0, 0)
    launcher.say(1, 4)
    assert launcher.answers == [], "router 1 has not confirmed that the rank leaves"
    launcher.say(1, 0)
    assert launcher.answers == [0]


def test_stopped_router_does_not_block_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_END_SECONDS", 1.0)
    sock = socket.create_server(("127.0.0.1", 0))
    config = dataclasses.replace(CONFIG, shutdown_grace=0.5)
    ready = threading.Event()
    made = RouterProcesses(config, sock, count=2, on_ready=ready.set, on_lost=lambda rank, reason: None)

    def stop() -> None:
        # Without a worker no router becomes ready, so wait until both have started.
        while len(made._routers) < 2:
            time.sleep(0.01)
        still = made._routers[0].process.pid
        assert still is not None
        os.kill(still, signal.SIGSTOP)
        made.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    begun = time.monotonic()
    made.run()
    stopper.join()
    assert time.monotonic() - begun < HANG_SECONDS
    assert not [child for child in psutil.Process().children() if "router" in child.name()]
