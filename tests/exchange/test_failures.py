"""A rank that dies or stops in the middle of a step is named by all others, soon, and leaves nothing behind."""

import os
import signal
from pathlib import Path

import pytest
import torch
from exchange_fleet import Failed, Fleet, close_full, idle, run_until, talk_and_leave, use_device
from exchange_reference import SCENARIOS

from moeyard_worker.exchange.shape import ExchangeShape

SHAPE = ExchangeShape(num_experts=16, top_k=3, hidden=37, dtype="float32", max_tokens=16)
SCENARIO = SCENARIOS[0]
# Far above the milliseconds it takes (a busy machine), far below the deadline (30 s), which is not what ends the wait.
SOON_S = 2.0


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp", "nccl"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (4, 3)], ids=["2ranks-first", "4ranks-last"])
def test_a_killed_rank_is_named_long_before_the_deadline(ranks: int, victim: int, kind: str, phase: str) -> None:
    with Fleet(ranks) as fleet:
        fleet.connect(kind, SHAPE, deadline=30)
        for rank in range(ranks):
            fleet.start(rank, run_until, SHAPE, SCENARIO, victim, phase, int(signal.SIGKILL))
        died_at = fleet.result(victim)
        for rank in set(range(ranks)) - {victim}:
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            assert failed.message.startswith(f"rank {victim} lost at step 2, layer 1, {phase}"), failed
            assert 0 < failed.at - died_at < SOON_S


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_a_stopped_rank_is_named_at_the_deadline(kind: str, phase: str) -> None:
    deadline = 1.5
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=deadline)
        for rank in range(3):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(signal.SIGSTOP))
        stopped_at = fleet.result(1)
        for rank in (0, 2):
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            assert failed.message.startswith(f"rank 1 silent at step 2, layer 1, {phase} ({deadline:.1f} s)"), failed
            assert failed.at - stopped_at < deadline + SOON_S


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "nccl"])
def test_a_stopped_rank_has_no_pulse(kind: str, phase: str) -> None:
    """As in a fleet: one that lives may take long, one that does not is named at the deadline all the same."""
    deadline = 1.5
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=deadline, stall=20 * deadline)
        for rank in range(3):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(signal.SIGSTOP))
        stopped_at = fleet.result(1)
        for rank in (0, 2):
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            assert failed.message == f"rank 1 lost at step 2, layer 1, {phase}", failed
            assert deadline / 2 < failed.at - stopped_at < deadline + SOON_S


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_gpus_wait_no_more_for_one_that_is_lost(number: signal.Signals, phase: str) -> None:
    """NCCL's kernels are ended by the host, and the device goes on."""
    deadline = 2.0
    with Fleet(2) as fleet:
        fleet.connect("nccl", SHAPE, deadline=deadline, stall=20 * deadline, device="cuda")
        for rank in range(2):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(number))
        died_at = fleet.result(1)
        failed = fleet.result(0)
        assert isinstance(failed, Failed)
        assert failed.message == f"rank 1 lost at step 2, layer 1, {phase}", failed
        assert failed.at - died_at < (deadline if number == signal.SIGSTOP else 0) + SOON_S
        fleet.start(0, use_device)
        assert fleet.result(0) == 499500


@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_closing_outlives_a_peer_that_talks_and_leaves(kind: str) -> None:
    """libzmq 4.3.5 aborts where a connection with heartbeats ends while it is closed with frames unsent."""
    with Fleet(2) as fleet:
        fleet.connect(kind, SHAPE, deadline=0.25)
        fleet.start(1, close_full, 0)
        assert fleet.result(1) == "closing"
        fleet.start(0, talk_and_leave, 1, 0.1)
        assert fleet.result(1) is None
        assert fleet.processes[1].is_alive()


def test_a_connected_fleet_killed_at_once_leaves_no_file() -> None:
    with Fleet(3) as fleet:
        endpoints = fleet.connect("zmq", SHAPE)
        for process in fleet.processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
    assert all(endpoint.slab_path.startswith("/dev/shm/moeyard-") for endpoint in endpoints)
    assert not [endpoint.slab_path for endpoint in endpoints if Path(endpoint.slab_path).exists()]
    sockets = [Path(address.removeprefix("ipc://")) for endpoint in endpoints for address in endpoint.ipc if address]
    assert len(sockets) == 3
    assert not [path for path in sockets if path.exists() or path.parent.exists()]


@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp", "nccl"])
def test_idle_ranks_use_no_processor(kind: str) -> None:
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE)
        for cpu_seconds in fleet.call(idle, 1.0):
            assert cpu_seconds < 0.03
