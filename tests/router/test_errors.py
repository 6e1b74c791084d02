"""Every client error has its own status, a reason and the name of the field."""

import json

import pytest

from moeyard_router.api.fields import NOT_SERVED
from moeyard_worker.protocol import Rejected

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], [2**40]]}, "prompt"),
    ({"prompt": [5] * 256}, "prompt"),
    ({"prompt": ["a"] * 200}, "prompt"),
    ({"prompt": "x", "model": 3}, "model"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"prompt": "x", "max_tokens": "7"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "seed": "1"}, "seed"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": 7}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stop_token_ids": [400]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"prompt": "x", "presence_penalty": 2.1}, "presence_penalty"),
    ({"prompt": "x", "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "repetition_penalty": 0.009}, "repetition_penalty"),
    ({"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"prompt": "x", "messages": HELLO}, "messages"),
    ({"prompt": "x", "max_completion_tokens": 3}, "max_completion_tokens"),
]

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [*HELLO, {"role": "tool", "content": "hi"}]}, "messages.1.role"),
    ({"messages": [*HELLO, {"role": "tool"}]}, "messages.1.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}, "messages.1.tool_calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0.function"),
    ({"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages.1.function_call"),
    ({"messages": [*HELLO, {"role": "assistant", "audio": {"id": "a"}}]}, "messages.1.audio"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}]}, "messages.1.prefix"),
    ({"messages": [{"role": "user", "content": "a", "mood": "sad"}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": "a", "parts": "b"}]}, "messages.0.parts"),
    ({"messages": [{"role": "user", "content": "a", "dropped": []}]}, "messages.0.dropped"),
    ({"messages": [{"role": "user", "content": "a", "refusal": "no"}]}, "messages.0.refusal"),
    ({"messages": [{"role": "user", "content": ["a", {"type": "image_url"}]}]}, "messages.0.content.1.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages.0.content.0.x"),
    ({"messages": HELLO, "reasoning_effort": 3}, "reasoning_effort"),
    ({"messages": HELLO, "prompt": "x"}, "prompt"),
    ({"messages": HELLO, "echo": True}, "echo"),
    ({"messages": HELLO, "logprobs": 3}, "logprobs"),
    ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "a b " * 300}]}, "messages"),
    ({"messages": HELLO, "n": 129}, "n"),
]

# Field values that request unsupported features.
ASKING = [
    *((name, [{}]) for name in NOT_SERVED if name != "tools"),
    *((name, "x") for name in ("allowed_token_ids", "web_search_options")),
    ("best_of", 2),
    ("best_of", True),
    ("best_of", "1"),
    ("length_penalty", True),
    ("modalities", ["text", "audio"]),
    ("suffix", " and"),
    ("tool_choice", "required"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("truncate_prompt_tokens", 5),
    ("use_beam_search", True),
]
UNKNOWN = ["extra_body", "temprature", "guided", "dropped", ""]


def check_error(answer, status, param):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == status
    if param is not None:
        assert param.split(".")[0] in error["message"] or param in ("prompt", "messages")
    return error["message"]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=[json.dumps(b)[:60] for b, _ in BAD_COMPLETIONS])
def test_bad_completion(service, body, param):
    check_error(service.post(COMPLETIONS, **body), 400, param)
    assert service.submits == []


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=[json.dumps(b)[:60] for b, _ in BAD_CHATS])
def test_bad_chat(service, body, param):
    check_error(service.post(CHAT, **body), 400, param)
    assert service.submits == []


def each_endpoint(service, field, value):
    """Return the answers of both endpoints to a request with this field."""
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        yield service.post(path, **body, max_tokens=1, **{field: value})


@pytest.mark.parametrize(("field", "value"), ASKING, ids=str)
def test_unsupported_field_is_named(service, field, value):
    for answer in each_endpoint(service, field, value):
        assert f"'{field}'" in check_error(answer, 400, field)


