"""All other ranks soon name a rank that dies or stops during a step, and it leaves no files."""

import os
import signal
from pathlib import Path

import pytest
from exchange_fleet import Failed, Fleet, close_full, idle, run_until, run_with_delay, send_and_exit, use_device
from exchange_reference import SCENARIOS
from tests.limits import HANG_SECONDS

from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.shape import ExchangeShape

SHAPE = ExchangeShape(num_experts=16, top_k=3, hidden=37, dtype="float32", max_tokens=16)
SCENARIO = SCENARIOS[0]
DEADLINE = 2.0


@pytest.mark.sampled(0)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp", "nccl"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (4, 3)], ids=["2ranks-first", "4ranks-last"])
def test_killed_rank_is_named_before_the_deadline(ranks: int, victim: int, kind: str, phase: str) -> None:
    with Fleet(ranks) as fleet:
        fleet.connect(kind, SHAPE, deadline=2 * HANG_SECONDS)
        for rank in range(ranks):
            fleet.start(rank, run_until, SHAPE, SCENARIO, victim, phase, int(signal.SIGKILL))
        died_at = fleet.result(victim)
        for rank in set(range(ranks)) - {victim}:
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            assert failed.message.startswith(f"rank {victim} lost at step 2, layer 1, {phase}"), failed
            assert died_at < failed.at


@pytest.mark.sampled(0)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_stopped_rank_is_named_at_the_deadline(kind: str, phase: str) -> None:
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=DEADLINE)
        for rank in range(3):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(signal.SIGSTOP))
        fleet.result(1)
        for rank in (0, 2):
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            assert failed.message.startswith(f"rank 1 silent at step 2, layer 1, {phase} ({DEADLINE:.1f} s)"), failed


@pytest.mark.sampled(0)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("kind", ["zmq", "nccl"])
def test_stopped_rank_sends_no_heartbeat(kind: str, phase: str) -> None:
    """As in a fleet: a living rank may take long, but a stopped one is named at the deadline."""
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=DEADLINE, stall=HANG_SECONDS)
        for rank in range(3):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(signal.SIGSTOP))
        stopped_at = fleet.result(1)
        for rank in (0, 2):
            failed = fleet.result(rank)
            assert isinstance(failed, Failed)
            # Over nccl the waiting ranks also ask after a deadline, and either may be first.
            asked = f"rank 1 silent ({DEADLINE:.1f} s) at step 2, layer 1, {phase}"
            assert failed.message in (f"rank 1 lost at step 2, layer 1, {phase}", *([asked] * (kind == "nccl"))), failed
            assert failed.at - stopped_at > DEADLINE / 2


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["zmq", "nccl"])
def test_late_living_rank_is_named_at_the_deadline(kind: str) -> None:
    """GPU hosts wait for each other, and the rank has not announced a delay."""
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=DEADLINE, stall=HANG_SECONDS, patience=DEADLINE)
        for rank in range(3):
            fleet.start(rank, run_with_delay, SHAPE, SCENARIO, 1, 2.5 * DEADLINE, None, 2)
        failed = [fleet.result(rank) for rank in range(3)]
        assert all(isinstance(each, Failed) for each in failed), failed
        (said,) = {each.message for each in failed}
        where, limit = "at step 1, layer 1, dispatch", f"({DEADLINE:.1f} s)"
        assert said == (f"rank 1 silent {limit} {where}" if kind == "nccl" else f"rank 1 silent {where} {limit}")
        # The silent rank learns it when it continues.
        assert max(failed[0].at, failed[2].at) < failed[1].at


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("kind", "hosts"), [("zmq-tcp", None), ("zmq", "abb")], ids=["tcp", "two hosts"])
def test_rows_over_tcp_may_be_late(kind: str, hosts: str | None) -> None:
    """Encrypted rows of long prompts take longer than a deadline, without any sign on their way."""
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=DEADLINE, stall=HANG_SECONDS, patience=DEADLINE, hosts=hosts)
        begun = fleet.call(run_with_delay, SHAPE, SCENARIO, 1, 1.5 * DEADLINE, None, 4)
        assert all(isinstance(each, float) for each in begun), begun


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp", "nccl"])
def test_rank_that_announces_a_delay_may_be_late(kind: str) -> None:
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE, deadline=DEADLINE, stall=HANG_SECONDS, patience=DEADLINE)
        begun = fleet.call(run_with_delay, SHAPE, SCENARIO, 1, 1.5 * DEADLINE, Phase.BUSY, 4)
        assert all(isinstance(each, float) for each in begun), begun


@pytest.mark.gpu(2)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_gpus_stop_waiting_for_a_lost_rank(number: signal.Signals, phase: str) -> None:
    """The host ends NCCL's kernels, and the device continues."""
    with Fleet(2) as fleet:
        fleet.connect("nccl", SHAPE, deadline=DEADLINE, stall=HANG_SECONDS, device="cuda")
        for rank in range(2):
            fleet.start(rank, run_until, SHAPE, SCENARIO, 1, phase, int(number))
        fleet.result(1)
        failed = fleet.result(0)
        assert isinstance(failed, Failed)
        asked = [f"rank 1 silent ({DEADLINE:.1f} s) at step 2, layer 1, {phase}"] * (number == signal.SIGSTOP)
        assert failed.message in (f"rank 1 lost at step 2, layer 1, {phase}", *asked), failed
        fleet.start(0, use_device)
        assert fleet.result(0) == 499500


@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp"])
def test_close_survives_a_peer_that_sends_and_exits(kind: str) -> None:
    """libzmq 4.3.5 aborts if a connection with heartbeats ends while it is closed with unsent frames."""
    with Fleet(2) as fleet:
        fleet.connect(kind, SHAPE, deadline=0.25)
        fleet.start(1, close_full, 0)
        assert fleet.result(1) == "closing"
        fleet.start(0, send_and_exit, 1, 0.1)
        assert fleet.result(1) is None
        assert fleet.processes[1].is_alive()


def test_killed_fleet_leaves_no_file() -> None:
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


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["zmq", "zmq-tcp", "nccl"])
def test_idle_ranks_use_no_cpu(kind: str) -> None:
    with Fleet(3) as fleet:
        fleet.connect(kind, SHAPE)
        assert max(fleet.call(idle, 1.0)) < 0.03
