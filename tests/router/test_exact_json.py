"""Integers above 64 bits keep their digits, and invalid JSON stays an error."""

import json

import pytest

from moeyard_router.api.anthropic import MessagesRequest, _input
from moeyard_router.api.anthropic import translated as of_messages
from moeyard_router.api.responses import ResponsesRequest
from moeyard_router.api.responses import translated as of_responses
from moeyard_router.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from moeyard_router.api.structured import constraint_of
from moeyard_router.api.validation import parse
from moeyard_router.errors import ApiError
from moeyard_router.text import exact_json
from moeyard_router.text.answer_grammar import lost_integer

LARGE = [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 123456789012345678901, 10**300, -(10**300)]


@pytest.mark.parametrize("number", LARGE)
def test_digits_are_kept(number):
    value = {"wei": number, "all": [number, 1.5, "é", None], "text": str(number)}
    text = exact_json.dumps(value)
    assert json.loads(text) == value
    assert str(number).encode() in text
    for given in (text, text.decode(), json.dumps(value).encode()):
        read = exact_json.loads(given)
        assert read == value
        assert type(read["wei"]) is int


@pytest.mark.parametrize("digits", ["", "123456789012345678901, "])
@pytest.mark.parametrize("bad", ["NaN", "1e400", '"\\ud800"', "[" * 2000 + "]" * 2000, "01", "9" * 5000, '"a\nb"', "}"])
def test_invalid_json_is_an_error(digits, bad):
    with pytest.raises(ValueError, match=r"line|hex|recursion"):
        exact_json.loads(f"[{digits}{bad}]")
    with pytest.raises(ValueError, match=r"utf-8|unicode|line"):
        exact_json.loads(f"[{digits}".encode() + b'"\xff"]')


def test_unserializable_values_are_errors():
    with pytest.raises(TypeError, match="Recursion"):
        exact_json.dumps(json.loads("[" * 300 + "]" * 300))
    with pytest.raises(TypeError):
        exact_json.dumps({"a": {1, 2}})


MANY = 123456789012345678901
SCHEMA = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": MANY, "default": MANY}}}
CALL = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": {"wei": MANY}}}
CHATS = {
    "chat": lambda: parse(
        exact_json.dumps(
            {
                "messages": [{"role": "assistant", "tool_calls": [CALL]}],
                "tools": [{"type": "function", "function": {"name": "pay", "parameters": SCHEMA}}],
                "chat_template_kwargs": {"limit": MANY},
            }
        ),
        ChatRequest,
    ),
    "responses": lambda: ChatRequest.model_validate(
        of_responses(
            parse(
                exact_json.dumps(
                    {
                        "input": [
                            {
                                "type": "function_call",
                                "call_id": "c",
                                "name": "pay",
                                "arguments": json.dumps({"wei": MANY}),
                            }
                        ],
                        "tools": [{"type": "function", "name": "pay", "parameters": SCHEMA}],
                        "chat_template_kwargs": {"limit": MANY},
                    }
                ),
                ResponsesRequest,
            )
        ).body
    ),
    "messages": lambda: ChatRequest.model_validate(
        of_messages(
            parse(
                exact_json.dumps(
                    {
                        "messages": [
                            {
                                "role": "assistant",
                                "content": [{"type": "tool_use", "id": "c", "name": "pay", "input": {"wei": MANY}}],
                            }
                        ],
                        "tools": [{"name": "pay", "input_schema": SCHEMA}],
                        "max_tokens": 1,
                    }
                ),
                MessagesRequest,
            )
        ).body
    ),
}


@pytest.mark.parametrize("api", CHATS)
def test_every_api_keeps_large_integers(api):
    chat = CHATS[api]()
    (call,) = chat.messages[0].tool_calls
    arguments = call.function.arguments
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"wei": MANY}
    assert chat.tools[0].given["function"]["parameters"] == SCHEMA
    assert chat.tool_use.num_chars > 100
    assert chat.chat_template_kwargs in (None, {"limit": MANY})
    assert _input(f'{{"wei": {MANY}}}') == {"wei": MANY}


NUMBERS = (
    "max_tokens",
    "n",
    "min_tokens",
    "top_k",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "prompt_logprobs",
    "logprobs",
    "repetition_penalty",
    "stop_token_ids",
    "logit_bias",
    "prompt",
)


@pytest.mark.parametrize("number", [2**64, 10**30, 10**300, -(10**30)])
@pytest.mark.parametrize("name", NUMBERS)
def test_large_integers_in_any_field(name, number, service):
    """The API's own limits decide, and nothing crashes."""
    value = {"stop_token_ids": [number], "logit_bias": {"1": number}, "prompt": [number]}.get(name, number)
    answer = service.client.post("/v1/completions", content=exact_json.dumps({"prompt": "a", name: value}))
    assert answer.status_code == (200 if name in ("top_k", "temperature") and number > 0 else 400), answer.text
    if answer.status_code == 400:
        assert name in answer.json()["error"]["param"]


def test_large_token_ids_are_refused(service):
    answer = service.client.post("/detokenize", content=exact_json.dumps({"tokens": [MANY]}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    answer = service.post("/v1/completions", prompt="a", logit_bias={str(MANY): 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"const": MANY}, MANY),
        ({"enum": [1, "a", 2**53 + 1]}, 2**53 + 1),
        ({"properties": {"a": {"items": {"anyOf": [{"const": {"b": [-(2**63)]}}]}}}}, -(2**63)),
        ({"properties": {"const": {"enum": [MANY]}}}, MANY),
        ({"const": {"properties": {"a": MANY}}}, MANY),
        ({"enum": [2**53, 2**63 - 1, -(2**53), 0, 1.5, True]}, None),
        ({"type": "integer", "minimum": -MANY, "maximum": MANY, "default": {"const": MANY}}, None),
        ({"properties": {"const": {"maximum": MANY}, "enum": {"minimum": MANY}}}, None),
        (True, None),
    ],
)
def test_constant_beyond_doubles_is_refused(schema, lost):
    """llguidance reads numbers as doubles and would make the model write other digits."""
    assert lost_integer(schema) == lost
    body = {"prompt": "a", "structured_outputs": {"json": schema}}
    request = parse(exact_json.dumps(body), CompletionRequest)
    if lost is None:
        assert json.loads(constraint_of(request).grammar.text) == schema
        return
    with pytest.raises(ApiError, match=rf"'structured_outputs\.json'.*{lost}"):
        constraint_of(request)


def test_counted_messages_keep_large_integers():
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"limit": MANY}}
    assert parse(exact_json.dumps(body), TokenizeRequest).as_chat().chat_template_kwargs == {"limit": MANY}
    assert parse(b'{"tokens": [1]}', DetokenizeRequest).tokens == [1]