@pytest.mark.parametrize("field", UNKNOWN)
def test_unknown_field_is_named(service, field):
    for answer in each_endpoint(service, field, 1):
        assert f"unknown or unsupported field '{field}'" in check_error(answer, 400, field)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"null", "null"),
        (b"true", "boolean"),
        (b"3", "number"),
        (b"1.5", "number"),
        (b'"x"', "string"),
        (b"[]", "array"),
    ],
)
def test_other_bodies_are_named_as_in_json(service, body, kind):
    message = check_error(service.client.post(COMPLETIONS, content=body), 400, None)
    assert message == f"the request body must be a JSON object, got {kind}"


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"logit_bias": [1]}, "logit_bias", "an object, got array"),
        ({"stop_token_ids": {}}, "stop_token_ids", "an array, got object"),
        ({"stop_token_ids": "x"}, "stop_token_ids", "an array, got string"),
        ({"stream_options": True}, "stream_options", "an object, got boolean"),
        ({"kv_compression": "x"}, "kv_compression", "an object, got string"),
        ({"response_format": 3}, "response_format", "an object, got number"),
        ({"structured_outputs": {"choice": "x"}}, "structured_outputs.choice", "an array, got string"),
    ],
)
def test_other_types_of_fields_are_named_as_in_json(service, fields, param, expected):
    for answer in (
        service.post(COMPLETIONS, prompt="x", **fields),
        service.post(CHAT, messages=HELLO, **fields),
    ):
        assert check_error(answer, 400, param) == f"'{param}': expected {expected}"


def test_other_types_of_messages_and_schemas_are_named_as_in_json(service):
    message = check_error(service.post(CHAT, messages={}), 400, "messages")
    assert message == "'messages': expected an array, got object"
    message = check_error(service.post(CHAT, messages=[None]), 400, "messages.0")
    assert message == "'messages.0': expected an object, got null"
    assert "Array should have at least 1 item" in check_error(service.post(CHAT, messages=[]), 400, "messages")
    message = check_error(service.post(COMPLETIONS, prompt="x", guided_json="null"), 400, "guided_json")
    assert message == "'guided_json' must be a JSON object or a boolean, got null"


def test_best_of_must_be_n(service):
    assert len(service.complete(prompt="x", max_tokens=1, n=2, best_of=2)["choices"]) == 2
    check_error(service.post(COMPLETIONS, prompt="x", n=2, best_of=1), 400, "best_of")


def test_unknown_role_is_named(service):
    message = check_error(service.post(CHAT, messages=[{"role": "king", "content": "x"}]), 400, "messages.0.role")
    assert "got 'king'" in message


def test_messages_have_both_numbers(service):
    message = check_error(service.post(COMPLETIONS, prompt=[5] * 300), 400, "prompt")
    assert "300" in message
    assert "256" in message
    message = check_error(service.post(COMPLETIONS, prompt=[5] * 250, max_tokens=7), 400, "max_tokens")
    assert "257" in message
    assert "256" in message
    assert "400 ids" in check_error(service.post(COMPLETIONS, prompt=[400]), 400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"prompt": NaN}'])
def test_malformed_json(service, body):
    for path in (COMPLETIONS, CHAT):
        check_error(service.client.post(path, content=body), 400, None)


def test_unknown_model(service):
    assert "other" in check_error(service.post(COMPLETIONS, prompt="x", model="other"), 404, "model")
    check_error(service.post(CHAT, messages=HELLO, model="other"), 404, "model")
    assert len(check_error(service.post(COMPLETIONS, prompt="x", model="x" * 70_000), 404, "model")) < 400


def test_wrong_method_and_path(service):
    answer = service.client.get(COMPLETIONS)
    check_error(answer, 405, None)
    assert "POST" in answer.headers["allow"]
    check_error(service.client.post("/v1/models"), 405, None)
    assert check_error(service.client.get("/v2/nothing"), 404, None) == "GET /v2/nothing: Not Found"
    assert "'other/one'" in check_error(service.client.get("/v1/models/other/one"), 404, "model")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("/v1/embeddings", "embeddings"), ("/v1/embeddings/", "embeddings"), ("/embeddings", "embeddings")),
        *(("/v1/rerank", "scores of documents"), ("/v1/audio/transcriptions", "audio"), ("/v1/images/edits", "images")),
    ],
)
def test_apis_of_other_model_types_name_the_missing_feature(service, path, kind):
    for answer in (service.post(path, model="tiny", input="x"), service.client.get(path)):
        message = check_error(answer, 404, None)
        assert message.endswith(f" {path}: the model of this server has no {kind}; it generates text")


