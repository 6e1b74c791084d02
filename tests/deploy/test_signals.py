"""A real `moeyard serve` under signals that cannot be handled: stopped ranks, a killed launcher."""

import contextlib
import re
import signal
import time
from collections.abc import Callable

import httpx
import psutil
import pytest
from tests.deploy.test_serve import DEMO, LONG_ANSWER, ROOT, Command, answer, command, get, stream_of, text_of
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import STALL

__all__ = ["command"]  # a fixture
DEADLINE = 5


@pytest.mark.slow
def test_stopped_rank_is_fenced_and_replaced(command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams keep their answers, the rank never wakes, and the survivor reports where it waited."""
    # Ray itself would kill a stopped rank only long after this test's time limit, so the launcher must.
    monkeypatch.setenv("RAY_kill_worker_timeout_milliseconds", str(int(10_000 * HANG_SECONDS)))
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--step-deadline", str(DEADLINE))
    served.wait_ready()
    expected, before = [answer(served), answer(served, prompt="y")], served.ranks()
    victim = before[1]
    with stream_of(served, **LONG_ANSWER) as some, stream_of(served, **LONG_ANSWER | {"prompt": "y"}) as others:
        streams = [(next(lines), lines) for lines in (some, others)]
        fleet = get(f"{served.url}/v1/fleet").json()["workers"]
        assert [worker["router_inflight"] for worker in fleet] == [1, 1]
        victim.suspend()
        stopped = time.time()
        # No process continues it, and only SIGKILL ends a stopped process.
        served.wait_for(lambda: victim not in served.workers())
        assert [text_of([first, *lines]) for first, lines in streams] == expected
    served.wait_whole()
    after = served.ranks()
    assert after[1].pid != victim.pid
    assert after[0].pid == before[0].pid, "the survivor must stay"
    lost = served.incidents()[-1]
    assert (lost["ranks"], lost["failure"]) == ([1], None)
    assert lost["requests_carried"] == 1
    # A rank that still answers heartbeats would get the longer time.
    assert DEADLINE / 2 < lost["when"] - stopped < STALL * DEADLINE, "the step deadline must detect the loss"
    (named,) = lost["launcher"]["lost"]
    assert (named["rank"], named["process"]) == (1, f"process {victim.pid} still runs, and is killed")
    (report,) = lost["launcher"]["reports"]
    assert (report["rank"], report["ranks"]) == (0, [1])
    assert (report["running"], report["waiting"]) == (1, 0)
    assert report["step"] > 0
    assert re.fullmatch(r"plan|layer \d+, (dispatch|combine)", report["place"]), report
    assert report["reason"] == f"rank 1 lost at step {report['step']}, {report['place']}"
    # Innermost last: from the engine's loop into the wait for the peer.
    frames = [re.fullmatch(r"\w+ \((\w+\.py):\d+\)", frame) for frame in report["stack"]]
    files = [frame[1] for frame in frames if frame]
    assert len(files) == len(report["stack"])
    assert "loop.py" in files
    assert [*(ROOT / "worker" / "moeyard_worker" / "exchange").rglob(files[-1])], report
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)


@pytest.mark.slow
def test_ranks_end_with_a_killed_launcher(command: Callable[..., Command]) -> None:
    """They are computing at that moment; no shared resource is left."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0")
    served.wait_ready()
    with stream_of(served, **LONG_ANSWER | {"max_tokens": 900}) as lines:
        next(lines)
        workers = served.workers()
        assert len(workers) == 2
        served.process.kill()
        # Ray's own processes notice the loss 65 s later.
        _, left = psutil.wait_procs(workers, timeout=HANG_SECONDS / 2)
        assert not left, f"{left} outlive the launcher"
        assert served.workers() == []
        with contextlib.suppress(httpx.TransportError):  # a router may still report that it stops
            list(lines)
    served.check_names()


@pytest.mark.slow
def test_rank_stopped_for_less_than_the_deadline_is_not_lost(command: Callable[..., Command]) -> None:
    """The stop is even longer than a separate heartbeat of sockets would allow."""
    served = command("serve", DEMO, "--workers", "2", "--port", "0", "--step-deadline", "10")
    served.wait_ready()
    expected, before = answer(served), served.ranks()
    with stream_of(served, **LONG_ANSWER) as lines:
        first = next(lines)
        before[1].suspend()
        try:
            time.sleep(4.2)  # the length of the stop is under test
            inflight = [worker["router_inflight"] for worker in get(f"{served.url}/v1/fleet").json()["workers"]]
            assert sum(inflight) == 1, "the stream must still run"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # if the rank was lost, the incidents show it
                before[1].resume()
        assert text_of([first, *lines]) == expected
    assert answer(served) == expected
    assert served.incidents() == []
    assert get(f"{served.url}/readyz").status_code == 200
    assert {rank: process.pid for rank, process in served.ranks().items()} == {r: p.pid for r, p in before.items()}
    served.process.send_signal(signal.SIGINT)
    served.check_end(0)
