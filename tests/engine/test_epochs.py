"""A rank's loop between two epochs loses no instruction, in whatever order they come."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.engine.loop.loop import Engine
from moeyard_worker.engine.loop.loss import Loss
from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.protocol import Message
from moeyard_worker.scheduling.scheduler import Scheduler

PLACEMENT = Placement.of_shards((0,), (range(4),))


class FakeFrontend:
    """A frontend for tests: routers' messages are in `inbox`, replies in `outbox`."""

    def __init__(self) -> None:
        # No test waits for these.
        self.socket, self.monitor = socket.socketpair()
        self.inbox: list[tuple[bytes, Message]] = []
        self.outbox: list[tuple[bytes, Message]] = []

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, client: bytes, message: Message) -> bool:
        self.outbox.append((client, message))
        return True


def experts() -> Any:
    """Return an expert cache that holds nothing."""
    counters = SimpleNamespace(num_hits=0, num_misses=0, num_evictions=0)
    found = SimpleNamespace(
        num_slots=4, stats=SimpleNamespace(counters=counters), wants_choices=False, fetch_seconds=0.0
    )
    found.adopt = found.begin_step = lambda _: None
    return found


class Rank:
    """An engine without a model whose turns the test takes. `losses` are its reports to the launcher."""

    def __init__(self, **limits: Any) -> None:
        self.frontend = FakeFrontend()
        self.losses: list[Loss] = []
        config = SchedulerConfig(
            num_pages=8,
            page_size=16,
            max_model_len=64,
            vocab_size=50,
            eos_token_ids=(1,),
            max_batch_tokens=16,
            max_num_seqs=4,
            **limits,
        )
        self.scheduler = Scheduler(config)
        self.engine = Engine(
            rank=0,
            epoch=1,
            scheduler=self.scheduler,
            runner=cast(Any, None),
            experts=experts(),
            exchange=LocalExchange(),
            mesh=Mesh(rank=0, world_size=1, epoch=1),
            frontend=cast(Any, self.frontend),
            metrics=WorkerMetrics(model_name="tiny", rank=0, version=""),
            on_loss=self.losses.append,
        )
        self.join(1)

    def join(self, epoch: int) -> None:
        self.engine.rejoin(Mesh(rank=0, world_size=1, epoch=epoch), 0, PLACEMENT)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(Engine, "_block", lambda engine: None)
    made = Rank()
    yield made
    made.engine.close()
    made.frontend.socket.close()
    made.frontend.monitor.close()


def test_new_epoch_can_end_at_once(rank: Rank) -> None:
    """The launcher calls `rejoin` and then, for another ready rank, `end_epoch` before the loop runs a turn."""
    rank.engine._turn()
    rank.engine.end_epoch("rank 1 is back")
    rank.engine._turn()
    assert [(loss.epoch, loss.ranks, loss.reason) for loss in rank.losses] == [(1, (), "rank 1 is back")]
    rank.join(2)
    rank.engine.end_epoch("rank 2 is back")
    rank.engine._turn()
    rank.engine._turn()
    assert [(loss.epoch, loss.reason) for loss in rank.losses[1:]] == [(2, "rank 2 is back")]


def test_second_end_of_an_epoch_does_not_end_the_next(rank: Rank) -> None:
    rank.engine._turn()
    for _ in range(2):
        rank.engine.end_epoch("rank 1 is back")
        rank.engine._turn()
    assert len(rank.losses) == 1
    rank.join(2)
    for _ in range(3):
        rank.engine._turn()
    assert len(rank.losses) == 1
    assert rank.engine.failure is None
