"""Prompt compression settings of a request and of the server: what the worker receives and the client sees."""

import pytest

from moeyard_worker.protocol import KvCompression

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = list(range(10, 50))
ASKED = {"method": "snapkv", "budget": 24, "window": 8}


@pytest.fixture(scope="module")
def shared_service(starter):
    """A service that keeps the whole prompt unless a request asks otherwise."""
    return starter(1)


@pytest.mark.parametrize(
    ("field", "received"),
    [
        (None, None),
        ({"method": "none"}, None),
        (ASKED, KvCompression(method="snapkv", budget=24, window=8)),
        ({"method": "snapkv", "budget": 64}, KvCompression(method="snapkv", budget=64, window=32)),
    ],
)
def test_worker_receives_the_settings(service, field, received):
    service.complete(prompt=PROMPT, max_tokens=3, kv_compression=field)
    service.chat(messages=HELLO, max_tokens=3, kv_compression=field)
    assert [s.sampling.kv_compression for s in service.submits] == [received, received]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"prompt": PROMPT, "kv_compression": ASKED}, 24),
        ({"prompt": PROMPT, "kv_compression": ASKED, "n": 2}, 24),
        ({"prompt": [PROMPT, PROMPT[:9]], "kv_compression": ASKED}, 33),
        ({"prompt": PROMPT, "kv_compression": {"method": "snapkv", "budget": 40}}, 40),
        ({"prompt": PROMPT, "kv_compression": {"method": "none"}}, None),
        ({"prompt": PROMPT}, None),
    ],
)
def test_usage_reports_kept_tokens(service, body, kept):
    usage = service.complete(**body, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"].get("kept_tokens") == kept
    assert usage["prompt_tokens"] == sum(map(len, body["prompt"] if isinstance(body["prompt"][0], list) else [PROMPT]))
    events = service.stream(COMPLETIONS, **body, max_tokens=2, stream_options={"include_usage": True})
    assert events[-1]["usage"]["prompt_tokens_details"].get("kept_tokens") == kept


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_accept_it_and_report_kept_tokens(service, path, stream):
    asked = {"method": "snapkv", "budget": 3, "window": 2}
    what = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO, "max_tokens": 2}
    answer = service.post(path, **what, kv_compression=asked, stream=stream)
    assert answer.status_code == 200, answer.text
    assert [s.sampling.kv_compression for s in service.submits] == [KvCompression(method="snapkv", budget=3, window=2)]
    assert '"kept_tokens":3' in answer.text
    refused = service.post(path, **what, kv_compression={"method": "snapkv", "budget": 1, "window": 2})
    assert refused.status_code == 400
    assert "kv_compression" in refused.text


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"method": "snapkv", "budget": 8, "window": 9}, ("9", "8")),
        ({"method": "snapkv", "budget": 31}, ("32", "31")),
        ({"method": "snapkv", "budget": 40.5}, ("budget", "integer")),
        ({"method": "snapkv", "budget": "40"}, ("budget", "integer")),
        ({"method": "snapkv", "budget": 40, "window": True}, ("window", "integer")),
        ({"method": "snapkv", "budget": 0}, ("budget", "equal to 1")),
        ({"method": "snapkv", "budget": 2**40}, ("budget", "2147483648")),
        ({"method": "snapkv"}, ("needs a budget",)),
        ({"method": "h2o", "budget": 40}, ("method", "h2o", "snapkv")),
        ({"method": "snapkv", "budget": 40, "pooling": 5}, ("pooling",)),
        ("snapkv", ("kv_compression",)),
    ],
)
def test_invalid_settings_are_refused_by_name(service, field, says):
    answer = service.post(CHAT, messages=HELLO, kv_compression=field)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "kv_compression" in message
    assert all(words in message for words in says), message
    assert not service.submits


def test_server_default_applies_unless_a_request_overrides_it(start):
    usual = KvCompression(method="snapkv", budget=16, window=4)
    service = start(1, kv_compression=usual)
    assert service.complete(prompt=PROMPT, max_tokens=2)["usage"]["prompt_tokens_details"]["kept_tokens"] == 16
    service.complete(prompt=PROMPT, max_tokens=2, kv_compression=ASKED)
    service.complete(prompt=PROMPT, max_tokens=2, kv_compression={"method": "none"})
    received = [s.sampling.kv_compression for s in service.submits]
    assert received == [usual, KvCompression(method="snapkv", budget=24, window=8), None]
