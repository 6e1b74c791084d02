"""Sampling parameters over HTTP on two ranks, against transformers' logits and plain numpy.

The fleet has few expert slots, so everything here runs with misses and evictions. Text that can be read comes from a
logit bias towards letters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.checkpoints import EOS_ID, VOCAB_SIZE, make_checkpoint
from tests.e2e.http_fleet import HttpFleet, engine_config, events, serve_http, wait_until_idle
from tests.fleet import ProcessPool
from tokenizers import Tokenizer

from moeyard_worker.engine.verify import reference_model

PROMPT = [7, 91, 3, 200, 64, 12, 5]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.9, "top_p": 0.95, "seed": 17, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Bench:
    """The fleet under test, its model in transformers, and its tokenizer."""

    http: HttpFleet
    model: Any
    tokenizer: Tokenizer

    def logits(self, ids: list[int]) -> NDArray[np.float64]:
        """What transformers predicts after each position of `ids`, [len(ids), V]."""
        with torch.inference_mode():
            return np.asarray(self.model(torch.tensor([ids])).logits[0].double().numpy())

    def letters(self) -> dict[str, float]:
        """A logit bias that leaves only the letters a to z."""
        return {str(self.tokenizer.token_to_id(chr(c))): 100.0 for c in range(ord("a"), ord("z") + 1)}


@pytest.fixture(scope="module")
def bench(processes: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two ranks with 5 slots each for 2 x 4 experts."""
    torch.set_num_threads(1)
    directory = make_checkpoint(tmp_path_factory.mktemp("sampling"), "deepseek_v3", seed=2, tokenizer=True)
    config = engine_config(directory, num_workers=2, expert_slots=5)
    model = reference_model(directory, "deepseek_v3", dtype=torch.float32)
    with serve_http(processes, config, canary_interval=600.0) as http:
        yield Bench(http, model, Tokenizer.from_file(str(directory / "tokenizer.json")))


@pytest.fixture
def http(bench: Bench) -> Iterator[HttpFleet]:
    """The fleet; afterwards nothing may run, wait or hold pages."""
    yield bench.http
    wait_until_idle(bench.http)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def test_same_seed_in_any_batch(http: HttpFleet) -> None:
    body = {**SEEDED, "max_tokens": 40, "logprobs": 2}
    alone = http.choice(**body)
    others = [{**SEEDED, "prompt": [n] * (5 * n), "seed": n, "max_tokens": 30} for n in range(1, 7)]
    first, *_, last = http.choices_at_once([body, *others, body])
    assert alone == first == last
    assert http.choice(**{**body, "seed": 18})["token_ids"] != alone["token_ids"]


def test_seeds_of_n_choices(http: HttpFleet) -> None:
    answer = http.complete(**SEEDED, n=4, max_tokens=24)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    for i, choice in enumerate(choices):
        assert choice == {**http.choice(**{**SEEDED, "seed": 17 + i}, max_tokens=24), "index": i}
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 4 * 24


def test_stop_string(bench: Bench, http: HttpFleet) -> None:
    body = {**GREEDY, "logit_bias": bench.letters(), "max_tokens": 40}
    whole = http.choice(**body)
    text = whole["text"]
    assert len(text) == 40
    assert text.isalpha()
    # The second half of the text has no say: what counts is where these three letters appear first.
    stop = text[20:23]
    end = text.index(stop)
    stopped = http.choice(**body, stop=["no such text", stop])
    assert stopped["text"] == text[:end]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["token_ids"] == whole["token_ids"][: end + len(stop)]
    assert http.choice(**body, stop=stop, include_stop_str_in_output=True)["text"] == text[:end] + stop
    with http.client.stream("POST", "/v1/completions", json={**body, "stop": stop, "stream": True}) as answer:
        parts = [event["choices"][0] for event in events(answer)]
    assert "".join(part["text"] for part in parts) == text[:end]
    assert parts[-1]["stop_reason"] == stop
    later = http.choice(**body, stop=stop, min_tokens=end + len(stop))
    assert later["text"].startswith(text[: end + len(stop)])


