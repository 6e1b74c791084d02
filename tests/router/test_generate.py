"""/inference/v1/generate: token ids in, token ids out, in the form of vLLM's API."""

from typing import Any

import pytest
from tests.router.scripted_worker import MAX_MODEL_LEN, VOCAB_SIZE

from moeyard_router.config import SamplingDefaults

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7, 300]


def generate(service, *, sampling_params: dict[str, Any], **body: Any) -> dict[str, Any]:
    """Return an answer that must succeed."""
    answer = service.post(PATH, token_ids=PROMPT, sampling_params=sampling_params, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answer_is_vllms(service):
    answer = generate(service, sampling_params={"max_tokens": 4, "seed": 1}, request_id="mine", model="tiny")
    (submit,) = service.submits
    ids = service.workers[0].default_script(submit)[:4]
    assert answer == {
        "request_id": "mine",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "length",
                "token_ids": ids,
                "weight_versions": [{"version": "default", "start": 0, "end": 4}],
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert submit.prompt_token_ids == tuple(PROMPT)
    assert generate(service, sampling_params={"max_tokens": 1})["request_id"].startswith("gen-")


def test_logprobs_begin_with_the_chosen_token(service):
    for count, others in ((0, 0), (1, 0), (3, 2)):
        (choice,) = generate(service, sampling_params={"max_tokens": 2, "logprobs": count})["choices"]
        for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            chosen = {"token": f"token_id:{token_id}", "logprob": -1.5, "bytes": None}
            rest = [
                {"token": f"token_id:{token_id + 1 + i}", "logprob": -0.25 * (i + 1), "bytes": None}
                for i in range(others)
            ]
            assert entry == {**chosen, "top_logprobs": [chosen, *rest]}


def test_prompt_logprobs_are_at_the_top(service):
    params = {"max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    scores = generate(service, sampling_params=params)["prompt_logprobs"]
    assert scores == [
        None,
        *(
            {
                str(i): {"logprob": -1.5, "rank": 2, "decoded_token": None},
                str(i + 1): {"logprob": -0.25, "rank": 1, "decoded_token": None},
            }
            for i in PROMPT[1:]
        ),
    ]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("params", [{}, {"logprobs": 2, "n": 2}, {"stop": ["fox"], "temperature": 0}], ids=str)
def test_stream_equals_the_whole_answer(service, chunk, params):
    for worker in service.workers:
        worker.chunk = chunk
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 20, "seed": 3, **params}, "request_id": "r"}
    whole = service.post(PATH, **body).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = service.stream(PATH, **body, stream_options=options)
    assert last == {"request_id": "r", "choices": [], "usage": whole["usage"]}
    assert all(event["request_id"] == "r" and event["usage"] is not None for event in events)
    for choice in whole["choices"]:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        if "logprobs" in params:
            assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == choice[
                "logprobs"
            ]["content"]


def test_stop_string_cuts_the_ids(service, codec):
    params = {"max_tokens": 60, "temperature": 0}
    (free,) = generate(service, sampling_params=params)["choices"]
    text = codec.decode(free["token_ids"])
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (cut,) = generate(service, sampling_params={**params, "stop": [stop]})["choices"]
    count = len(cut["token_ids"])
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == free["token_ids"][:count]
    assert stop in codec.decode(cut["token_ids"])
    assert stop not in codec.decode(cut["token_ids"][:-1])


def test_defaults_are_neutral(start):
    """The checkpoint's sampling defaults apply to /v1/completions only. The output may fill the model."""
    service = start(1, sampling_defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1))
    generate(service, sampling_params={})
    service.complete(prompt=PROMPT)
    ours, completion = (submit.sampling for submit in service.submits)
    assert (ours.temperature, ours.top_p, ours.top_k, ours.min_p, ours.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert ours.max_tokens == MAX_MODEL_LEN - len(PROMPT)
    assert (completion.temperature, completion.max_tokens) == (0.6, 16)


def test_forced_output(service):
    trace = [9, 1, 8]
    for worker in service.workers:
        worker.script = lambda submit: list(submit.sampling.trace_decode_token_ids)
    ends = {"stop": ["x"], "stop_token_ids": [9], "min_tokens": 2, "ignore_eos": False}
    (choice,) = generate(
        service, sampling_params={"trace_decode_token_ids": trace, "temperature": 0.5, "logprobs": 0, **ends}
    )["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (trace, "length")
    (cut,) = generate(service, sampling_params={"trace_decode_token_ids": trace, "max_tokens": 2})["choices"]
    assert cut["token_ids"] == trace[:2]
    sampling = service.submits[0].sampling
    assert tuple(sampling.trace_decode_token_ids) == tuple(trace)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (3, 0, True, ())


TRACE = "trace_decode_token_ids"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *(({"token_ids": ids}, "token_ids") for ids in (None, [], [VOCAB_SIZE], [-1], "text", [1] * MAX_MODEL_LEN)),
        ({"sampling_params": None}, "sampling_params"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        *(
            ({"sampling_params": params}, f"sampling_params.{name}")
            for name, params in (
                ("temperature", {"temperature": -1}),
                ("max_tokens", {"max_tokens": 1000}),
                ("n", {"n": 1000}),
                ("bad_words", {"bad_words": ["x"]}),
                ("temprature", {"temprature": 1}),
                ("prompt", {"prompt": [1]}),
                ("structured_outputs.choice", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
                (TRACE, {TRACE: [VOCAB_SIZE]}),
                (TRACE, {TRACE: []}),
                ("n", {TRACE: [1], "n": 2}),
                ("structured_outputs", {TRACE: [1], "structured_outputs": {"regex": "a"}}),
                ("max_tokens", {TRACE: [1] * MAX_MODEL_LEN}),
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_clients_field(service, changes, param):
    answer = service.post(PATH, **{"token_ids": PROMPT, "sampling_params": {}, **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not service.submits


def test_fields_without_effect_are_named(service):
    params = {"max_tokens": 1, "detokenize": False, "output_kind": 2, "skip_reading_prefix_cache": True}
    answer = service.post(PATH, token_ids=PROMPT, sampling_params=params, priority=3, kv_transfer_params={})
    assert answer.status_code == 200, answer.text
    names = "priority, sampling_params.detokenize, sampling_params.output_kind"
    assert answer.headers["x-moeyard-ignored"] == f"{names}, sampling_params.skip_reading_prefix_cache"


def test_salt_reaches_the_worker(service):
    generate(service, sampling_params={"max_tokens": 1}, cache_salt="7")
    service.complete(prompt=PROMPT, max_tokens=1, cache_salt="8")
    assert [submit.sampling.cache_salt for submit in service.submits] == ["7", "8"]
    answer = service.post(PATH, token_ids=PROMPT, sampling_params={}, cache_salt="")
    assert answer.json()["error"]["param"] == "cache_salt"


def test_salt_beside_the_ids_and_among_the_parameters(service):
    for outer, inner in (("7", None), (None, "7"), ("7", "7")):
        generate(service, sampling_params={"max_tokens": 1, "cache_salt": inner}, cache_salt=outer)
    assert [submit.sampling.cache_salt for submit in service.submits] == ["7"] * 3
    answer = service.post(PATH, token_ids=PROMPT, sampling_params={"cache_salt": "8"}, cache_salt="7")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
    assert "cache_salt and sampling_params.cache_salt are both given and differ" in answer.json()["error"]["message"]
    assert len(service.submits) == 3


def test_large_bodies_have_the_same_answer(service):
    """A body above 64 KiB becomes a job in another process."""
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 9, "temperature": 0, "logprobs": 1},
        "request_id": "r",
    }
    small = service.post(PATH, **body)
    large = service.post(PATH, **body, metadata="x" * 70000)
    assert small.status_code == large.status_code == 200, large.text
    assert small.json() == large.json()


def test_there_is_no_need_for_a_tokenizer(start):
    service = start(1, model_path=None, model_name="a-shape")
    (choice,) = generate(service, sampling_params={"max_tokens": 3, "logprobs": 0})["choices"]
    assert len(choice["token_ids"]) == 3
    answer = service.post(PATH, token_ids=PROMPT, sampling_params={"stop": ["x"]})
    assert answer.json()["error"]["param"] == "sampling_params.stop"
