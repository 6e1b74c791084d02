"""A rank is lost and a new one replaces it: no request ends, and every answer stays the same."""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.http_fleet import engine_config
from tests.fleet import Answer, Fleet, ProcessPool, start_fleet
from tests.limits import HANG_SECONDS

from moeyard_worker.protocol import Done

# A killed process is noticed at once. A busy machine must not make a rank look stopped.
DEADLINE = 20.0
# All requests want their routed experts.
ROUTED: dict[str, Any] = {"enable_return_routed_experts": True}
# Tokens of a request that must still run when its rank is lost.
LONG = 200
PROMPTS = [tuple(range(1 + i, 9 + 5 * i)) for i in range(9)]
# DeepSeek-V4's window wraps behind 144 positions, and entries of 128 positions and snapshots end at multiples of 128.
LONGER = [tuple(1 + (7 * k + i) % 200 for k in range(100 + 25 * i)) for i in range(9)]


def sampling(i: int, max_tokens: int = 40) -> dict[str, Any]:
    """Vary sampling by index: greedy and seeded, log-probabilities of prompt and output, penalties."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7 + i, "logprobs": 3},
        {"temperature": 0.8, "seed": i, "presence_penalty": 0.5, "repetition_penalty": 1.1, "prompt_logprobs": 2},
    ]
    return {"max_tokens": max_tokens, "ignore_eos": True, "routed_experts_start": i % 3, **kinds[i % len(kinds)]}


def submit_all(
    fleet: Fleet, outputs: list[list[int]] | None = None, prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> None:
    """`outputs`: requests with log-probabilities force these tokens, many per step."""
    for i, prompt in enumerate(prompts):
        params = sampling(i)
        if outputs is not None and "logprobs" in params:
            params |= {"trace_decode_token_ids": tuple(outputs[i]), "as_decoded": True, "temperature": 0.0}
        fleet.client.submit(i % len(fleet.ranks), f"r{i}", prompt, **params)


def results(answers: list[Answer]) -> list[Any]:
    """Return what must not depend on losses, bit for bit."""
    for answer in answers:
        assert isinstance(answer.end, Done), answer.end
        assert answer.end.completion_tokens == len(answer.token_ids)
    return [(a.token_ids, a.logprobs, a.prompt_logprobs, a.experts, a.end and a.end.finish_reason) for a in answers]


def kill(fleet: Fleet, rank: int) -> None:
    pid = fleet.ranks[rank].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    fleet.ranks[rank].process.join(HANG_SECONDS)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mla", {}),
        ("mla", {"async_scheduling": True, "expert_slots": 4}),
        ("hybrid", {"prefill_chunk": 64}),
        ("hybrid_drafts", {"prefill_chunk": 64, "speculate": "mtp", "draft_tokens": 2}),
        ("int4", {}),
        ("fp4", {"prefill_chunk": 128}),
        ("compressed_drafts", {"prefill_chunk": 128, "speculate": "mtp", "draft_tokens": 2}),
    ],
    ids=["plain", "deep", "hybrid", "hybrid_drafts", "int4", "fp4", "compressed_drafts"],
)
def test_answers_stay_the_same_when_ranks_are_lost(
    processes: ProcessPool, checkpoints: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    """Ranks are killed in prefill, two at once while decoding, while they score answers, and idle. Their requests
    continue on all ranks."""
    options = {"prefill_chunk": 16, **options}
    config = engine_config(checkpoints[kind], num_workers=3, step_deadline=DEADLINE, **ROUTED, **options)
    rng = random.Random(repr(options))
    prompts = LONGER if kind in ("fp4", "compressed_drafts") else PROMPTS
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        submit_all(fleet, prompts=prompts)
        expected = results(client.wait())
        tokens = [answer[0] for answer in expected]
        for dead, moment, outputs in ([1], 0, None), ([0, 2], rng.randrange(20, 300), None), ([1], 1, tokens):
            client.answers.clear()
            submit_all(fleet, outputs, prompts)
            client.wait_for(lambda least=moment: sum(len(a.token_ids) for a in client.answers.values()) >= least)
            for rank in dead:
                kill(fleet, rank)
            losses = fleet.recover(dead)
            assert {loss["ranks"][0] for loss in losses} <= set(dead)
            assert len({(loss["reason"], loss["step"], loss["place"]) for loss in losses}) == 1, "different losses"
            client.carry_over(dead, to=range(3))
            assert results(client.wait()) == expected
        kill(fleet, 2)
        (loss, _) = fleet.recover([2])
        assert loss["reason"] == f"rank 2 lost after step {loss['step']}"
        client.answers.clear()
        submit_all(fleet, prompts=prompts)
        assert results(client.wait()) == expected


def test_survivors_accept_requests_while_they_wait(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """Snapshots report the reason for waiting. Requests run after the recovery, and aborts are answered at once."""
    config = engine_config(checkpoints["mla"], num_workers=2, step_deadline=DEADLINE, **ROUTED)
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        client.hello()
        client.submit(0, "early", PROMPTS[0], **sampling(1, LONG))
        client.wait_for(lambda: bool(client.answers["early"].token_ids))
        kill(fleet, 1)
        client.wait_for(lambda: client.snapshots[0].state == "recovering")
        failure = client.snapshots[0].failure
        assert failure is not None
        assert failure.startswith("rank 1 lost ")
        client.submit(0, "late", PROMPTS[1], **sampling(1))
        client.submit(0, "left", PROMPTS[2], **sampling(1))
        client.abort(0, "left")
        (left,) = client.wait("left")
        assert isinstance(left.end, Done)
        assert left.end.finish_reason == "abort"
        epoch = client.snapshots[0].epoch
        (loss,) = fleet.recover([1])
        assert (loss["reason"], loss["epoch"], loss["latest"]) == (failure, epoch, ("early",))
        results(client.wait())
        client.wait_for(lambda: client.snapshots[0].state == "ready")
        assert client.snapshots[0].epoch not in (epoch, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "deep"])
def test_survivors_keep_the_kv_of_their_requests(
    processes: ProcessPool, checkpoints: dict[str, Path], options: dict[str, Any]
) -> None:
    """Only requests of the lost rank are computed again: their prompts and their output so far."""
    config = engine_config(checkpoints["mla"], num_workers=2, step_deadline=DEADLINE, **ROUTED, **options)
    prompts = {"stays": PROMPTS[7], "moves": PROMPTS[8]}
    with start_fleet(processes, config) as fleet:
        client = fleet.client
        for rank, name in enumerate(prompts):
            client.submit(rank, name, prompts[name], **sampling(rank, LONG))
        client.wait_for(lambda: all(len(answer.token_ids) > 4 for answer in client.answers.values()))
        before = fleet.ranks[0].call("stats")
        assert before["prefill_tokens"] == len(prompts["stays"])
        kill(fleet, 1)
        (loss,) = fleet.recover([1])
        assert loss["latest"] == ("stays",), "the request ended before the loss"
        received = len(client.answers["moves"].token_ids)
        assert client.carry_over([1], to=[1]) == ["moves"]
        answers = results(client.wait())
        after, moved = fleet.call("stats")
        kept = ("prefill_tokens", "prefix_hit_tokens", "num_preemptions")
        assert [after[name] for name in kept] == [before[name] for name in kept], "the survivor lost its pages"
        assert moved["prefix_hit_tokens"] == 0
        assert len(prompts["moves"]) <= moved["prefill_tokens"] <= len(prompts["moves"]) + received
        client.answers.clear()
        for rank, name in enumerate(prompts):
            client.submit(rank, name, prompts[name], **sampling(rank, LONG))
        assert results(client.wait()) == answers


def test_complete_output_only_ends(processes: ProcessPool, checkpoints: dict[str, Path]) -> None:
    """The client received the last tokens but not the end."""
    with start_fleet(processes, engine_config(checkpoints["mla"], num_workers=1)) as fleet:
        client = fleet.client
        client.submit(0, "r", PROMPTS[0], max_tokens=5, temperature=0.0, ignore_eos=True)
        (answer,) = client.wait()
        answer.end = None
        assert client.carry_over([0], to=[0]) == ["r"]
        client.wait()
        assert isinstance(answer.end, Done)
        assert (answer.end.finish_reason, answer.end.completion_tokens, len(answer.token_ids)) == ("length", 5, 5)
