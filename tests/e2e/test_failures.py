"""Ranks that die or break in a real fleet: one name for the lost rank, in time (test_recovery.py has what follows).

Processes are really killed. The client of tests/fleet.py shows the protocol and fails if a request is answered twice. A
router shows HTTP. Ranks that stop, or live but send nothing, are in tests/exchange/test_failures.py.
"""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http, wait_for
from tests.fleet import Client, Fleet, ProcessPool, RankProcess, call_all, start_fleet
from tests.limits import HANG_SECONDS

from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.device import CpuDevice
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.loop.faults import RankFault
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.protocol import Done, Hello

# A busy machine may pause a process for a second or two without a loss.
DEADLINE = 2.5
# A test that waits this long hangs, so a loss reported earlier was noticed at once.
NEVER = 2 * HANG_SECONDS
LONG = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
PER_RANK = 6
# The lost rank, as named by the router or by a rank that missed it, whichever comes first.
GONE = r"(worker 1 at tcp://\S+ is gone|rank 1 (lost|silent) at step)"
# The step, and the place in it, where a rank was missed: between layers or in one.
PLACE = r"step \d+(, layer \d+, (dispatch|combine)|, plan)"


@pytest.fixture
def model(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["mla"]


@pytest.fixture(autouse=True)
def check_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that this test's ranks leave no shared memory, socket file or folder."""
    names, send = set[str](), RankProcess.send

    def listen(rank: RankProcess, name: str, *args: Any) -> None:
        # `connect` carries the names of all ranks.
        names.update(re.findall(r"(?:/[\w.-]+)*/moeyard-[\w-]+", repr(args) if name == "connect" else ""))
        send(rank, name, *args)

    monkeypatch.setattr(RankProcess, "send", listen)
    yield
    assert not [name for name in names if Path(name).exists()]


def kill(rank: RankProcess) -> None:
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.SIGKILL)
    rank.process.join(HANG_SECONDS)


def submit_everywhere(fleet: Fleet) -> None:
    """Submit requests to every rank and wait until all of them decode."""
    for rank in range(len(fleet.ranks)):
        for i in range(PER_RANK):
            fleet.client.submit(rank, f"r{rank}-{i}", range(1, 5 + i), **LONG)
    fleet.client.wait_for(lambda: all(a.token_ids for a in fleet.client.answers.values()))


def failure_of(client: Client, *ranks: int) -> str:
    """Wait until these ranks have lost a peer. Return the one name that they give it."""
    client.wait_for(lambda: all(r in client.snapshots and client.snapshots[r].state == "recovering" for r in ranks))
    (failure,) = {client.snapshots[rank].failure for rank in ranks}
    assert failure is not None
    return failure


def check_silence(client: Client, *ranks: int) -> None:
    """Check that these ranks send neither tokens nor ends on their own."""
    counts = [len(answer.token_ids) for answer in client.answers.values()]
    client.snapshots.clear()
    for rank in ranks:
        client.send(rank, Hello())
    client.wait_for(lambda: client.snapshots.keys() == set(ranks))
    assert [len(answer.token_ids) for answer in client.answers.values()] == counts, "tokens after the loss"
    assert all(answer.end is None for answer in client.answers.values())


def test_rank_killed_while_decoding(processes: ProcessPool, model: Path) -> None:
    """Survivors name the dead rank and the place where they missed it, and end no request."""
    with start_fleet(processes, engine_config(model, num_workers=3, step_deadline=NEVER)) as fleet:
        fleet.client.hello()
        submit_everywhere(fleet)
        kill(fleet.ranks[2])
        # All ranks name the loss alike, no matter which saw it first.
        assert re.fullmatch(rf"rank 2 lost at {PLACE}", failure_of(fleet.client, 0, 1))
        check_silence(fleet.client, 0, 1)
        losses = [fleet.ranks[rank].call("wait") for rank in (0, 1)]
        assert [(loss["rank"], loss["ranks"], loss["running"]) for loss in losses] == [
            (0, (2,), PER_RANK),
            (1, (2,), PER_RANK),
        ]


