"""The loop of a rank while a peer's step runs on its device."""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.engine.test_epochs import FakeFrontend, experts
from tests.exchange.meshes import opener
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.loop.loop import Engine
from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.exchange.base import ExchangeSteps
from moeyard_worker.exchange.membership.lockstep import Agreed, Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.protocol import Done, Hello, SamplingParams, Snapshot, Submit
from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Step

PLACEMENT = Placement.of_shards((0, 1), (range(2), range(2, 4)))


class Device:
    """A device whose steps end when the test says so."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def rows_of(self, step: Step) -> int:
        return step.num_tokens

    def launch(self, step: Step, *_args: Any, **_named: Any) -> Any:
        ran = threading.Event()
        launched = SimpleNamespace(
            step=step,
            ran=ran,
            has_run=ran.is_set,
            results=[],
            scores=[],
            experts=b"",
            unsound=(),
            device_seconds=None,
            waited=0.0,
        )
        self.launched.append(launched)
        return launched


class WaitingSteps(ExchangeSteps):
    """Steps on a device that waits for peers. `looks` counts how often the host polls the mesh meanwhile."""

    looks = 0

    def finish(self, step: int, has_run: Callable[[], bool]) -> None:
        super().finish(step, has_run)
        self.drain(has_run)

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        limit = time.monotonic() + HANG_SECONDS
        while has_run is not None and not has_run():
            assert time.monotonic() < limit, "the step does not end"
            time.sleep(0.001)
            assert self.mesh is not None
            # This call reads arrived frames from the sockets.
            self.mesh.check_peers()
            self.looks += 1


class Waits(LocalExchange):
    def __init__(self) -> None:
        super().__init__()
        self.steps: WaitingSteps = WaitingSteps()

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        self.steps.open_epoch(mesh)


class Clocked:
    """A device whose steps take this many seconds each, one after the other. `ends` are their monotonic times."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.ends = seconds, list[Step](), list[float]()

    def rows_of(self, step: Step) -> int:
        return step.num_tokens

    def steps_of(self, name: str) -> list[int]:
        return [i for i, step in enumerate(self.steps) if any(chunk.key[1] == name for chunk in step.chunks)]

    def launch(self, step: Step, *_args: Any, **_named: Any) -> Any:
        end = max([time.monotonic(), *self.ends[-1:]]) + self.seconds
        self.steps.append(step)
        self.ends.append(end)
        return Timed(step, end, self.seconds)


@dataclass
class Timed:
    """A step that ends at a given time."""

    step: Step
    end: float
    device_seconds: float
    scores: tuple[()] = ()
    experts: bytes = b""
    waited: float = 0.0

    def has_run(self) -> bool:
        return time.monotonic() >= self.end

    @property
    def unsound(self) -> tuple[str, ...]:
        time.sleep(max(0.0, self.end - time.monotonic()))
        return ()

    @property
    def results(self) -> list[Accepted]:
        return [Accepted((7,)) for _ in self.step.sampled]


def limits(max_model_len: int = 64) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=64,
        page_size=16,
        max_model_len=max_model_len,
        vocab_size=50,
        eos_token_ids=(1,),
        max_batch_tokens=16,
        prefill_chunk=8,
        max_num_seqs=4,
        max_in_flight=2,
    )


def until(done: Callable[[], object]) -> None:
    limit = time.monotonic() + HANG_SECONDS
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.002)


class Idle:
    """Rank 1 of two, without a request, with its loop in a thread. `peer` acts as rank 0, which has all requests."""

    def __init__(self, meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
        self.frontend, self.device, self.peer = FakeFrontend(), Device(), Lockstep(meshes[0])
        self.mesh, self.exchange = meshes[1], Waits()
        metrics = WorkerMetrics(model_name="tiny", rank=1, version="")
        monkeypatch.setattr(metrics, "observe_step", lambda **_figures: None)
        self.engine = Engine(
            rank=1,
            epoch=1,
            scheduler=Scheduler(limits()),
            runner=cast(Any, self.device),
            experts=experts(),
            exchange=self.exchange,
            mesh=self.mesh,
            frontend=cast(Any, self.frontend),
            metrics=metrics,
        )
        self.engine.rejoin(meshes[1], 0, PLACEMENT)
        self.threads = ThreadPoolExecutor(2)
        self.loop: Future[None] = self.threads.submit(self.engine.run)

    def agree(self, step: int) -> Agreed:
        """Agree as a rank with four rows."""
        return self.threads.submit(self.peer.agree, step, 4).result(timeout=HANG_SECONDS)

    def wait_for(self, done: Callable[[], bool]) -> None:
        until(lambda: done() or (self.loop.done() and self.loop.result() is None))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Idle]:
    with opener(epoch=1, deadline=5.0) as open_meshes:
        made = Idle(open_meshes(2), monkeypatch)
        yield made
        for launched in made.device.launched:
            launched.ran.set()
        made.engine.stop()
        made.loop.result(timeout=HANG_SECONDS)
        made.threads.shutdown()
        made.engine.close()
        made.frontend.socket.close()
        made.frontend.monitor.close()