def test_stop_ids(bench: Bench, http: HttpFleet) -> None:
    body = {**GREEDY, "logit_bias": bench.letters(), "max_tokens": 40}
    whole = http.choice(**body)["token_ids"]
    stop = whole[12]
    first = whole.index(stop)
    stopped = http.choice(**body, stop_token_ids=[271, stop])
    assert stopped["token_ids"] == whole[: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert len(stopped["text"]) == first, "a stop token belongs to the ids, not to the text"
    # Held back for 20 tokens the model takes its next choice, and the first one that is free again ends it.
    held = http.choice(**body, stop_token_ids=[stop], min_tokens=20)
    assert held["token_ids"] == expected_greedy(bench, num_tokens=40, bias=bench.letters(), stop=stop, min_tokens=20)
    assert len(held["token_ids"]) >= 20
    assert stop not in held["token_ids"][:20]


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 2), (4, 5)])
def test_eos_waits_for_min_tokens(http: HttpFleet, min_tokens: int, count: int) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "logit_bias": {str(EOS_ID): 100}, "max_tokens": 9}
    choice = http.choice(**body, min_tokens=min_tokens)
    assert len(choice["token_ids"]) == count
    assert choice["token_ids"][-1] == EOS_ID
    assert EOS_ID not in choice["token_ids"][:-1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_ignore_eos_and_max_tokens(http: HttpFleet) -> None:
    bias = {str(EOS_ID): 100}
    for max_tokens in (1, 9):
        choice = http.choice(**GREEDY, logit_bias=bias, max_tokens=max_tokens, skip_special_tokens=False)
        assert choice["token_ids"] == [EOS_ID] * max_tokens
        assert choice["text"] == "<|eos|>" * max_tokens
        assert choice["finish_reason"] == "length"


def test_logit_bias_forces_and_forbids(http: HttpFleet) -> None:
    assert http.choice(**SEEDED, logit_bias={"100": 100}, max_tokens=6)["token_ids"] == [100] * 6
    usual = http.choice(**GREEDY, max_tokens=1)["token_ids"][0]
    assert http.choice(**GREEDY, logit_bias={str(usual): -100}, max_tokens=1)["token_ids"] != [usual]


def test_logprobs(bench: Bench, http: HttpFleet) -> None:
    choice = http.choice(**{**SEEDED, "temperature": 1.3, "top_p": 1.0}, max_tokens=30, logprobs=5)
    ids, found = choice["token_ids"], choice["logprobs"]
    expected = log_softmax(bench.logits(PROMPT + ids)[len(PROMPT) - 1 : -1])
    chosen = expected[np.arange(len(ids)), ids]
    np.testing.assert_allclose(found["token_logprobs"], chosen, rtol=0, atol=1e-4)
    assert min(found["token_logprobs"]) < -5, "all tokens were likely ones: the test says little"
    spelled = [spell(token_bytes(bench.tokenizer, i)) or f"token_id:{i}" for i in range(VOCAB_SIZE)]
    assert len(set(spelled)) == VOCAB_SIZE
    assert found["tokens"] == [spelled[i] for i in ids]
    for row, token_id, top in zip(expected, ids, found["top_logprobs"], strict=True):
        best = np.argsort(-row)[:5]
        assert set(top) == {spelled[i] for i in [*best, token_id]}
        for i in [*best, token_id]:
            assert top[spelled[i]] == pytest.approx(row[i], abs=1e-4)


def test_chat_logprobs(bench: Bench, http: HttpFleet) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = http.client.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
    assert bench.tokenizer.decode(prompt, skip_special_tokens=False) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    expected = log_softmax(bench.logits(prompt + ids)[len(prompt) - 1 : -1])
    for row, token_id, entry in zip(expected, ids, choice["logprobs"]["content"], strict=True):
        assert entry["logprob"] == pytest.approx(row[token_id], abs=1e-4)
        assert bytes(entry["bytes"]) == token_bytes(bench.tokenizer, token_id)
        best = [int(i) for i in np.argsort(-row)[:4]]
        assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [token_bytes(bench.tokenizer, i) for i in best]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row[best], abs=1e-4)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token of the byte-level test tokenizer stands for; nothing for the ids that pad the vocabulary."""
    token = tokenizer.id_to_token(token_id) or ""
    if len(token) != 1:
        return token.encode()
    # Visible characters of Latin-1 stand for themselves, the other bytes in order for U+0100 and what follows.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return bytes([ord(token) if ord(token) < 256 else others[ord(token) - 256]])


def spell(raw: bytes) -> str:
    """How a completion's logprobs name a token."""
    return raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


