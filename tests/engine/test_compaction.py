"""Prompt compression: one answer for a budget however it is computed, and the positions that the model sees.

Drafts run too: verifying on a compressed cache gives the same as one row after the other.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO
from tests.rank import Rank, Reply
from tokenizers import Tokenizer

from moeyard_worker.engine.assembly.local import local_runner
from moeyard_worker.protocol import KvCompression, SamplingParams
from moeyard_worker.scheduling.step import Chunk, Compaction, Step

Requests = dict[str, tuple[list[int], SamplingParams]]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").read_text().splitlines()[:6]]
    return [tokenizer.encode(text).ids[:count] for text, count in zip(texts, (90, 70, 120, 90, 50, 33), strict=True)]


def requests() -> Requests:
    a, b, c, _, d, e = prompts()
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}

    def kept(budget: int, window: int) -> KvCompression:
        return KvCompression(method="snapkv", budget=budget, window=window)

    seeded = {"temperature": 0.8, "seed": 3}
    return {
        "greedy": (a, SamplingParams(**common, temperature=0.0, logprobs=2, kv_compression=kept(40, 16))),
        # The same prompt hits the pages of the first.
        "shared": (a, SamplingParams(**common, temperature=0.0, logprobs=2, kv_compression=kept(25, 8))),
        "seeded": (b, SamplingParams(**common, **seeded, logprobs=0, prompt_logprobs=1, kv_compression=kept(17, 16))),
        "long": (c, SamplingParams(**common, temperature=0.0, kv_compression=kept(64, 5))),
        "whole": (d, SamplingParams(**common, temperature=0.0, logprobs=0, kv_compression=kept(50, 32))),
        "plain": (e, SamplingParams(**common, **seeded, logprobs=1)),
        "silent": (c, SamplingParams(max_tokens=0, temperature=0.0, kv_compression=kept(8, 4))),
    }


@pytest.fixture(scope="module")
def plain() -> Iterator[Rank]:
    with Rank(DEMO) as rank:
        yield rank


@pytest.fixture(scope="module")
def drafting() -> Iterator[Rank]:
    with Rank(DEMO, speculate="mtp", draft_tokens=3) as rank:
        yield rank


@pytest.fixture(scope="module")
def expected(plain: Rank) -> dict[str, Reply]:
    """Answer each request alone, its prompt in one chunk."""
    return {name: plain.run({name: request})[0][name] for name, request in requests().items()}


def without(requests: Requests) -> Requests:
    return {name: (prompt, replace(params, kv_compression=None)) for name, (prompt, params) in requests.items()}


def test_budget_changes_only_answers_to_longer_prompts(plain: Rank, expected: dict[str, Reply]) -> None:
    whole = {name: plain.run({name: request})[0][name] for name, request in without(requests()).items()}
    for name in ("whole", "plain", "silent"):
        assert whole[name] == expected[name], "the prompt fits its budget"
    for name in ("greedy", "shared", "seeded", "long"):
        assert whole[name].token_ids != expected[name].token_ids
        # The whole prompt computes the first token and the prompt's log-probabilities.
        assert whole[name].token_ids[0] == expected[name].token_ids[0]
        assert whole[name].prompt_logprobs == expected[name].prompt_logprobs
    assert expected["greedy"].token_ids != expected["shared"].token_ids


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk": 16},
        {"prefill_chunk": 23, "max_in_flight": 2},
        {"max_batch_tokens": 64},
        {"prefix_caching": False, "prefill_chunk": 17},
        {"num_pages": 16},
        {"num_pages": 17, "max_in_flight": 2},
    ],
    ids=str,
)
def test_one_answer_for_a_budget(plain: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    answers, stats = plain.run(requests(), **changes)
    assert answers == expected
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    assert (stats.prefix_hit_tokens > 0) == changes.get("prefix_caching", True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_drafts": 1, "prefill_chunk": 16},
        {"num_drafts": 2, "max_in_flight": 2},
        {"num_pages": 17},
    ],
    ids=str,
)
def test_drafts_are_verified_on_compressed_prompts(
    drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]
) -> None:
    answers, stats = drafting.run(requests(), **changes)
    assert answers == expected
    assert stats.accepted[0] > 0.4 * stats.drafts[0], "the MTP layer is compressed too, and drafts well"


def test_kept_keys_keep_their_rotary_positions() -> None:
    """A budget of all but one token drops the lowest score. The next row sees the rest at unchanged positions."""
    runner = local_runner(DEMO, dtype=torch.float32, num_pages=32)
    prompt = tuple(prompts()[2])
    n, pages = len(prompt), tuple(range(8))

    def answer(budget: int, *, dropped: int, start: int) -> torch.Tensor:
        kept = Compaction(kept=budget, dropped=n - budget, window=16, pages=tuple(range(10, 19)))
        chunk = Chunk(
            key=(b"", ""), start=0, token_ids=prompt, pages=pages, prompt=True, num_sampled=1, compaction=kept
        )
        runner.forward(Step(prefill=(chunk,)))
        row = Chunk(
            key=(b"", ""), start=start, token_ids=(7,), pages=kept.pages, prompt=False, num_sampled=1, dropped=dropped
        )
        return runner.forward(Step(decode=(row,)))[0].log_softmax(-1)

    plain = Chunk(key=(b"", ""), start=0, token_ids=prompt, pages=pages, prompt=True, num_sampled=1)
    runner.forward(Step(prefill=(plain,)))
    row = Chunk(key=(b"", ""), start=n, token_ids=(7,), pages=pages, prompt=False, num_sampled=1)
    wanted = runner.forward(Step(decode=(row,)))[0].log_softmax(-1)
    near = (answer(n - 1, dropped=1, start=n) - wanted).abs().max()
    assert 0 < near < 0.5
    # With one length for both, the row would be rotated by its place in memory, and the answer would be far off.
    half = answer(n // 2, dropped=n - n // 2, start=n)
    confused = answer(n // 2, dropped=0, start=n // 2)
    assert (half - wanted).abs().max() < (confused - wanted).abs().max()
