"""A GPU rank that is killed, stopped, or alive but silent: peers name it in time, then a new rank replaces it.

Over nvlink a silent rank keeps launching but sends no packet. Over nccl and zmq its host stops at the rows of a layer.
Peers that compile kernels announce it and are not named.

Survivors keep weights, pages and captured graphs, except graphs of nccl. Answers stay the same.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.e2e.test_one_answer import requests, run_mixed
from tests.fleet import Fleet, ProcessPool, start_fleet
from tests.gpu.test_one_answer_ranks import Case, config
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import ExchangeKind

pytestmark = pytest.mark.gpu(2)

DEADLINE = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu_failures")
    return make_checkpoint(directory, "qwen3_moe", dtype=torch.bfloat16, max_position_embeddings=4096)


def hurt(fleet: Fleet, victim: int, how: str) -> None:
    process = fleet.ranks[victim].process
    assert process.pid is not None
    if how in ("silent", "hung"):
        fleet.ranks[victim].call("fall_silent" if how == "silent" else "hang")
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
        ("nvlink", "silent, eager"),
        ("nvlink", "hung"),
        ("nvlink", "hung, eager"),
        ("zmq", "killed"),
        ("zmq", "stopped"),
        ("zmq", "silent"),
        ("nccl", "killed"),
        ("nccl", "stopped"),
        ("nccl", "silent"),
    ],
)
def test_lost_rank_is_named_in_time_and_replaced(
    exchange: ExchangeKind, how: str, model: Path, pool: ProcessPool
) -> None:
    """Half: half of the experts have slots, so ranks read for each other from memory that the new rank replaces.

    Eager: peers may be compiling. Silent is a device, hung is a host. Over zmq and nccl, silent includes both.
    """
    how, _, more = how.partition(", ")
    lose_one(Case(2, exchange, 2, "half" if more == "half" else "all", eager=more == "eager"), how, model, pool)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("how", ["killed", "stopped", "silent"])
@pytest.mark.parametrize("exchange", ["nvlink", "zmq", "nccl"])
def test_all_others_name_the_same_rank(exchange: ExchangeKind, how: str, model: Path, pool: ProcessPool) -> None:
    """Lose rank 2 of four: the three others give the same reason."""
    lose_one(Case(4, exchange, 2), how, model, pool, victim=2)


def lose_one(case: Case, how: str, model: Path, pool: ProcessPool, *, victim: int = 1) -> None:
    """Lose `victim` while rank 0 decodes. Check the reason that its peers give, and their answers with a new rank."""
    exchange, others = case.exchange, [rank for rank in range(case.ranks) if rank != victim]
    # Peers see that a killed process ended before any deadline.
    settings = replace(config(case, model), step_deadline=2 * HANG_SECONDS if how == "killed" else DEADLINE)
    spread = {name: i % case.ranks for i, name in enumerate(requests())}
    with start_fleet(pool, settings) as fleet:
        client = fleet.client
        expected = run_mixed(fleet, "before", spread)
        # A token takes about 0.3 ms over nvlink and milliseconds over the others.
        length = 1500 if exchange == "nvlink" else 600
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
        client.submit(0, "long", [7] * 20, **greedy)
        client.wait_for(lambda: len(client.answers["long"].token_ids) > 20)
        hurt(fleet, victim, how)
        begun = time.monotonic()
        losses = [fleet.ranks[rank].call("wait") for rank in others]
        seconds, loss = time.monotonic() - begun, losses[0]
        print(f"{exchange}, {how}: {loss['reason']!r} after {seconds:.2f} s")
        assert {each["ranks"] for each in losses} == {(victim,)}, losses
        assert {each["reason"] for each in losses} == {loss["reason"]}
        if how in ("silent", "hung"):
            assert seconds > 0.8 * DEADLINE
            assert f"rank {victim} silent " in loss["reason"]
            assert f"({DEADLINE:.1f} s)" in loss["reason"]
            assert f" at step {loss['step']}, layer " in loss["reason"]
        if how == "silent" and exchange == "nvlink":
            # The silent rank reads the loss too and gives the same reason.
            assert fleet.ranks[victim].call("wait")["reason"] == loss["reason"]
        fleet.ranks[victim].process.kill()
        fleet.recover([victim], losses)
        (answer,) = client.wait("long")
        assert len(answer.token_ids) == greedy["max_tokens"]
        assert run_mixed(fleet, "after", spread) == expected
        client.answers.clear()
