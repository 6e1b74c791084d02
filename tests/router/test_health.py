"""Readiness of a full fleet, and readiness while the fleet changes during a canary."""

import asyncio

import pytest
from tests.router.scripted_worker import ready_snapshot

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.health import Health
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Done, SamplingParams, Tokens

CONFIG = RouterConfig(
    model_name="tiny",
    model_path=None,
    workers=(WorkerAddress(rank=0, endpoint="tcp://127.0.0.1:9"),),
    max_model_len=4096,
    vocab_size=400,
    max_inflight=2,
    max_waiting_tokens=8,
)


class PlayedFleet:
    """A fleet and its health; the test plays its only worker."""

    def __init__(self):
        self.changed = asyncio.Event()
        self.fleet = Fleet(CONFIG, RouterMetrics("tiny"), on_change=self.changed.set)
        self.fleet.start()
        self.health = Health(CONFIG, self.fleet)
        self.was_ready = 0
        self.task = asyncio.create_task(self.health.run(self.changed, self._ready))

    def _ready(self):
        self.was_ready += 1

    def connect(self, epoch):
        self.fleet._up(0)
        self.fleet._heard(0, [ready_snapshot(epoch=epoch, max_model_len=4096, vocab_size=400)])

    async def decode_canary(self):
        """Answer the canary, whatever its number."""
        for _ in range(20):
            await asyncio.sleep(0)
        (name,) = [name for name in self.fleet.admission.flights.by_name if name.startswith("canary-")]
        done = Done(request_id=name, finish_reason="length", prompt_tokens=1, cached_tokens=0, completion_tokens=2)
        self.fleet._heard(0, [Tokens(request_id=name, start=0, token_ids=(3, 4)), done])
        for _ in range(20):
            await asyncio.sleep(0)

    def close(self):
        self.task.cancel()
        self.fleet.close()


@pytest.mark.parametrize("prompt", [(1, 2), (1,) * 8], ids=["sequences", "tokens"])
def test_full_fleet_becomes_ready_again(prompt):
    """The canary needs no free slot; else a load balancer would remove a working server."""

    async def run():
        played = PlayedFleet()
        played.connect(epoch=0)
        await played.decode_canary()
        assert played.health.unready() is None
        for number in range(2):
            played.fleet.submit(f"long-{number}", [(prompt, SamplingParams(max_tokens=99))])
            if len(prompt) > 2:
                break
        with pytest.raises(ApiError, match="no room"):
            played.fleet.submit("late", [(prompt, SamplingParams(max_tokens=1))])
        played.fleet.replace((WorkerAddress(rank=0, endpoint="tcp://127.0.0.1:10"),))
        played.connect(epoch=1)
        assert played.health.unready() == "the fleet is warming up: no decode step has run yet"
        await played.decode_canary()
        assert played.health.unready() is None
        assert played.was_ready == 1
        played.fleet.validate()
        played.close()

    asyncio.run(run())


def test_removed_rank_does_not_stop_the_watch():
    """The fleet may shrink between the look at its ranks and their canaries."""

    async def run():
        played = PlayedFleet()
        played.connect(epoch=0)
        with pytest.raises(ApiError, match="worker 1 is not ready") as caught:
            played.fleet.submit("canary", [((0,), SamplingParams(max_tokens=2))], rank=1)
        assert caught.value.status == 503
        played.close()

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(4))
def test_watch_stops_during_a_change(turns):
    """`asyncio.wait_for` of Python 3.11 loses a cancellation that coincides with its result."""

    async def run():
        played = PlayedFleet()
        played.connect(epoch=0)
        await played.decode_canary()
        assert played.health.unready() is None
        played.changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        played.task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        ended = played.task.cancelled()
        played.close()
        assert ended

    asyncio.run(run())
