"""Complaints that users of other engines have reported, each as a test against a fleet that cannot have the fault.

The warm fleet has two ranks, a prefix cache, drafts where the model has them, and chunks of 64 prompt tokens. The cold
fleet has one rank, computes prompts whole, and has neither cache nor drafts. Every answer of the warm fleet must be the
cold one's, with its log-probabilities.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import VOCAB_SIZE
from tests.e2e.http_fleet import PAGE, HttpFleet, engine_config, serve_http, wait_until_idle
from tests.fleet import ProcessPool

# Qwen3.5 with a good layer for drafts: two of three layers have a state per sequence. And latent attention alone.
MODELS = ("hybrid_drafts", "mla")


@pytest.fixture(scope="module", params=MODELS)
def fleets(
    request: pytest.FixtureRequest, processes: ProcessPool, checkpoints: dict[str, Path]
) -> Iterator[tuple[HttpFleet, HttpFleet]]:
    """Yield the warm and the cold fleet of a model."""
    model = checkpoints[request.param]
    drafts: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 2} if request.param == "hybrid_drafts" else {}
    warm = engine_config(model, num_workers=2, num_pages=256, prefill_chunk=64, **drafts)
    cold = engine_config(model, num_workers=1, num_pages=256, prefix_caching=False)
    ids_only: dict[str, Any] = {"model_path": None}
    with serve_http(processes, warm, **ids_only) as one, serve_http(processes, cold, **ids_only) as other:
        yield one, other
        wait_until_idle(one)


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, count).tolist()


def body(prompt: Sequence[int], *, seed: int = 5, tokens: int = 12) -> dict[str, Any]:
    """A sampled request with log-probabilities, so that every position's bits are seen."""
    sampling = {"temperature": 0.8, "seed": seed, "logprobs": 2, "ignore_eos": True}
    return {"prompt": list(prompt), "max_tokens": tokens, **sampling}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_six_turns_of_a_conversation(fleets: tuple[HttpFleet, HttpFleet]) -> None:
    """Each turn repeats the conversation. Other engines' answers changed once states and drafts met a prefix hit."""
    warm, cold = fleets
    conversation, hits = ids(1, 50), 0
    for turn in range(6):
        asked = body(conversation, seed=turn, tokens=21)
        found, wanted = warm.complete(**asked), cold.complete(**asked)
        assert found["choices"] == wanted["choices"], f"turn {turn}"
        hits += cached(found) > 0
        assert cached(wanted) == 0
        # The answer, and a tool's result of another length in each turn.
        conversation += [*found["choices"][0]["token_ids"], *ids(10 + turn, 5 + 11 * turn)]
    # The first turn hits nothing. A busy rank may send one turn to the other rank.
    assert hits >= 3


def test_prompts_that_end_just_past_a_block(fleets: tuple[HttpFleet, HttpFleet]) -> None:
    """A prompt ends 1 to 16 tokens past a block of 64, and is then extended by its answer and more."""
    warm, cold = fleets
    for past in range(1, PAGE + 1):
        prompt = ids(100 + past, 64 + past)
        first = body(prompt, tokens=3)
        answer = warm.choice(**first)
        assert answer == cold.choice(**first), f"{past} past the block"
        extended = body([*prompt, *answer["token_ids"], *ids(200 + past, 9)], tokens=4)
        assert warm.choice(**extended) == cold.choice(**extended), f"{past} past the block, extended"


def test_neighbours_with_cached_prompts(fleets: tuple[HttpFleet, HttpFleet]) -> None:
    """Prompts that the cache holds whole run beside new ones in the same steps."""
    warm, cold = fleets
    whole = [ids(300 + i, PAGE * (4 + i)) for i in range(3)]
    for prompt in whole:
        warm.complete(**body(prompt, tokens=2))
    prompts = [*whole, *(ids(400 + i, 30 + 17 * i) for i in range(3)), *whole]
    bodies = [body(prompt, seed=i) for i, prompt in enumerate(prompts)]
    wanted = [cold.choice(**each) for each in bodies]
    for _ in range(2):
        assert warm.choices_at_once(bodies) == wanted
