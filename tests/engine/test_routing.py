"""Routed experts: those of transformers' router, and the same bytes however a request runs.

tests/e2e/test_one_answer.py compares them over ranks, exchanges, caches, chunks, drafts and losses.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import DEMO, VOCAB_SIZE, make_checkpoint
from tests.rank import Rank, Reply

from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.protocol import MAX_PROMPT_EXPERTS, KvCompression, PromptExperts, SamplingParams, Submit, Tokens
from moeyard_worker.scheduling.admission import refusal
from moeyard_worker.state.routing import PageRouting

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, routed_experts_start=0)
TOP_K = 2


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (257, np.dtype("<u2"))])
def test_experts_are_those_of_transformers(tmp_path: Path, num_experts: int, dtype: Any) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe", num_experts=num_experts)
    rng = random.Random(5)
    prompts = {str(n): [rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 40)}
    with Rank(model, enable_return_routed_experts=True) as rank:
        replies, _ = rank.run({name: (prompt, GREEDY) for name, prompt in prompts.items()})
    reference = reference_model(model, "qwen3_moe", dtype=torch.float32)
    for name, prompt in prompts.items():
        ids = [*prompt, *replies[name].token_ids]
        found = np.frombuffer(replies[name].experts, dtype).reshape(len(ids) - 1, -1, TOP_K)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        expected = np.stack([layer.topk(TOP_K).indices.numpy() for layer in logits], axis=1)
        assert np.array_equal(found, expected)


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Return prompts that share pages. The first one runs alone, so the others reuse them."""
    rng = random.Random(11)
    long = [rng.randrange(VOCAB_SIZE) for _ in range(100)]
    seeded = replace(GREEDY, temperature=0.9, seed=3, logprobs=1)
    return {
        "quiet": (long, replace(GREEDY, routed_experts_start=None)),
        "long": (long, GREEDY),
        "hit": ([*long[:70], 5, 6, 7], seeded),
        "late start": (long[:90], replace(seeded, routed_experts_start=41)),
        "short": (long[:3], seeded),
        "one": (long[:1], GREEDY),
        "silent": (long[:50], replace(GREEDY, max_tokens=0)),
        "scored": (long[:50], replace(GREEDY, prompt_logprobs=1)),
        "none": (long[:20], replace(GREEDY, routed_experts_start=None)),
    }


def alone(**options: Any) -> dict[str, Reply]:
    """Run each request alone, without a prefix cache."""
    with Rank(DEMO, enable_return_routed_experts=True, prefix_caching=False, **options) as rank:
        return {name: rank.run({name: each})[0][name] for name, each in requests().items()}


def sizes(rank: Rank) -> dict[str, int]:
    """Return the bytes that each request must get: a row per token but the last, from its start on."""
    width = rank.worker.scheduler.config.routing_bytes
    found = {}
    for name, (prompt, params) in requests().items():
        start = params.routed_experts_start
        found[name] = 0 if start is None else (len(prompt) + params.max_tokens - 1 - start) * width
    return found


def test_experts_do_not_depend_on_the_run() -> None:
    expected = alone()
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"prefill_chunk": 16, "num_pages": 12}),
        ({}, {"max_in_flight": 2, "prefill_chunk": 32, "num_pages": 14}),
        ({"speculate": "mtp", "draft_tokens": 3}, {"max_in_flight": 2}),
        ({"speculate": "mtp", "draft_tokens": 2}, {"num_pages": 14, "prefill_chunk": 16}),
    ]
    preempted = 0
    for options, changes in variants:
        with Rank(DEMO, enable_return_routed_experts=True, **options) as rank:
            replies, stats = rank.run(requests(), **changes)
            assert {name: len(reply.experts) for name, reply in replies.items()} == sizes(rank)
            assert replies == expected, (options, changes)
            assert stats.prefix_hit_tokens > 0
            preempted += stats.num_preemptions
            assert not options or stats.accepted[0] > 0
    assert preempted > 0


def test_compressed_prompts_have_all_experts() -> None:
    """The pages of a compressed prompt lack positions, but every position was routed."""
    kept = KvCompression(method="snapkv", budget=40, window=16)
    asked = {name: (prompt, replace(params, kv_compression=kept)) for name, (prompt, params) in requests().items()}
    with Rank(DEMO, enable_return_routed_experts=True) as rank:
        one = {name: rank.run({name: each}, prefix_caching=False)[0][name] for name, each in asked.items()}
        many, stats = rank.run(asked, prefill_chunk=32, num_pages=20)
        assert many == one
        assert {name: len(reply.experts) for name, reply in many.items()} == sizes(rank)
        assert stats.dropped_tokens > 0


