"""`score: as_decoded`: workers get the output as forced tokens, and clients the answer that they get for a prompt."""

import json
from typing import Any

import pytest
from tests.router.scripted_worker import MAX_MODEL_LEN, scripted_experts

from moeyard_router.config import AccessConfig, RoutedShape

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
IDS = list(range(5, 25))
SCORED = {"score": "as_decoded", "output_start": 6}


def forcing(submit: Any) -> list[int]:
    """The script of a worker that samples 30, 31, ... behind the forced output."""
    return [*submit.sampling.trace_decode_token_ids, *range(30, 40)]


def answer(service: Any, path: str, **fields: Any) -> dict[str, Any]:
    body = {"token_ids": IDS, "sampling_params": fields} if path == GENERATE else {"prompt": IDS, **fields}
    reply = service.post(path, **body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return {name: value for name, value in found.items() if name not in ("id", "created", "request_id")}


@pytest.fixture(params=[(1, 4), (5, 3), (100, 100)], ids=str)
def service(start, request):
    """A router that returns experts. Its workers send one, several, or all tokens in a message."""
    service = start(1, routing=RoutedShape(top_k=2, id_bytes=1, places=(0, 1, 2), num_layers=3))
    for worker in service.workers:
        worker.script, (worker.chunk, worker.score_chunk) = forcing, request.param
    return service


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"max_tokens": 0, "prompt_logprobs": 2, "return_token_ids": True}),
        (COMPLETIONS, {"max_tokens": 0, "prompt_logprobs": 0, "echo": True, "logprobs": 3}),
        (COMPLETIONS, {"max_tokens": 3, "prompt_logprobs": 0, "logprobs": 3, "return_token_ids": True}),
        (COMPLETIONS, {"max_tokens": 3, "prompt_logprobs": 4, "routed_experts_prompt_start": 5}),
        (GENERATE, {"max_tokens": 1, "prompt_logprobs": 1}),
        (GENERATE, {"max_tokens": 4, "prompt_logprobs": 1, "logprobs": 0}),
    ],
    ids=str,
)
def test_answer_is_that_of_a_prompt(service, path, fields):
    """The scripted scores do not depend on the formula, so all fields are equal."""
    plain, scored = answer(service, path, **fields), answer(service, path, **fields, **SCORED)
    assert scored == plain
    whole, split = service.submits
    assert (tuple(whole.prompt_token_ids), whole.sampling.as_decoded) == (tuple(IDS), False)
    assert (tuple(split.prompt_token_ids), tuple(split.sampling.trace_decode_token_ids)) == (
        tuple(IDS[:6]),
        tuple(IDS[6:]),
    )
    sampling = split.sampling
    assert sampling.as_decoded
    assert sampling.max_tokens == fields["max_tokens"] + 14
    assert sampling.logprobs == max(fields["prompt_logprobs"], fields.get("logprobs", 0))


@pytest.mark.parametrize(
    ("path", "max_tokens"), [(COMPLETIONS, 0), (COMPLETIONS, 1), (COMPLETIONS, 3), (GENERATE, 1), (GENERATE, 3)]
)
@pytest.mark.parametrize("score", [{}, SCORED], ids=["prompt", "as_decoded"])
def test_every_answer_names_its_weights(service, path, max_tokens, score):
    """The span of an answer without output is empty, and names the weights that computed the scores."""
    (choice,) = answer(service, path, max_tokens=max_tokens, prompt_logprobs=0, **score)["choices"]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": max_tokens}]


def test_least_number_of_sampled_tokens_is_behind_the_output(service):
    answer(service, COMPLETIONS, max_tokens=3, min_tokens=2, prompt_logprobs=0, **SCORED)
    assert service.submits[0].sampling.min_tokens == 16


def test_trace_is_scored_as_decoded(service):
    fields = {"trace_decode_token_ids": IDS[6:], "logprobs": 1}
    plain, scored = answer(service, GENERATE, **fields), answer(service, GENERATE, **fields, score="as_decoded")
    assert scored == plain
    assert [submit.sampling.as_decoded for submit in service.submits] == [False, True]


def test_compressed_prompt_keeps_the_whole_output(service):
    kept = {"method": "snapkv", "budget": 4, "window": 2}
    usage = answer(service, COMPLETIONS, max_tokens=1, prompt_logprobs=0, kv_compression=kept, **SCORED)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["kept_tokens"]) == (20, 4 + 14)


