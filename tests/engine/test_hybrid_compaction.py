"""Prompt compression in models with state: one answer for a budget however it is computed, with drafts too.

The state of linear attention covers the whole prompt. Only layers of full attention drop positions.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_hybrid_speculation import write
from tests.rank import Rank, Reply

from moeyard_worker.protocol import KvCompression, SamplingParams

Requests = dict[str, tuple[list[int], SamplingParams]]
# Gated DeltaNet with GQA and an MTP layer, and Kimi Delta Attention with MLA.
FAMILIES = ("qwen3_next", "kimi_linear")
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "prefill_chunk": 128, "max_batch_tokens": 160}


def requests() -> Requests:
    """Prompts end before, at and after a multiple of 64, so windows also begin before it."""
    chance = random.Random(5)
    ids = [chance.randrange(250) for _ in range(150)]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}

    def kept(budget: int, window: int) -> KvCompression:
        return KvCompression(method="snapkv", budget=budget, window=window)

    seeded = {"temperature": 0.8, "seed": 3}
    return {
        "greedy": (ids[:140], SamplingParams(**common, temperature=0.0, logprobs=2, kv_compression=kept(40, 16))),
        # The same prompt hits the first one's snapshot, as far as the window allows.
        "shared": (ids[:140], SamplingParams(**common, temperature=0.0, logprobs=2, kv_compression=kept(25, 8))),
        "seeded": (ids[9:73], SamplingParams(**common, **seeded, logprobs=0, kv_compression=kept(17, 16))),
        "edge": (ids[3:70], SamplingParams(**common, **seeded, prompt_logprobs=1, kv_compression=kept(30, 24))),
        "whole": (ids[20:60], SamplingParams(**common, temperature=0.0, logprobs=0, kv_compression=kept(50, 32))),
        # This request makes pages scarce.
        "plain": (ids[7:52], SamplingParams(**{**common, "max_tokens": 80}, **seeded, logprobs=1)),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Rank]:
    with Rank(model, **LIMITS) as rank:
        yield rank


@pytest.fixture(scope="module")
def expected(plain: Rank) -> dict[str, Reply]:
    """Answer each request alone, its prompt in one chunk if it fits."""
    return {name: plain.run({name: request})[0][name] for name, request in requests().items()}


def test_budget_changes_only_answers_to_longer_prompts(plain: Rank, expected: dict[str, Reply]) -> None:
    for name, (prompt, params) in requests().items():
        whole = plain.run({name: (prompt, replace(params, kv_compression=None))})[0][name]
        if name in ("whole", "plain"):
            assert whole == expected[name], "the prompt fits its budget"
            continue
        # The whole prompt computes the first token and the prompt's log-probabilities.
        assert whole.token_ids[0] == expected[name].token_ids[0]
        assert whole.prompt_logprobs == expected[name].prompt_logprobs
        assert whole != expected[name]


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk": 95, "max_in_flight": 2},
        {"max_batch_tokens": 100},
        {"prefix_caching": False},
        {"num_pages": 13},
        {"num_pages": 13, "max_in_flight": 2, "prefill_chunk": 100},
    ],
    ids=str,
)
def test_one_answer_for_a_budget(plain: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    answers, stats = plain.run(requests(), **changes)
    assert answers == expected
    assert stats.dropped_tokens > 0
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    assert (stats.prefix_hit_tokens > 0) == changes.get("prefix_caching", True)


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Rank]:
    with Rank(model, speculate="mtp", draft_tokens=3, **LIMITS) as rank:
        yield rank


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_drafts": 1, "prefill_chunk": 95},
        {"num_drafts": 2, "max_in_flight": 2},
        {"num_pages": 13},
    ],
    ids=str,
)
def test_drafts_are_verified_on_compressed_prompts(
    drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]
) -> None:
    """States are in a ring by position, while keys are at other places."""
    answers, stats = drafting.run(requests(), **changes)
    assert answers == expected
    assert stats.accepted[0] > 0