def test_rank_announces_compilation_within_a_step(
    processes: ProcessPool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a GPU rank compiles it sends a frame to its peers, and they take it for nothing else."""
    tells: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def before_compiling(_: CpuDevice, tell: Callable[[], None]) -> Iterator[None]:
        tells.append(tell)
        yield

    monkeypatch.setattr(CpuDevice, "before_compiling", before_compiling)
    with worker_here(engine_config(model, num_workers=2, step_deadline=DEADLINE), processes.take(1)) as (
        worker,
        client,
    ):
        client.hello()
        wires, run, phases = worker._mesh._open_wires(), worker.experts.run, []
        send = wires.send

        def spy(peer: int, frame: Any) -> bool:
            phases.append(frame[3])
            return send(peer, frame)

        def compiling(*args: Any) -> Any:
            for tell in tells:
                tell()
            return run(*args)

        wires.send, worker.experts.run = spy, compiling  # type: ignore[method-assign]
        for rank in (0, 1):
            client.submit(rank, f"r{rank}", (1, 2, 3), **{**LONG, "max_tokens": 20})
        for answer in client.wait():
            assert isinstance(answer.end, Done)
            assert answer.end.finish_reason == "length"
        assert len(tells) == 1
        assert phases.count(Phase.BUSY) >= 20, "each due frame ends the state, so the rank sends it again"
        assert {snapshot.failure for snapshot in client.snapshots.values()} == {None}


def test_rank_killed_while_idle(processes: ProcessPool, model: Path) -> None:
    """The other ranks notice at once, although no rank was stepping."""
    with start_fleet(processes, engine_config(model, num_workers=2, step_deadline=NEVER)) as fleet:
        fleet.client.hello()
        fleet.client.wait_for(lambda: len(fleet.client.snapshots) == 2)
        kill(fleet.ranks[0])
        assert failure_of(fleet.client, 1) == "rank 0 lost after step 0"


@contextlib.contextmanager
def worker_here(config: Any, others: list[RankProcess]) -> Iterator[tuple[Worker, Client]]:
    """Run rank 0 in this process, where a test can break it, and the other ranks in theirs."""
    specs = [
        {"config": config, "rank": rank, "epoch": 3, "host": "127.0.0.1", "version": "test"}
        for rank in range(config.num_workers)
    ]
    worker = Worker(WorkerSpec(**specs[0]))
    endpoints = [worker.endpoints(), *call_all(others, "setup", [(spec,) for spec in specs[1:]])]
    mesh = [e["mesh"] for e in endpoints]
    for rank in others:
        rank.send("connect", mesh)
    worker.connect(mesh)
    for rank in others:
        rank.result()
    worker.load(config.num_workers)
    call_all(others, "load", [(config.num_workers,)] * len(others))
    worker.start()
    call_all(others, "start", [()] * len(others))
    client = Client([e["frontend"] for e in endpoints])
    try:
        yield worker, client
    finally:
        client.close()
        worker.stop()
        call_all(others, "stop", [()] * len(others))


def test_broken_invariant_ends_only_its_rank(processes: ProcessPool, model: Path) -> None:
    """A bug ends its rank. The others name that rank with its error and end no request."""
    config = engine_config(model, num_workers=2, step_deadline=NEVER)
    with worker_here(config, processes.take(1)) as (worker, client):
        client.hello()
        for rank in (0, 1):
            for i in range(PER_RANK):
                client.submit(rank, f"r{rank}-{i}", (1, 2, 3), **LONG)
        client.wait_for(lambda: all(a.token_ids for a in client.answers.values()))

        def broken(*_: Any) -> Any:
            raise AssertionError("page 7 is owned twice")

        worker.scheduler.complete = broken  # type: ignore[method-assign]
        error = failure_of(client, 1)
        assert re.fullmatch(r"rank 0 failed at step \d+: AssertionError: page 7 is owned twice", error)
        with pytest.raises(RankFault, match="AssertionError: page 7 is owned twice"):
            worker.wait()
        check_silence(client, 1)


def stream(http: HttpFleet, lines: list[str]) -> None:
    """Append the data lines of a streamed completion to `lines` as they arrive."""
    with http.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **LONG}) as answer:
        lines.extend(line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_rank_killed_behind_a_router(processes: ProcessPool, model: Path) -> None:
    """Clients of streams and of whole answers in flight see the loss."""
    config = engine_config(model, num_workers=2, step_deadline=NEVER)
    with serve_http(processes, config, step_deadline=NEVER) as http:
        streams: list[list[str]] = [[] for _ in range(8)]
        whole: list[Any] = []
        threads = [threading.Thread(target=stream, args=(http, lines)) for lines in streams]
        threads += [threading.Thread(target=lambda: whole.append(http.post(prompt="x", **LONG))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: all(streams) and http.num_running() >= len(threads), "all requests decode")
        assert http.client.get("/readyz").status_code == 200
        kill(http.fleet.ranks[1])
        wait_for(lambda: http.client.get("/readyz").status_code == 503, "not ready any more")
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), "a client hangs"
        messages = [answer.json()["error"]["message"] for answer in whole]
        for lines in streams:
            (error,) = [line for line in lines if "error" in line]
            assert lines[-1] == error, "nothing follows the error"
            messages.append(json.loads(error)["error"]["message"])
        assert all(re.search(GONE, message) for message in messages), messages
        assert {answer.status_code for answer in whole} <= {500, 503}
        refused = http.post(prompt="x", max_tokens=1)
        assert refused.status_code == 503
        assert re.search(GONE, refused.json()["error"]["message"])
        assert re.search(GONE, http.client.get("/readyz").json()["reason"])
        assert http.client.get("/livez").status_code == 200
        # A router that hears of the loss from a survivor fails before it misses the link.
        assert all(re.search(GONE, failure) for failure in http.failures)
        assert len(http.failures) <= 1
        http.failures.clear()
