"""A restarted router meets a fleet that differs from its configuration until its launcher updates it."""

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


class RestartedRouter:
    """A restarted router's fleet with these workers; the test plays the ranks."""

    def __init__(self, workers):
        config = RouterConfig(model_name="m", model_path=None, workers=workers, max_model_len=64, vocab_size=10)
        self.lost = []
        self.fleet = Fleet(config, RouterMetrics("m"), on_lost=lambda rank, reason: self.lost.append((rank, reason)))
        self.fleet.start()

    def say(self, rank, *, epoch, world_size):
        if not self.fleet.admission.ranks[rank].connected:
            self.fleet._up(rank)
        self.fleet._heard(rank, [ready_snapshot(rank=rank, epoch=epoch, world_size=world_size)])


def test_smaller_fleet_is_not_a_mismatch():
    """The survivors have taken over a lost rank's experts and report one rank less than the router's configuration."""

    async def run():
        restarted = RestartedRouter(WHOLE)
        for rank in (0, 2):
            restarted.say(rank, epoch=2, world_size=2)
        assert restarted.lost == []
        assert restarted.fleet.admission.failure is None
        assert restarted.fleet.admission.unavailable() == "worker 1 at tcp://127.0.0.1:10001 is not connected yet"
        restarted.fleet.replace(WITHOUT_1)
        assert restarted.fleet.admission.unavailable() is None
        restarted.fleet.close()

    asyncio.run(run())


@pytest.mark.parametrize("later", [0, 2])
def test_restored_fleet_is_not_a_mismatch(later):
    """All ranks report a world of three; a router configured for two hears some of them before its launcher."""

    async def run():
        restarted = RestartedRouter(WITHOUT_1)
        first = 2 - later
        restarted.say(first, epoch=3, world_size=3)
        assert restarted.fleet.admission.unavailable() is not None
        restarted.fleet.replace(WHOLE)
        for rank in (later, 1):
            restarted.say(rank, epoch=3, world_size=3)
        assert restarted.lost == []
        assert restarted.fleet.admission.unavailable() is None
        restarted.fleet.close()

    asyncio.run(run())
