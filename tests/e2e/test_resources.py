"""CPU use of an idle fleet, and the latency of its first answer."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http
from tests.fleet import ProcessPool

IDLE_SECONDS = 3.0
pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def http(processes: ProcessPool, checkpoints: dict[str, Path]) -> Iterator[HttpFleet]:
    """Yield two warm ranks behind the router."""
    with serve_http(processes, engine_config(checkpoints["mla"], num_workers=2)) as service:
        service.choice(prompt=[1, 2, 3], max_tokens=8)
        yield service


def cpu_seconds(http: HttpFleet) -> float:
    """Return the CPU time of both ranks so far, in user and kernel mode."""
    times = [psutil.Process(rank.process.pid).cpu_times() for rank in http.fleet.ranks]
    return sum(t.user + t.system for t in times)


def test_idle_fleet_blocks_and_answers_at_once(http: HttpFleet) -> None:
    # Engines check their invariants once, a second after their last work. Wait until that is over.
    time.sleep(1.5)
    steps = [s["step"] for s in http.snapshots()]
    workers, router, begun = cpu_seconds(http), time.process_time(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - begun
    assert cpu_seconds(http) - workers < 0.03 * seconds
    assert time.process_time() - router < 0.03 * seconds, "CPU time of the router and this test"
    assert [s["step"] for s in http.snapshots()] == steps

    waits: dict[float, list[float]] = {0.0: [], 0.3: []}
    for i in range(7):
        for pause, seconds in waits.items():
            time.sleep(pause)
            begun = time.monotonic()
            assert len(http.choice(prompt=[i], max_tokens=1, ignore_eos=True)["token_ids"]) == 1
            seconds.append(time.monotonic() - begun)
    # Polling anywhere on the path would show, because an answer would wait half an interval on average.
    assert statistics.median(waits[0.3]) < 4 * statistics.median(waits[0.0]), waits
