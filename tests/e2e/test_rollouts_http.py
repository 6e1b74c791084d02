"""A trainer's requests over HTTP on two ranks: ids in and out, experts of transformers' router, forced outputs."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.e2e.http_fleet import HttpFleet, engine_config, serve_http
from tests.fleet import ProcessPool

from moeyard.local.settings import routed_shape
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.models.families import load_model_config

PATH = "/inference/v1/generate"
PROMPT = [(7 * i) % 250 for i in range(1, 41)]
SAMPLING = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rollouts"), "qwen3_moe", seed=4)


@pytest.fixture(scope="module")
def http(processes: ProcessPool, model: Path) -> Iterator[HttpFleet]:
    """Two ranks with few expert slots."""
    config = engine_config(model, num_workers=2, expert_slots=5, enable_return_routed_experts=True, prefill_chunk=16)
    shape = routed_shape(config, load_model_config(model))
    with serve_http(processes, config, model_path=None, routing=shape, canary_interval=600.0) as http:
        yield http


def generate(http: HttpFleet, **sampling: Any) -> list[dict[str, Any]]:
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}}
    answer = http.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def test_experts_are_those_of_transformers_on_every_rank(http: HttpFleet, model: Path) -> None:
    """Choices run on both ranks. The second request reuses prefixes."""
    reference = reference_model(model, "qwen3_moe", dtype=torch.float32)
    first = generate(http, n=4)
    for choice in first:
        ids = PROMPT + choice["token_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        expected = np.stack([layer.topk(2).indices.numpy() for layer in logits], axis=1)
        assert found.dtype == np.uint8
        assert np.array_equal(found, expected)
    assert generate(http, n=4) == first
    body = {"prompt": PROMPT, **SAMPLING, "return_token_ids": True}
    (completed,) = http.client.post("/v1/completions", json=body).json()["choices"]
    assert completed["prompt_token_ids"] == PROMPT
    assert (completed["token_ids"], completed["routed_experts"]) == (first[0]["token_ids"], first[0]["routed_experts"])


def test_forced_output_has_the_bits_of_the_sampled_one(http: HttpFleet) -> None:
    (sampled,) = generate(http)
    (forced,) = generate(http, trace_decode_token_ids=sampled["token_ids"], temperature=0.0, seed=1)
    assert forced == sampled
    other = [(i + 1) % 250 for i in sampled["token_ids"]]
    (forced,) = generate(http, trace_decode_token_ids=other)
    assert forced["token_ids"] == other
    assert forced["routed_experts"] != sampled["routed_experts"]


def test_scoring_has_the_bits_of_sampling(http: HttpFleet) -> None:
    """As a trace of ids, and as the end of a prompt, whose answer also has the prompt's scores and experts."""
    (sampled,) = generate(http, max_tokens=70)
    output = sampled["token_ids"]
    scoring = {"score": "as_decoded", "temperature": 0.0, "seed": 1}
    (scored,) = generate(http, max_tokens=70, trace_decode_token_ids=output, **scoring)
    assert scored == sampled
    body = {"prompt": PROMPT + output, "max_tokens": 0, "prompt_logprobs": 0, "output_start": len(PROMPT), **scoring}
    (completed,) = http.client.post("/v1/completions", json=body).json()["choices"]
    found = [
        entry[str(token)] for entry, token in zip(completed["prompt_logprobs"][len(PROMPT) :], output, strict=True)
    ]
    assert [each["logprob"] for each in found] == [each["logprob"] for each in sampled["logprobs"]["content"]]
    assert completed["routed_experts"] == sampled["routed_experts"]
    assert (completed["text"], completed["finish_reason"]) == ("", "length")


def test_answers_without_output_name_their_weights(http: HttpFleet) -> None:
    """A prompt that is only computed, a prompt with scores, and an output that is scored as decoded."""
    scored = {"prompt_logprobs": 0, "output_start": 30, "score": "as_decoded"}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, **scored}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **scored}),
        (PATH, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, **scored}}),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}),
    ):
        answer = http.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        choice = found["meta_info"] if path == "/generate" else found["choices"][0]
        end = body.get("max_tokens", body.get("sampling_params", {}).get("max_tokens", 0))
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": end}], body
        assert choice.get("weight_version", "default") == "default"