def test_wrong_tool_choice_lists_the_valid_ones(service):
    tools = [{"type": "function", "function": {"name": "now"}}]
    answer = service.post(CHAT, messages=HELLO, tools=tools, tool_choice={"type": "function", "name": "now"})
    message = check_error(answer, 400, "tool_choice")
    assert 'an object {"type": "function", "function": {"name": ...}}' in message
    tools = [{"type": "function", "name": "now", "parameters": None, "strict": False}]
    message = check_error(service.post("/v1/responses", input="x", tools=tools, tool_choice=5), 400, "tool_choice")
    assert 'an object {"type": "function", "name": ...}' in message
    assert "{{" not in message


def test_template_refusal(start, checkpoint, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    service = start(1, model_path=tmp_path)
    message = check_error(service.post(CHAT, messages=HELLO), 400, "messages")
    assert "roles must alternate" in message


def test_too_large_body(start):
    service = start(1, max_body_bytes=1000)
    check_error(service.post(COMPLETIONS, prompt="x" * 1000), 413, None)

    def chunks():
        for _ in range(20):
            yield b"x" * 100

    check_error(service.client.post(COMPLETIONS, content=chunks()), 413, None)
    assert service.post(COMPLETIONS, prompt="x", max_tokens=1).status_code == 200


def test_full_queue(start, pool, wait_for):
    service = start(2, max_inflight=3)
    for worker in service.workers:
        worker.paused = True
    first = pool.submit(service.post, COMPLETIONS, prompt="x", n=3)
    wait_for(lambda: len(service.submits) == 3, "the workers must have the request")
    answer = service.post(COMPLETIONS, prompt="x")
    check_error(answer, 429, None)
    assert int(answer.headers["retry-after"]) >= 1
    for worker in service.workers:
        worker.paused = False
    assert first.result().status_code == 200
    service.wait_idle()
    service.complete(prompt="x", n=3)
    check_error(service.post(COMPLETIONS, prompt="x", n=4), 400, "n")


def test_limit_of_prompt_tokens_that_wait_for_prefill(start, pool, wait_for):
    """With a limit of ten tokens the first request is accepted at any size, then others until one has a token."""
    service = start(1, max_waiting_tokens=10)
    [worker] = service.workers
    worker.paused = True
    first = pool.submit(service.post, COMPLETIONS, prompt=[5] * 12, max_tokens=2)
    wait_for(lambda: len(service.submits) == 1, "the worker must have the request")
    message = check_error(service.post(COMPLETIONS, prompt=[5]), 429, None)
    assert message == "12 of 10 prompt tokens wait to be read, no room for 1 more"
    worker.paused = False
    assert first.result().status_code == 200
    service.wait_idle()
    worker.paused = True
    others = [pool.submit(service.post, COMPLETIONS, prompt=[5] * 5) for _ in range(2)]
    wait_for(lambda: len(service.submits) == 3, "two times 5 tokens fit into 10")
    answer = service.post(COMPLETIONS, prompt=[5])
    check_error(answer, 429, None)
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    worker.paused = False
    for each in others:
        each.result()
    service.complete(prompt=[5])


def test_worker_rejection_names_the_field(service):
    for worker in service.workers:
        worker.reject = Rejected(
            request_id="", reason="bad_request", message="no kv_compression", param="kv_compression"
        )
    assert check_error(service.post(COMPLETIONS, prompt="x"), 400, "kv_compression") == "no kv_compression"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("queue_full", 429),
        ("queue_timeout", 429),
        ("prompt_too_long", 400),
        ("never_fits", 400),
        ("bad_request", 400),
        ("duplicate", 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejected_by_the_worker(service, reason, status, stream):
    for worker in service.workers:
        worker.reject = Rejected(request_id="", reason=reason, message="because of X", retry_after=2.5)
    answer = service.post(COMPLETIONS, prompt="x", n=2, stream=stream)
    assert check_error(answer, status, None) == "because of X"
    # The router measures when a queue has room again; for other reasons the worker's value is used.
    waits = range(1, 61) if reason.startswith("queue") else (3,)
    assert int(answer.headers["retry-after"]) in waits


@pytest.mark.parametrize("reason", ["queue_full", "queue_timeout"])
def test_retry_after_without_the_workers_value(service, reason):
    """The router measures when the fleet has room again, and adds Retry-After."""
    for worker in service.workers:
        worker.reject = Rejected(request_id="", reason=reason, message="full")
    answer = service.post(COMPLETIONS, prompt="x")
    check_error(answer, 429, None)
    assert 1 <= int(answer.headers["retry-after"]) <= 60