def test_rank_without_rows_agrees_on_the_next_step_early(idle: Idle) -> None:
    """Its peers and their devices would otherwise wait for it."""
    for step in (1, 2):
        assert idle.agree(step).num_tokens == (4, 0)
        idle.wait_for(lambda step=step: len(idle.device.launched) == step)
    first, second = idle.device.launched
    # At most two: the rank now waits for the first and does not answer the third, whose plan it has read.
    third = idle.threads.submit(idle.peer.agree, 3, 4)
    idle.wait_for(lambda: third.done() or bool(idle.mesh._open_wires().inbox[0]))
    looks = idle.exchange.steps.looks
    idle.wait_for(lambda: third.done() or idle.exchange.steps.looks > looks + 10)
    assert not third.done()
    first.ran.set()
    assert third.result(timeout=HANG_SECONDS).num_tokens == (4, 0)
    idle.wait_for(lambda: len(idle.device.launched) == 3)
    second.ran.set()


def test_routers_are_served_while_a_step_runs(idle: Idle) -> None:
    idle.agree(1)
    idle.wait_for(lambda: len(idle.device.launched) == 1)
    idle.frontend.inbox.append((b"router", Hello()))
    # The frontend's socket would wake the loop.
    idle.engine._poller.wake()
    idle.wait_for(lambda: any(isinstance(message, Snapshot) for _, message in idle.frontend.outbox))
    assert idle.engine._launched
    assert not idle.device.launched[0].ran.is_set()
    idle.device.launched[0].ran.set()
    idle.wait_for(lambda: not idle.engine._launched)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Clocked, FakeFrontend]]:
    """A single rank with two steps in flight, each of 100 ms."""
    frontend, device = FakeFrontend(), Clocked(0.1)
    metrics = WorkerMetrics(model_name="tiny", rank=0, version="")
    monkeypatch.setattr(metrics, "observe_step", lambda **_figures: None)
    mesh = Mesh(rank=0, world_size=1, epoch=1)
    engine = Engine(
        rank=0,
        epoch=1,
        scheduler=Scheduler(limits(max_model_len=512)),
        runner=cast(Any, device),
        experts=experts(),
        exchange=LocalExchange(),
        mesh=mesh,
        frontend=cast(Any, frontend),
        metrics=metrics,
    )
    engine.rejoin(mesh, 0, Placement.of_shards((0,), (range(4),)))
    with ThreadPoolExecutor(1) as threads:
        loop = threads.submit(engine.run)
        yield engine, device, frontend
        engine.stop()
        loop.result(timeout=HANG_SECONDS)
    engine.close()
    frontend.socket.close()
    frontend.monitor.close()


def submit(engine: Engine, frontend: FakeFrontend, name: str, length: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    frontend.inbox.append((b"router", Submit(request_id=name, prompt_token_ids=(5,) * length, sampling=params)))
    engine._poller.wake()


@pytest.mark.timing
def test_request_that_arrives_during_a_step_is_in_the_next(
    alone: tuple[Engine, Clocked, FakeFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step planned as early as possible is full of earlier requests."""
    engine, device, frontend = alone
    due, paced = engine._pacing.due, True
    monkeypatch.setattr(engine._pacing, "due", lambda now: due(now) if paced else 0.0)
    submit(engine, frontend, "long", 500)
    waited: dict[bool, list[int]] = {True: [], False: []}
    for turn in range(10):
        paced = turn % 2 == 0
        # By now the pacing knows how long a step takes.
        until(lambda turn=turn: len(device.steps) >= 6 + 4 * turn)
        time.sleep(0.01)
        # On a busy machine the device may have nothing to run for a moment.
        until(lambda: device.ends[-1] > time.monotonic())
        at = time.monotonic()
        running = next((i for i, end in enumerate(device.ends) if end > at), len(device.ends))
        submit(engine, frontend, f"late {turn}", 4)
        until(lambda turn=turn: device.steps_of(f"late {turn}"))
        [number] = device.steps_of(f"late {turn}")
        waited[paced].append(number - running)
    until(lambda: sum(isinstance(message, Done) for _, message in frontend.outbox) == 11)
    assert statistics.mean(waited[True]) < statistics.mean(waited[False]), waited
    # The device ran without pauses.
    idle = [after - before - device.seconds for before, after in itertools.pairwise(device.ends)]
    assert statistics.median(idle) < device.seconds / 4, idle
