"""Each size limit plus one is a 400 that names the field, the number and the limit."""

import pytest
from tests.router.conftest import Service

from moeyard_router.api.validation import MAX_BIASES, MAX_MESSAGES, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def turns(count):
    return [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(count)]


def parts(count):
    """Return parts spread over two turns, which count together."""
    part = {"type": "text", "text": "x"}
    return [
        {"role": "user", "content": [part] * 4000},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [part] * (count - 4000)},
    ]


CAPS = {
    "messages": (CHAT, MAX_MESSAGES, lambda n: {"messages": turns(n)}, "messages"),
    "parts": (CHAT, MAX_MESSAGES, lambda n: {"messages": parts(n)}, "messages"),
    "input": (RESPONSES, MAX_MESSAGES, lambda n: {"input": turns(n)}, "input"),
    "messages-anthropic": (MESSAGES, MAX_MESSAGES, lambda n: {"messages": turns(n), "max_tokens": 1}, "messages"),
    "stop": (COMPLETIONS, MAX_STOP_CHARACTERS, lambda n: {"prompt": "x", "stop": "y" * n}, "stop"),
    "stop-second": (COMPLETIONS, MAX_STOP_CHARACTERS, lambda n: {"prompt": "x", "stop": ["y", "é" * n]}, "stop"),
    "stop_sequences": (
        MESSAGES,
        MAX_STOP_CHARACTERS,
        lambda n: {"messages": turns(1), "max_tokens": 1, "stop_sequences": ["y" * n]},
        "stop_sequences",
    ),
    "stop_token_ids": (
        COMPLETIONS,
        MAX_STOP_TOKENS,
        lambda n: {"prompt": "x", "stop_token_ids": [i % 400 for i in range(n)]},
        "stop_token_ids",
    ),
    "logit_bias": (
        COMPLETIONS,
        MAX_BIASES,
        lambda n: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(n)}},
        "logit_bias",
    ),
}


@pytest.mark.parametrize("name", CAPS)
def test_one_above_the_limit(service: Service, name: str) -> None:
    path, cap, body, field = CAPS[name]
    answer = service.post(path, **body(cap + 1))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", field) == field  # Anthropic's errors have no `param`
    assert error["message"].startswith(f"'{field}': {cap + 1} ")
    assert error["message"].endswith(f", at most {cap} are allowed")
    # The limit itself passes this check; other errors have other messages.
    assert f"at most {cap} are allowed" not in service.post(path, **body(cap)).text
