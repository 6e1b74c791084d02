"""Scoring with `as_decoded`: outputs computed many tokens per step have the bits that sampling reports."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import FAMILIES, add_drafts, make_checkpoint
from tests.rank import Rank, Reply

from moeyard_worker.protocol import KvCompression, SamplingParams

# The others are these families with images, and load the same layers.
TEXT_FAMILIES = tuple(family for family in FAMILIES if family not in ("kimi_k25", "qwen3_5_moe"))
DRAFTING = ("qwen3_next", "qwen3_5_moe_text")
OPTIONS: dict[str, Any] = {"mixtral": {"sliding_window": 40}}
LIMITS: dict[str, Any] = {
    "max_num_seqs": 6,
    "prefill_chunk": 128,
    "max_batch_tokens": 160,
    "enable_return_routed_experts": True,
}
OUTPUT = 70


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts end before, at and after a multiple of 64. One extends another; outputs cross pages and blocks of 64."""
    chance = random.Random(5)
    ids = [chance.randrange(250) for _ in range(150)]
    drawn = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.8, seed=3, logprobs=2)
    return {
        "first": (ids[:140], replace(drawn, max_tokens=2, routed_experts_start=0)),
        "greedy": (ids[3:8], replace(drawn, temperature=0.0, logprobs=0, routed_experts_start=2)),
        "prompt too": (ids[20:84], replace(drawn, top_p=0.9, prompt_logprobs=3, routed_experts_start=0)),
        "penalised": (ids[9:74], replace(drawn, repetition_penalty=1.4, presence_penalty=0.5, prompt_logprobs=0)),
        "behind": ([*ids[:140], 9, 9], replace(drawn, min_p=0.01, logit_bias={7: 2.0}, routed_experts_start=130)),
        "one": (ids[:1], replace(drawn, max_tokens=1)),
    }


@pytest.fixture(scope="module", params=TEXT_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, directory = request.param, tmp_path_factory.mktemp("as_decoded")
    make_checkpoint(directory, family, seed=2, **OPTIONS.get(family, {}))
    if family in DRAFTING:
        add_drafts(directory)
    return directory


@pytest.fixture(scope="module")
def rank(model: Path) -> Iterator[Rank]:
    with Rank(model, **LIMITS) as rank:
        yield rank


@pytest.fixture(scope="module")
def answers(rank: Rank) -> dict[str, Reply]:
    return {name: rank.run({name: request})[0][name] for name, request in requests().items()}


def scored(answers: dict[str, Reply], count: int = OUTPUT) -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests that force the first `count` tokens of each answer and sample the rest like the answer."""
    found = {}
    for name, (prompt, params) in requests().items():
        trace = tuple(answers[name].token_ids[:count])
        if len(trace) == params.max_tokens:
            # Nothing is sampled, so its parameters do not matter.
            params = replace(params, temperature=2.0, seed=9, repetition_penalty=1.0, logit_bias={1: -9.0})
        found[name] = (prompt, replace(params, trace_decode_token_ids=trace, as_decoded=True))
    return found


def test_scores_are_those_of_sampling(rank: Rank, answers: dict[str, Reply]) -> None:
    # DeepSeek-V4 computes 128 positions of a prompt together.
    least = max(64, rank.worker.scheduler.config.chunk_alignment)
    variants: list[dict[str, Any]] = [
        {},
        {"max_in_flight": 2, "prefill_chunk": least, "num_pages": 16},
        {"prefix_caching": False, "prefill_chunk": least, "max_batch_tokens": least},
    ]
    for changes in variants:
        replies, stats = rank.run(scored(answers), **changes)
        assert replies == answers, changes
        assert stats.prefix_hit_tokens > 0 or changes


@pytest.mark.sampled(0)
def test_sampling_goes_on_behind_what_is_scored(rank: Rank, answers: dict[str, Reply]) -> None:
    """Requests that sample take the pages of later ones, which are computed again."""
    asked = {f"free {name}": request for name, request in requests().items()}
    expected = {f"free {name}": reply for name, reply in answers.items()}
    for count, changes in ((1, {"max_in_flight": 2}), (33, {}), (OUTPUT, {"max_in_flight": 2})):
        replies, stats = rank.run({**asked, **scored(answers, count)}, num_pages=24, **changes)
        assert replies == {**expected, **answers}
        assert stats.num_preemptions > 0


@pytest.mark.sampled(0)
def test_scoring_continues_on_another_rank(rank: Rank, answers: dict[str, Reply]) -> None:
    """The client already has a part of the output, which the new rank computes and does not send again."""
    asked = {name: request for name, request in scored(answers).items() if name != "one"}
    begun = {
        name: tuple(answers[name].token_ids[:count]) for name, count in zip(asked, (1, 5, 34, 69, 12), strict=True)
    }
    replies = rank.serve(rank.scheduler(), asked, begun=begun)
    width = rank.worker.scheduler.config.routing_bytes
    for name, reply in replies.items():
        given, (_, params) = len(begun[name]), asked[name]
        assert reply.token_ids == answers[name].token_ids[given:]
        assert reply.logprobs == answers[name].logprobs[given:]
        if params.routed_experts_start is not None:
            rest = (params.max_tokens - given) * width
            assert reply.experts[-rest:] == answers[name].experts[-rest:]


@pytest.mark.parametrize("model", DRAFTING, indirect=True)
def test_scoring_beside_drafts(model: Path, answers: dict[str, Reply]) -> None:
    with Rank(model, speculate="mtp", draft_tokens=3, **LIMITS) as rank:
        for count, changes in ((OUTPUT, {}), (20, {"max_in_flight": 2, "num_pages": 20})):
            replies, stats = rank.run(scored(answers, count), **changes)
            assert replies == answers
            assert (stats.accepted[0] > 0) == (count < OUTPUT), "only sampled tokens are drafted"


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"], indirect=True)
def test_compressed_prompts(rank: Rank) -> None:
    kept = KvCompression(method="snapkv", budget=40, window=16)
    asked = {name: (ids, replace(params, kv_compression=kept)) for name, (ids, params) in requests().items()}
    whole = {name: rank.run({name: request})[0][name] for name, request in asked.items()}
    again = {name: (ids, replace(params, kv_compression=kept)) for name, (ids, params) in scored(whole).items()}
    replies, stats = rank.run(again, prefill_chunk=64, num_pages=20)
    assert replies == whole
    assert stats.dropped_tokens > 0
