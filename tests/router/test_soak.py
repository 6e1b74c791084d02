"""The soak of bench/soak.py for a few seconds: whatever clients do, nothing of them is left."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import pytest
from tests.scripts import loaded

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    with loaded(BENCH / "soak.py") as module:
        yield module


def test_nothing_is_left(soak, start):
    service = start(2, worker_places=4, max_inflight=64, send_timeout=0.3)
    for worker in service.workers:
        worker.pace = 0.002
    run = soak.Soak(service.url, random.Random(1))
    args = argparse.Namespace(seconds=2.0, rate=12.0, drain=15.0)
    assert asyncio.run(soak.run(run, None, args)) == []
    service.server._fleet.validate()
    done = {action for action, _ in run.outcomes}
    assert done >= {"stream", "whole", "leave", "wrong"}
    assert not [outcome for outcome in run.outcomes if outcome[1] in ("200, cut", "nothing", "500")], run.outcomes
    assert {outcome for action, outcome in run.outcomes if action == "wrong"} == {"400"}
