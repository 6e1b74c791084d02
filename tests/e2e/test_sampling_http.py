"""Seeds and log-probabilities over HTTP on two ranks, against transformers' logits.

The fleet has few expert slots, so all tests run with misses and evictions. Other sampling parameters are tested in
tests/router/test_http.py, tests/scheduling/test_scheduler.py and tests/engine/test_sampler.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http, wait_until_idle
from tests.fleet import ProcessPool
from tokenizers import Tokenizer

from moeyard_worker.engine.assembly.verify import reference_model

PROMPT = [7, 91, 3, 200, 64, 12, 5]
SEEDED: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.9, "top_p": 0.95, "seed": 17, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Bench:
    """The fleet under test, its model in transformers, and its tokenizer."""

    http: HttpFleet
    model: Any
    tokenizer: Tokenizer

    def logits(self, ids: list[int]) -> NDArray[np.float64]:
        """Return transformers' logits [len(ids), V] after each position of `ids`."""
        with torch.inference_mode():
            return np.asarray(self.model(torch.tensor([ids])).logits[0].double().numpy())


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
    """Yield the fleet. Afterwards no request may run, wait or hold pages."""
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


def test_logprobs(bench: Bench, http: HttpFleet) -> None:
    choice = http.choice(**{**SEEDED, "temperature": 1.3, "top_p": 1.0}, max_tokens=30, logprobs=5)
    ids, found = choice["token_ids"], choice["logprobs"]
    expected = log_softmax(bench.logits(PROMPT + ids)[len(PROMPT) - 1 : -1])
    chosen = expected[np.arange(len(ids)), ids]
    np.testing.assert_allclose(found["token_logprobs"], chosen, rtol=0, atol=1e-4)
    assert min(found["token_logprobs"]) < -5, "all tokens were likely, so the test proves little"
    spelled = [spell(token_bytes(bench.tokenizer, i)) or f"token_id:{i}" for i in range(VOCAB_SIZE)]
    assert len(set(spelled)) == VOCAB_SIZE
    assert found["tokens"] == [spelled[i] for i in ids]
    for row, token_id, top in zip(expected, ids, found["top_logprobs"], strict=True):
        best = np.argsort(-row)[:5]
        assert set(top) == {spelled[i] for i in [*best, token_id]}
        for i in [*best, token_id]:
            assert top[spelled[i]] == pytest.approx(row[i], abs=1e-4)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token of the byte-level tokenizer, or none for ids that pad the vocabulary."""
    token = tokenizer.id_to_token(token_id) or ""
    if len(token) != 1:
        return token.encode()
    # Visible Latin-1 characters stand for themselves, the other bytes in order for U+0100 and up.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return bytes([ord(token) if ord(token) < 256 else others[ord(token) - 256]])


def spell(raw: bytes) -> str:
    """Return a token's name in a completion's logprobs."""
    return raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def test_loglikelihood_as_lm_eval_asks(bench: Bench, http: HttpFleet) -> None:
    """Four prompts at once, echoed with one alternative and one extra token. lm-eval sums the tokens in between."""
    prompts = [[(17 * i + 5 * j * j) % VOCAB_SIZE for j in range(size)] for i, size in enumerate((2, 30, 61, 140))]
    wanted = {"max_tokens": 1, "temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    choices = http.complete(prompt=prompts, **wanted)["choices"]
    for ids, choice in zip(prompts, sorted(choices, key=lambda c: c["index"]), strict=True):
        of_model = log_softmax(bench.logits(ids))[np.arange(len(ids) - 1), ids[1:]]
        scores = choice["logprobs"]
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(of_model, abs=1e-4)
        likeliest = log_softmax(bench.logits(ids)).max(1)
        tops = [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]]
        assert tops == pytest.approx(likeliest[:-1], abs=1e-4), "lm-eval takes the largest as the greedy token"
        # The scores do not depend on the extra token, on the batch, or on cached pages.
        for body in ({"max_tokens": 0}, {"max_tokens": 3, "seed": 4}):
            again = http.choice(prompt=ids, **{**wanted, **body})["logprobs"]
            for name in scores:
                assert again[name][: len(ids)] == scores[name][: len(ids)]
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
        for token_id, score in entry.items():
            assert score["logprob"] == pytest.approx(row[int(token_id)], abs=1e-4)
    assert len(rest) == len(PROMPT) - 1