def test_large_bodies_have_the_same_answer(service):
    """A body above 64 KiB becomes a job in another process."""
    fields = {"max_tokens": 1, "prompt_logprobs": 1, **SCORED}
    assert answer(service, COMPLETIONS, **fields, metadata="x" * 70000) == answer(service, COMPLETIONS, **fields)


def test_missing_scores_are_an_error(service):
    (worker,) = service.workers
    worker.experts = lambda position: b"" if position >= 5 else scripted_experts(position)
    reply = service.post(COMPLETIONS, prompt=IDS, max_tokens=0, prompt_logprobs=1, **SCORED)
    assert reply.status_code == 500
    assert "did not send the routed experts" in reply.text


@pytest.mark.parametrize("prompts", [False, True])
def test_log_has_the_output_as_a_trace(start, wait_for, tmp_path, prompts):
    """A replay of the line scores forced and sampled tokens. Without --log-prompts the line has no id."""
    path = tmp_path / "log"
    service = start(1, access=AccessConfig(log_requests=path, log_prompts=prompts))
    service.workers[0].script = forcing
    answer(service, COMPLETIONS, max_tokens=2, prompt_logprobs=1, **SCORED)
    wait_for(path.read_text, "a line")
    (line,) = map(json.loads, path.read_text().splitlines())
    params = line["sampling_params"]
    assert (line["prompt_tokens"], line["output_tokens"], params["score"]) == (6, 16, "as_decoded")
    if prompts:
        assert line["prompt_token_ids"] == IDS[:6]
        assert line["token_ids"] == params["trace_decode_token_ids"] == [*IDS[6:], 30, 31]
        assert line["token_logprobs"] == [-1.5] * 16
    else:
        assert not {"prompt_token_ids", "token_ids", "token_logprobs"} & line.keys()
        assert "trace_decode_token_ids" not in params


TRACE = {"trace_decode_token_ids": [5]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {**SCORED, "score": "as_prompt"}, "score"),
        (COMPLETIONS, {"score": "as_decoded"}, "output_start"),
        (COMPLETIONS, {"output_start": 3}, "output_start"),
        (COMPLETIONS, {**SCORED, "prompt_logprobs": None}, "score"),
        (COMPLETIONS, {**SCORED, "output_start": 0}, "output_start"),
        (COMPLETIONS, {**SCORED, "output_start": 20}, "output_start"),
        (COMPLETIONS, {**SCORED, "prompt": [IDS, IDS]}, "output_start"),
        (COMPLETIONS, {**SCORED, "n": 2}, "n"),
        (COMPLETIONS, {**SCORED, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {**SCORED, "structured_outputs": {"regex": "a"}}, "score"),
        (COMPLETIONS, {**SCORED, "routed_experts_prompt_start": 6}, "routed_experts_prompt_start"),
        (COMPLETIONS, {**SCORED, "max_tokens": MAX_MODEL_LEN - 19}, "max_tokens"),
        ("/v1/chat/completions", {**SCORED, "messages": [{"role": "user", "content": "a"}], "prompt": None}, "score"),
        (GENERATE, {"score": "as_decoded", "prompt_logprobs": 1}, "sampling_params.score"),
        (GENERATE, {**SCORED}, "sampling_params.score"),
        (GENERATE, {**TRACE, "score": "as_decoded"}, "sampling_params.score"),
        (GENERATE, {**TRACE, **SCORED, "logprobs": 0}, "sampling_params.output_start"),
        (GENERATE, {**SCORED, "prompt_logprobs": 0, "output_start": 20}, "sampling_params.output_start"),
        (GENERATE, {**SCORED, "prompt_logprobs": 0, "n": 2}, "sampling_params.n"),
    ],
    ids=str,
)
def test_errors_name_the_clients_field(start, path, fields, param):
    service = start(1, routing=RoutedShape(top_k=2, id_bytes=1, places=(0, 1, 2), num_layers=3))
    if path == GENERATE:
        body: dict[str, Any] = {"token_ids": IDS, "sampling_params": fields}
    else:
        body = {"prompt": IDS, "prompt_logprobs": 1, **fields}
    reply = service.post(path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert not service.submits
