"""Everything a client can do wrong gets its own status, a reason, and the name of the field."""

import json
import threading

import pytest

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

BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [*HELLO, {"role": "tool", "content": "hi"}]}, "messages.1.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.type"),
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

NOT_SERVED = [
    "audio", "best_of", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "length_penalty", "metadata", "modalities", "parallel_tool_calls", "prediction", "priority",
    "reasoning_effort", "response_format", "service_tier", "store", "structured_outputs", "suffix", "tool_choice",
    "tools", "truncate_prompt_tokens", "use_beam_search", "web_search_options",
]  # fmt: skip
UNKNOWN = ["extra_body", "temprature", "guided", ""]
ASKING = [
    ("tools", []),
    ("tool_choice", "none"),
    ("store", False),
    ("suffix", ""),
    ("response_format", {}),
    ("response_format", "text"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "text", "schema": {}}),
    ("best_of", 2),
    ("best_of", True),
    ("best_of", "1"),
]


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
    """The answers of both endpoints to a request with this field."""
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        yield service.post(path, **body, max_tokens=1, **{field: value})


@pytest.mark.parametrize(("field", "value"), [*((name, [{}]) for name in NOT_SERVED), *ASKING], ids=str)
def test_field_that_is_not_served_is_named(service, field, value):
    for answer in each_endpoint(service, field, value):
        assert f"'{field}'" in check_error(answer, 400, field)
    assert service.submits == []


@pytest.mark.parametrize("value", [None, 1], ids=str)
@pytest.mark.parametrize("field", UNKNOWN)
def test_unknown_field_is_named_even_if_null(service, field, value):
    for answer in each_endpoint(service, field, value):
        assert f"unknown or unsupported field '{field}'" in check_error(answer, 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [*((name, None) for name in NOT_SERVED), ("response_format", {"type": "text"}), ("best_of", 1)],
    ids=str,
)
def test_field_that_asks_for_nothing_is_accepted(service, field, value):
    assert [answer.status_code for answer in each_endpoint(service, field, value)] == [200, 200]


def test_best_of_must_be_n(service):
    assert len(service.complete(prompt="x", max_tokens=1, n=2, best_of=2)["choices"]) == 2
    check_error(service.post(COMPLETIONS, prompt="x", n=2, best_of=1), 400, "best_of")


def test_role_that_is_not_served_is_named(service):
    message = check_error(service.post(CHAT, messages=[{"role": "tool", "content": "x"}]), 400, "messages.0.role")
    assert "got 'tool'" in message


def test_messages_say_both_numbers(service):
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


def test_wrong_method_and_path(service):
    answer = service.client.get(COMPLETIONS)
    check_error(answer, 405, None)
    assert "POST" in answer.headers["allow"]
    check_error(service.client.post("/v1/models"), 405, None)
    check_error(service.client.get("/v2/nothing"), 404, None)
    assert "'other/one'" in check_error(service.client.get("/v1/models/other/one"), 404, "model")


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


def test_full_queue(start, wait_for):
    service = start(2, max_inflight=3)
    for worker in service.workers:
        worker.paused = True
    answers = []
    thread = threading.Thread(target=lambda: answers.append(service.post(COMPLETIONS, prompt="x", n=3)))
    thread.start()
    wait_for(lambda: len(service.submits) == 3, "the workers must have the request")
    answer = service.post(COMPLETIONS, prompt="x")
    check_error(answer, 429, None)
    assert int(answer.headers["retry-after"]) >= 1
    for worker in service.workers:
        worker.paused = False
    thread.join(5)
    assert answers[0].status_code == 200
    service.wait_idle()
    service.complete(prompt="x", n=3)
    check_error(service.post(COMPLETIONS, prompt="x", n=4), 400, "n")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("queue_full", 429), ("prompt_too_long", 400), ("never_fits", 400), ("bad_request", 400), ("duplicate", 500)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejected_by_the_worker(service, reason, status, stream):
    for worker in service.workers:
        worker.reject = Rejected(request_id="", reason=reason, message="because of X", retry_after=2.5)
    answer = service.post(COMPLETIONS, prompt="x", n=2, stream=stream)
    assert check_error(answer, status, None) == "because of X"
    assert answer.headers["retry-after"] == "3"