def test_a_sequence_continues_behind_what_its_client_has() -> None:
    """A rank that takes over sends the rest: prompt positions from `num_routed` on, and those of new tokens."""
    (prompt, params), width = requests()["long"], 0
    with Rank(DEMO, enable_return_routed_experts=True) as rank:
        width = rank.worker.scheduler.config.routing_bytes
        whole = rank.run({"a": (prompt, params)})[0]["a"]
        for given, routed in ((0, 0), (0, 30), (0, 99), (1, 99), (7, 99)):
            scheduler = rank.scheduler()
            submit = Submit(
                request_id="a",
                prompt_token_ids=tuple(prompt),
                sampling=params,
                output_token_ids=tuple(whole.token_ids[:given]),
                num_routed=routed,
            )
            assert scheduler.add(submit, b"client", 0.0) is None
            replies = {"a": Reply()}
            rank.step(scheduler, replies)
            assert replies["a"].token_ids == whole.token_ids[given:]
            assert replies["a"].experts == whole.experts[(routed + given) * width :]


def test_messages_are_bounded_and_in_order() -> None:
    (prompt, params) = requests()["long"]
    messages: list[Any] = []
    with Rank(DEMO, enable_return_routed_experts=True) as rank:
        width = rank.worker.scheduler.config.routing_bytes
        scheduler = rank.scheduler(prefill_chunk=32)
        submit = Submit(request_id="a", prompt_token_ids=tuple(prompt), sampling=params)
        assert scheduler.add(submit, b"client", 0.0) is None
        while scheduler.has_work():
            step = scheduler.schedule(0.0)
            launched = rank.worker.runner.launch(step, scheduler.requests(step), before=None)
            replies = scheduler.complete(step, launched.results, 0.0, launched.scores, launched.experts)
            messages += [reply.message for reply in replies]
    experts = [m for m in messages if isinstance(m, PromptExperts)]
    assert [(m.start, m.count) for m in experts] == [(0, 32), (32, 32), (64, 32), (96, 3)]
    assert all(len(m.experts) == m.count * width <= MAX_PROMPT_EXPERTS for m in experts)
    tokens = [m for m in messages if isinstance(m, Tokens)]
    assert all(len(m.routed_experts) == width * len(m.token_ids) for m in tokens)
    assert messages.index(experts[-1]) < messages.index(tokens[0])


def test_nothing_is_kept_or_sent_without_the_flag() -> None:
    with Rank(DEMO) as rank:
        config = rank.worker.scheduler.config
        assert config.routing_bytes == 0
        assert rank.worker.runner.routing is None
        prompt, params = requests()["none"]
        assert not rank.run({"none": (prompt, params)})[0]["none"].experts
        submit = Submit(request_id="a", prompt_token_ids=(1, 2), sampling=GREEDY)
        rejected = refusal(submit, config)
        assert rejected is not None
        assert "--enable-return-routed-experts" in rejected.message
        kept = replace(config, routing_bytes=4)
        for start, routed, says in ((2, 0, "not a position"), (-1, 0, "not a position"), (0, 2, "were not sent")):
            wrong = replace(submit, num_routed=routed, sampling=replace(GREEDY, routed_experts_start=start))
            rejected = refusal(wrong, kept)
            assert rejected is not None
            assert says in rejected.message
        assert refusal(submit, kept) is None


def test_salted_requests_share_prefixes_only_among_themselves() -> None:
    """The answers are the same in any case."""
    prompt, params = requests()["long"]
    with Rank(DEMO, enable_return_routed_experts=True) as rank:
        scheduler, replies, hits = rank.scheduler(), [], []
        for salt in ("", "a", "a", "b", ""):
            before = scheduler.stats.prefix_hit_tokens
            replies.append(rank.serve(scheduler, {"r": (prompt, replace(params, cache_salt=salt))})["r"])
            hits.append(scheduler.stats.prefix_hit_tokens - before)
    assert hits == [0, 0, 96, 0, 96]
    assert replies == [replies[0]] * 5


def test_page_routing_reads_what_was_written() -> None:
    """Compare with a plain list, over random pages and ranges."""
    rng = random.Random(2)
    routing = PageRouting(num_pages=9, page_size=4, width=3)
    pages = rng.sample(range(9), 6)
    model = [b"\0\0\0"] * 24
    for _ in range(200):
        start, end = sorted(rng.choices(range(25), k=2))
        if rng.random() < 0.5:
            rows = [rng.randbytes(3) for _ in range(end - start)]
            routing.write(pages, start, b"".join(rows))
            model[start:end] = rows
        else:
            assert routing.read(pages, start, end) == b"".join(model[start:end])
