"""A rank on a GPU that is killed, stopped, or whose kernels send nothing: named by the others in time, then replaced.

The others' GPUs go on: what was captured, their weights and pages stay, and answers are what they were.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.e2e.test_one_answer import requests, run_mixed
from tests.e2e.test_one_answer_gpu_ranks import Case, config
from tests.fleet import Fleet, ProcessPool, start_fleet

from moeyard_worker.config.engine_config import ExchangeKind

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LAST = 1
# A deadline passes, the loss is seen at the next heartbeat, and ranks that do not speak are waited for.
SLACK_SECONDS = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    found = ProcessPool()
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu_failures")
    return make_checkpoint(directory, "qwen3_moe", dtype=torch.bfloat16, max_position_embeddings=4096)


def hurt(fleet: Fleet, how: str) -> None:
    process = fleet.ranks[LAST].process
    assert process.pid is not None
    if how == "silent":
        fleet.ranks[LAST].call("fall_silent")
    else:
        os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)


@pytest.mark.parametrize(
    ("exchange", "how"),
    [
        ("nvlink", "killed, half"),
        ("nvlink", "stopped, half"),
        ("nvlink", "silent, half"),
        ("nvlink", "killed"),
        ("nvlink", "stopped"),
        ("nvlink", "silent"),
        ("zmq", "killed"),
        ("zmq", "stopped"),
        ("nccl", "killed"),
        ("nccl", "stopped"),
    ],
)
def test_a_lost_rank_is_named_in_time_and_replaced(
    exchange: ExchangeKind, how: str, model: Path, pool: ProcessPool
) -> None:
    """Half: of the experts in slots, so that ranks read for each other, out of memory that its successor replaces."""
    how, _, slots = how.partition(", ")
    settings = replace(config(Case(2, exchange, 2, slots or "all"), model), step_deadline=4.0)
    spread = {name: i % 2 for i, name in enumerate(requests())}
    with start_fleet(pool, settings) as fleet:
        client = fleet.client
        expected = run_mixed(fleet, "before", spread)
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True}
        client.submit(0, "long", [7] * 20, **greedy)
        client.wait_for(lambda: len(client.answers["long"].token_ids) > 20)
        hurt(fleet, how)
        begun = time.monotonic()
        loss = fleet.ranks[0].call("wait")
        seconds = time.monotonic() - begun
        print(f"{exchange}, {how}: {loss['reason']!r} after {seconds:.2f} s")
        assert loss["ranks"] == (LAST,), loss
        assert seconds < (settings.step_deadline if how != "killed" else 0) + SLACK_SECONDS
        if how == "silent":
            assert (
                f"rank {LAST} silent ({settings.step_deadline:.1f} s) at step {loss['step']}, layer " in loss["reason"]
            )
            # The silent one hears it, and says the same.
            assert fleet.ranks[LAST].call("wait")["reason"] == loss["reason"]
        fleet.ranks[LAST].process.kill()
        fleet.recover([LAST], [loss])
        (answer,) = client.wait("long")
        assert len(answer.token_ids) == greedy["max_tokens"]
        assert run_mixed(fleet, "behind", spread) == expected
        client.answers.clear()
