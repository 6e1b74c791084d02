"""Complaints that users of other engines have reported, each as a test against a fleet that cannot have the fault.

The warm fleet has two ranks, a prefix cache, drafts where the model has them, and chunks of 64 prompt tokens. The cold
fleet has one rank, computes prompts whole, and has neither cache nor drafts. Every answer of the warm fleet must be the
cold one's, with its log-probabilities.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import VOCAB_SIZE, add_drafts, make_checkpoint
from tests.e2e.http_fleet import PAGE, HttpFleet, engine_config, serve_http, wait_for, wait_until_idle
from tests.fleet import ProcessPool, start_fleet

from moeyard_worker.config.worker_spec import ServedWeights

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
    hits = 0
    for past in range(1, PAGE + 1):
        prompt = ids(100 + past, 64 + past)
        first = body(prompt, tokens=3)
        answer = warm.choice(**first)
        assert answer == cold.choice(**first), f"{past} past the block"
        extended = body([*prompt, *answer["token_ids"], *ids(200 + past, 9)], tokens=4)
        found = warm.complete(**extended)
        assert found["choices"] == cold.complete(**extended)["choices"], f"{past} past the block, extended"
        hits += cached(found) >= 64
    # A busy rank may send some to the other rank.
    assert hits >= PAGE // 2


def test_neighbours_with_cached_prompts(fleets: tuple[HttpFleet, HttpFleet]) -> None:
    """Prompts that the cache holds whole run beside new ones in the same steps."""
    warm, cold = fleets
    whole = [ids(300 + i, PAGE * (9 + i)) for i in range(3)]
    for prompt in whole:
        warm.complete(**body(prompt, tokens=2))
    prompts = [*whole, *(ids(400 + i, 30 + 17 * i) for i in range(3)), *whole]
    bodies = [body(prompt, seed=i) for i, prompt in enumerate(prompts)]
    wanted = [cold.complete(**each)["choices"] for each in bodies]
    for _ in range(2):
        found = warm.complete_at_once(bodies)
        assert [each["choices"] for each in found] == wanted
        assert sum(cached(each) > 0 for each in found) >= len(whole)


def test_weights_change_under_load(processes: ProcessPool, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Requests run, and their prompts are cached, while the weights change. Other engines mixed old states with new
    weights. The slow test of deploy/ does this 20 times with the launcher and its API."""
    models = {"default": checkpoints["hybrid_drafts"]}
    models["b"] = make_checkpoint(tmp_path / "b", "qwen3_5_moe_text", seed=9)
    add_drafts(models["b"])
    drafts: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 2, "num_pages": 256}
    prompts = [ids(500 + i, 40 + 25 * i) for i in range(4)]
    bodies = [body(prompt, seed=i, tokens=24) for i, prompt in enumerate(prompts)]
    answers: list[dict[str, Any]] = []
    options: dict[str, Any] = {"model_path": None, "recovery_timeout": 60.0}
    config = engine_config(models["default"], num_workers=2, prefill_chunk=64, **drafts)
    with serve_http(processes, config, **options) as warm, ThreadPoolExecutor(1) as other:
        for version in ("b", "default"):
            asked = other.submit(warm.choices_at_once, bodies)
            wait_for(lambda: warm.num_running() >= 2, "running requests")
            warm.fleet.update(ServedWeights(version=version, directory=str(models[version])))
            answers += [*asked.result(), *warm.choices_at_once(bodies)]
        wait_until_idle(warm)
    spans = [answer["weight_versions"] for answer in answers]
    assert {tuple(each["version"] for each in of) for of in spans} >= {("default", "b"), ("b",), ("b", "default")}
    for version, model in models.items():
        with start_fleet(processes, engine_config(model, num_workers=1, **drafts)) as cold:
            wanted = {}
            for i, (answer, of) in enumerate(zip(answers, spans, strict=True)):
                for span in (each for each in of if each["version"] == version):
                    sampling = {"max_tokens": 24, "temperature": 0.8, "seed": i % 4, "logprobs": 2, "ignore_eos": True}
                    begun = tuple(answer["token_ids"][: span["start"]])
                    name = f"{i}-{span['start']}"
                    cold.client.submit(0, name, prompts[i % 4], **sampling, trace_decode_token_ids=begun)
                    wanted[name] = answer, slice(span["start"], span["end"])
            for (answer, part), found in zip(wanted.values(), cold.client.wait(*wanted), strict=True):
                assert answer["token_ids"][part] == found.token_ids[part], f"{answer['weight_versions']}"
                values = answer["logprobs"]["token_logprobs"][part]
                assert values == [each.logprob for each in found.logprobs[part]], f"{answer['weight_versions']}"