PENALTIES: dict[str, dict[str, float]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "all": {"presence_penalty": -0.5, "frequency_penalty": 1.1, "repetition_penalty": 1.3},
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties(bench: Bench, http: HttpFleet, name: str) -> None:
    # Letters only, so that the 26 of them come again and again.
    body = {**GREEDY, "logit_bias": bench.letters(), "max_tokens": 32}
    usual = http.choice(**body)["token_ids"]
    assert usual == expected_greedy(bench, num_tokens=32, bias=bench.letters())
    found = http.choice(**body, **PENALTIES[name])["token_ids"]
    assert found == expected_greedy(bench, num_tokens=32, bias=bench.letters(), **PENALTIES[name])
    assert found != usual


def expected_greedy(
    bench: Bench,
    *,
    num_tokens: int,
    bias: dict[str, float],
    stop: int | None = None,
    min_tokens: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[int]:
    """Greedy tokens after `PROMPT` from transformers' logits, edited one value at a time."""
    output: list[int] = []
    while len(output) < num_tokens and (stop not in output or len(output) < min_tokens):
        logits = bench.logits(PROMPT + output)[-1]
        for token_id in range(VOCAB_SIZE):
            logits[token_id] += bias.get(str(token_id), 0.0)
            if token_id in PROMPT or token_id in output:
                up, down = (repetition_penalty, 1 / repetition_penalty)
                logits[token_id] *= down if logits[token_id] > 0 else up
            times = output.count(token_id)
            logits[token_id] -= frequency_penalty * times + (presence_penalty if times else 0.0)
        if stop is not None and len(output) < min_tokens:
            logits[stop] = -np.inf
        best, second = np.sort(logits)[::-1][:2]
        assert best - second > 1e-4, "a near-tie: choose another seed for the checkpoint"
        output.append(int(np.argmax(logits)))
    return output


def test_loglikelihood_as_lm_eval_asks(bench: Bench, http: HttpFleet) -> None:
    """Four prompts at once, echoed with one alternative and one token more; lm-eval sums what lies between."""
    prompts = [[(17 * i + 5 * j * j) % VOCAB_SIZE for j in range(size)] for i, size in enumerate((2, 30, 61, 140))]
    wanted = {"max_tokens": 1, "temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    choices = http.complete(prompt=prompts, **wanted)["choices"]
    for ids, choice in zip(prompts, sorted(choices, key=lambda c: c["index"]), strict=True):
        of_model = log_softmax(bench.logits(ids))[np.arange(len(ids) - 1), ids[1:]]
        told = choice["logprobs"]
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(of_model, abs=1e-4)
        likeliest = log_softmax(bench.logits(ids)).max(1)
        tops = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
        assert tops == pytest.approx(likeliest[:-1], abs=1e-4), "lm-eval takes the largest for the greedy token"
        # Nothing of it depends on the token more, on what ran beside, or on a prompt that the pages hold by now.
        for body in ({"max_tokens": 0}, {"max_tokens": 3, "seed": 4}):
            again = http.choice(prompt=ids, **{**wanted, **body})["logprobs"]
            for name in told:
                assert again[name][: len(ids)] == told[name][: len(ids)]
            assert len(again["tokens"]) == len(ids) + body["max_tokens"]


def test_prompt_logprobs_rank_and_order(bench: Bench, http: HttpFleet) -> None:
    answer = http.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=4)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ([], "length", 0)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for row, target, entry in zip(log_softmax(bench.logits(PROMPT)), PROMPT[1:], rest, strict=False):
        order = np.argsort(-row, kind="stable")
        rank = int((row > row[target]).sum()) + 1
        assert next(iter(entry)) == str(target)
        assert entry[str(target)]["rank"] == rank
        assert {int(t) for t in entry} == {target, *order[:4].tolist()}
        for token_id, told in entry.items():
            assert told["logprob"] == pytest.approx(row[int(token_id)], abs=1e-4)
    assert len(rest) == len(PROMPT) - 1
