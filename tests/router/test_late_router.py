"""A router that is started again meets a fleet that is not what it was told: its launcher speaks a moment later."""

import asyncio

import pytest
from tests.router.scripted_worker import ready_snapshot

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics


def address(rank, port):
    return WorkerAddress(rank=rank, endpoint=f"tcp://127.0.0.1:{port}" if port else "")


WHOLE = tuple(address(rank, 10000 + rank) for rank in range(3))
WITHOUT_1 = (WHOLE[0], address(1, None), WHOLE[2])


class Late:
    """Its fleet, first of these workers, whose ranks are played here."""

    def __init__(self, workers):
        config = RouterConfig(model_name="m", model_path=None, workers=workers, max_model_len=64, vocab_size=10)
        self.lost = []
        self.fleet = Fleet(config, RouterMetrics("m"), on_lost=lambda rank, reason: self.lost.append((rank, reason)))
        self.fleet.start()

    def say(self, rank, *, epoch, world_size):
        if not self.fleet.admission.ranks[rank].connected:
            self.fleet._up(rank)
        self.fleet._heard(rank, [ready_snapshot(rank=rank, epoch=epoch, world_size=world_size)])


def test_survivors_that_go_on_already_are_no_other_fleet():
    """They have taken a lost rank's experts over, and count one rank less than the router was started with."""

    async def run():
        late = Late(WHOLE)
        for rank in (0, 2):
            late.say(rank, epoch=2, world_size=2)
        assert late.lost == []
        assert late.fleet.admission.failure is None
        assert late.fleet.admission.unavailable() == "worker 1 at tcp://127.0.0.1:10001 is not connected yet"
        late.fleet.replace(WITHOUT_1)
        assert late.fleet.admission.unavailable() is None
        late.fleet.close()

    asyncio.run(run())


@pytest.mark.parametrize("told_late", [0, 2])
def test_ranks_that_are_back_already_are_no_other_fleet(told_late):
    """All count three again, and the router, started when two were left, has heard of some before its launcher."""

    async def run():
        late = Late(WITHOUT_1)
        first = 2 - told_late
        late.say(first, epoch=3, world_size=3)
        assert late.fleet.admission.unavailable() is not None
        late.fleet.replace(WHOLE)
        for rank in (told_late, 1):
            late.say(rank, epoch=3, world_size=3)
        assert late.lost == []
        assert late.fleet.admission.unavailable() is None
        late.fleet.close()

    asyncio.run(run())
