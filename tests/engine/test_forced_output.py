"""Outputs that a request fixes: the tokens are those, and the log-probabilities are the model's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import DEMO, make_checkpoint
from tests.rank import Rank
from tokenizers import Tokenizer

from moeyard_worker.protocol import Grammar, SamplingParams
from moeyard_worker.scheduling.sampling_check import sampling_error

OUTPUT = 24


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").read_text().splitlines()[:3]]
    return [tokenizer.encode(text).ids[:count] for text, count in zip(texts, (5, 33, 64), strict=True)]


@pytest.mark.parametrize("as_decoded", [False, True], ids=["one per step", "many per step"])
@pytest.mark.parametrize("options", [{}, {"speculate": "mtp", "draft_tokens": 3}], ids=["plain", "drafts"])
def test_replay_of_an_answer_has_its_log_probabilities(options: dict[str, Any], as_decoded: bool) -> None:
    sampled = SamplingParams(max_tokens=OUTPUT, temperature=1.1, seed=3, ignore_eos=True, logprobs=4)
    with Rank(DEMO) as rank:
        answers, _ = rank.run({str(i): (prompt, sampled) for i, prompt in enumerate(prompts())})
    replay = replace(sampled, temperature=0.0, top_k=1, seed=0)
    forced = replace(replay, as_decoded=as_decoded)
    requests = {
        name: (prompt, replace(forced, trace_decode_token_ids=tuple(answers[name].token_ids)))
        for name, prompt in zip(answers, prompts(), strict=True)
    }
    requests["free"] = (prompts()[0], replay)
    with Rank(DEMO, **options) as rank:
        for changes in ({}, {"max_in_flight": 2}, {"prefill_chunk": 16, "num_pages": 12}):
            found, _ = rank.run(requests, **changes)
            free = found.pop("free")
            assert found == answers, "a replay differs from what it replays"
            assert free.token_ids != answers["0"].token_ids, "the trace is not what forced the tokens"


def test_any_tokens_can_be_forced(tmp_path: Path) -> None:
    """Each log-probability equals that of a separate request which a bias leads to the same token."""
    with Rank(make_checkpoint(tmp_path, "deepseek_v3")) as rank:
        vocab = rank.worker.scheduler.config.vocab_size
        prompt, trace = [5, 6, 7, 8], (vocab - 1, 3, 3, 0, vocab // 2)
        params = SamplingParams(max_tokens=len(trace), temperature=0.0, ignore_eos=True, logprobs=2)
        forced, _ = rank.run({"a": (prompt, replace(params, trace_decode_token_ids=trace))})
        assert tuple(forced["a"].token_ids) == trace
        for i, token_id in enumerate(trace):
            biased = replace(params, max_tokens=i + 1, logit_bias={token_id: 100.0})
            reply = rank.serve(rank.scheduler(), {"b": (prompt, biased)}, begun={"b": trace[:i]})["b"]
            assert reply.token_ids == [token_id]
            assert reply.logprobs == forced["a"].logprobs[i : i + 1]


def test_refusals() -> None:
    trace = (5, 6)
    assert sampling_error(SamplingParams(max_tokens=2, trace_decode_token_ids=trace), 7) is None
    for params, says in (
        (SamplingParams(max_tokens=2, trace_decode_token_ids=trace), "outside the vocabulary of 6"),
        (SamplingParams(max_tokens=2, trace_decode_token_ids=(-1,)), "outside the vocabulary of 6"),
        (SamplingParams(max_tokens=2, trace_decode_token_ids=(1,), grammar=Grammar(kind="json_object")), "exclude"),
    ):
        assert says in str(sampling_error(params, 6))
