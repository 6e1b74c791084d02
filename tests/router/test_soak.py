"""bench/soak.py for a few seconds: nothing of any client is left at the end."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS
from tests.router.launcher import validate
from tests.scripts import loaded

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    with loaded(BENCH / "soak.py") as module:
        yield module


@pytest.mark.slow
def test_nothing_is_left(soak, start):
    service = start(2, worker_places=4, max_inflight=64, send_timeout=2.0)
    for worker in service.workers:
        worker.pace = 0.002
    run = soak.Soak(service.url, random.Random(1))
    args = argparse.Namespace(seconds=2.0, rate=12.0, drain=HANG_SECONDS)
    while not {"stream", "whole", "leave", "wrong"} <= {action for action, _ in run.outcomes}:
        assert asyncio.run(soak.run(run, None, args)) == []
    validate(service)
    assert not [outcome for outcome in run.outcomes if outcome[1] in ("200, cut", "nothing", "500")], run.outcomes
    assert {outcome for action, outcome in run.outcomes if action == "wrong"} == {"400"}
