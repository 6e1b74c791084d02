"""What the loop of a rank does while a step of its peers runs on its device."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.engine.test_epochs import Door
from tests.exchange.meshes import opener

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.loop import Engine
from moeyard_worker.engine.metrics import WorkerMetrics
from moeyard_worker.exchange.local import LocalExchange
from moeyard_worker.exchange.lockstep import Agreed, Lockstep
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.protocol import Hello, Snapshot
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Step

PLACEMENT = Placement.of_shards((0, 1), (range(2), range(2, 4)))
SECONDS = 5.0


class Device:
    """What is launched here runs when the test says so."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def rows_of(self, step: Step) -> int:
        return step.num_tokens

    def launch(self, step: Step, *_args: Any, **_named: Any) -> Any:
        ran = threading.Event()
        launched = SimpleNamespace(
            step=step, ran=ran, has_run=ran.is_set, results=[], scores=[], unsound=(), device_seconds=None
        )  # fmt: skip
        self.launched.append(launched)
        return launched


class Waits(LocalExchange):
    """Its device waits for peers."""

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        pass

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        self.drain(has_run)

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        limit = time.monotonic() + SECONDS
        while has_run is not None and not has_run():
            assert time.monotonic() < limit, "the step does not end"
            time.sleep(0.001)


class Idle:
    """Rank 1 of two, without a request, its loop in a thread; `peer` speaks for rank 0, which has all of them."""

    def __init__(self, meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.device, self.peer = Door(), Device(), Lockstep(meshes[0])
        counters = SimpleNamespace(num_hits=0, num_misses=0, num_evictions=0)
        experts = SimpleNamespace(num_slots=4, stats=SimpleNamespace(counters=counters))
        experts.adopt = experts.begin_step = lambda _: None
        metrics = WorkerMetrics(rank=1, version="")
        monkeypatch.setattr(metrics, "observe_step", lambda **_figures: None)
        config = SchedulerConfig(
            num_pages=8, page_size=16, max_model_len=64, vocab_size=50, eos_token_ids=(1,), max_batch_tokens=16,
            max_num_seqs=4, max_in_flight=2,
        )  # fmt: skip
        self.engine = Engine(
            rank=1, epoch=1, scheduler=Scheduler(config), runner=cast(Any, self.device), experts=cast(Any, experts),
            exchange=Waits(), mesh=meshes[1], frontend=cast(Any, self.door), metrics=metrics,
        )  # fmt: skip
        self.engine.rejoin(meshes[1], 0, PLACEMENT)
        self.threads = ThreadPoolExecutor(2)
        self.loop: Future[None] = self.threads.submit(self.engine.run)

    def agree(self, step: int) -> Agreed:
        """As a rank with four rows would."""
        return self.threads.submit(self.peer.agree, step, 4).result(timeout=SECONDS)

    def wait_for(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit
            assert not self.loop.done() or self.loop.result() is None
            time.sleep(0.005)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Idle]:
    with opener(epoch=1, deadline=SECONDS) as open_meshes:
        made = Idle(open_meshes(2), monkeypatch)
        yield made
        for launched in made.device.launched:
            launched.ran.set()
        made.engine.stop()
        made.loop.result(timeout=SECONDS)
        made.threads.shutdown()
        made.engine.close()
        made.door.socket.close()
        made.door.monitor.close()


def test_a_rank_without_rows_agrees_on_the_next_step_while_one_runs(idle: Idle) -> None:
    """Its peers would wait for it else, and their devices for them."""
    for step in (1, 2):
        assert idle.agree(step).num_tokens == (4, 0)
        idle.wait_for(lambda step=step: len(idle.device.launched) == step)
    first, second = idle.device.launched
    # No more than two: now it waits for the first, and says nothing of a third.
    third = idle.threads.submit(idle.peer.agree, 3, 4)
    time.sleep(0.1)
    assert not third.done()
    first.ran.set()
    assert third.result(timeout=SECONDS).num_tokens == (4, 0)
    idle.wait_for(lambda: len(idle.device.launched) == 3)
    second.ran.set()


def test_it_hears_its_routers_meanwhile(idle: Idle) -> None:
    idle.agree(1)
    idle.wait_for(lambda: len(idle.device.launched) == 1)
    idle.door.said.append((b"router", Hello()))
    # As its frontend's socket would.
    idle.engine._ears.wake()
    idle.wait_for(lambda: any(isinstance(message, Snapshot) for _, message in idle.door.heard))
    assert idle.engine._launched
    assert not idle.device.launched[0].ran.is_set()
    idle.device.launched[0].ran.set()
    idle.wait_for(lambda: not idle.engine._launched)
