"""A real `moeyard serve` under signals that nobody can handle: ranks that are stopped, a launcher that is killed."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from tests.deploy.test_serve import (
    BUSY_READY_SECONDS,
    DEMO,
    LONG_ANSWER,
    ROOT,
    Command,
    command,
    other_shared_files,
    shared_files,
    stream_of,
)
from tests.deploy.test_standby import listens

pytestmark = pytest.mark.timeout(BUSY_READY_SECONDS + 120)
__all__ = ["command"]  # a fixture
# Ray gives those that it kills 5 s to end by themselves; a stopped rank must be gone before.
FENCE_SECONDS = 4.0
# The promise, on cores that nothing else uses, and what a shared machine may take.
ORPHAN_SECONDS, BUSY_ORPHAN_SECONDS = 5.0, 15.0


def ranks(served: Command) -> dict[int, psutil.Process]:
    """The process of each rank that is there: it listens at the endpoint that the fleet tells."""
    found = {}
    for worker in httpx.get(f"{served.url}/v1/fleet").json()["workers"]:
        if worker["endpoint"]:
            port = int(worker["endpoint"].rpartition(":")[2])
            (found[worker["rank"]],) = (process for process in served.workers() if listens(process, port))
    return found


def answer(served: Command, **other: Any) -> str:
    """What must be answered."""
    body = httpx.post(f"{served.url}/v1/completions", json=LONG_ANSWER | other, timeout=60).json()
    return str(body["choices"][0]["text"])


def rest(first: str, lines: Iterator[str]) -> str:
    """A stream's text, of which `first` was read already."""
    *events, last = [first, *lines]
    assert last == "[DONE]", last
    return "".join(httpx.Response(200, text=event).json()["choices"][0]["text"] for event in events)


def incidents(served: Command) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = httpx.get(f"{served.url}/v1/fleet/incidents").json()["incidents"]
    return told


def test_a_stopped_rank_is_fenced_and_replaced(command: Callable[..., Command]) -> None:
    """Both streams are answered as ever, it never wakes, and the survivor says where it was when it missed it."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--step-deadline", "2")
    served.wait_ready()
    expected, before = [answer(served), answer(served, prompt="y")], ranks(served)
    victim = before[1]
    with stream_of(served, **LONG_ANSWER) as some, stream_of(served, **LONG_ANSWER | {"prompt": "y"}) as others:
        streams = [(next(lines), lines) for lines in (some, others)]
        fleet = httpx.get(f"{served.url}/v1/fleet").json()["workers"]
        assert [worker["router_inflight"] for worker in fleet] == [1, 1]
        victim.suspend()
        stopped = time.time()
        # Nobody has continued it: only SIGKILL ends who is stopped.
        served.wait_for(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, 20)
        ended = time.time()
        assert [rest(*stream) for stream in streams] == expected
    served.wait_for(lambda: " the fleet is whole again " in served.err.read_text(), BUSY_READY_SECONDS)
    served.wait_for(lambda: httpx.get(f"{served.url}/readyz").status_code == 200, BUSY_READY_SECONDS)
    after = ranks(served)
    assert after[1].pid != victim.pid
    assert after[0].pid == before[0].pid, "the survivor stays"
    lost = incidents(served)[-1]
    assert (lost["ranks"], lost["failure"]) == ([1], None)
    assert lost["requests_carried"] == 1
    assert 1.0 < lost["when"] - stopped < 10.0, "it is missed at the step deadline"
    print(f"missed after {lost['when'] - stopped:.1f} s, fenced after {ended - stopped:.1f} s")
    assert ended - lost["when"] < FENCE_SECONDS, "it is fenced before others take its place"
    (named,) = lost["launcher"]["lost"]
    assert (named["rank"], named["process"]) == (1, f"process {victim.pid} still runs, and is killed")
    (report,) = lost["launcher"]["reports"]
    assert (report["rank"], report["ranks"]) == (0, [1])
    assert (report["running"], report["waiting"]) == (1, 0)
    assert report["step"] > 0
    assert re.fullmatch(r"plan|layer \d+, (dispatch|combine)", report["place"]), report
    assert report["reason"] == f"rank 1 lost at step {report['step']}, {report['place']}"
    # Innermost last: from the engine's loop into what waits for the peer.
    frames = [re.fullmatch(r"\w+ \((\w+\.py):\d+\)", frame) for frame in report["stack"]]
    files = [frame[1] for frame in frames if frame]
    assert len(files) == len(report["stack"])
    assert "loop.py" in files
    assert (ROOT / "worker" / "moeyard_worker" / "exchange" / files[-1]).exists(), report
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)


def test_ranks_end_with_a_killed_launcher(command: Callable[..., Command]) -> None:
    """While they compute; nothing that they shared is left."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0")
    served.wait_ready()
    with stream_of(served, **LONG_ANSWER | {"max_tokens": 900}) as lines:
        next(lines)
        workers = list(ranks(served).values())
        assert len(workers) == 2
        served.process.kill()
        begun = time.monotonic()
        _, left = psutil.wait_procs(workers, timeout=BUSY_ORPHAN_SECONDS)
        assert not left, f"{left} still run {BUSY_ORPHAN_SECONDS:g} s after the launcher was killed"
        seconds = time.monotonic() - begun
        print(f"ranks ended after {seconds:.1f} s, load {os.getloadavg()[0]:.1f}")
        assert not served.quiet or seconds < ORPHAN_SECONDS
        assert served.workers() == []
        with contextlib.suppress(httpx.TransportError):  # a router may still say that it ends
            list(lines)
    assert shared_files() <= served.shared_before | other_shared_files(served.shared_before), "shared memory is left"


def test_a_rank_that_stops_for_less_than_the_deadline_is_not_lost(command: Callable[..., Command]) -> None:
    """Not even beyond the time in which sockets' heartbeats would miss it, if these had one of their own."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--step-deadline", "6")
    served.wait_ready()
    expected, before = answer(served), ranks(served)
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        begun = time.monotonic()
        before[1].suspend()
        try:
            time.sleep(4.2)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was lost, as the incidents will tell
                before[1].resume()
        assert rest(first, lines) == expected
        assert time.monotonic() - begun > 4.2, "it was over before"
    time.sleep(1.0)
    assert incidents(served) == []
    assert httpx.get(f"{served.url}/readyz").status_code == 200
    assert {rank: process.pid for rank, process in ranks(served).items()} == {r: p.pid for r, p in before.items()}
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)
