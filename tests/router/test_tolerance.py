"""What cannot change an answer is taken, and named: nulls, fields for others' accounts, echoed messages."""

import json
import re
from pathlib import Path

import pytest

from moeyard_router.api.fields import IGNORED, NOT_SERVED
from moeyard_router.api.messages import ChatMessage, TextPart, ToolCall
from moeyard_router.api.schema import ChatRequest, CompletionRequest, StreamOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
HEADER = "x-moeyard-ignored"
# What the openai package echoes of its answers (`message.model_dump()`), and what others add.
ECHOED = {
    "role": "assistant", "content": "Hi.", "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "tool_calls": None, "reasoning_content": None, "reasoning": None, "provider_specific_fields": {"a": 1},
    "thinking_blocks": None,
}  # fmt: skip


def named(answer):
    """What the header of a good answer names."""
    assert answer.status_code == 200, answer.text
    header = answer.headers.get(HEADER)
    return [] if header is None else header.split(", ")


def prompts(service):
    return [s.prompt_token_ids for s in service.submits]


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_what_changes_nothing_is_ignored_and_named(service, field):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        for stream in (False, True):
            assert named(service.post(path, **body, max_tokens=1, stream=stream, **{field: "x"})) == [field]
    assert len(set(prompts(service))) == 2


def test_several_are_named_in_the_order_of_the_request(service):
    body = {"store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "max_tokens": 1}
    # `user` has an effect: requests of one user go to the rank that has their prefix.
    assert named(service.post(CHAT, messages=HELLO, **body)) == ["store", "metadata", "service_tier"]


def test_what_is_asked_of_a_stream(service):
    options = {"include_obfuscation": False, "include_usage": True, "continuous_usage_stats": None}
    answer = service.post(CHAT, messages=HELLO, max_tokens=1, stream=True, stream_options=options)
    assert named(answer) == ["stream_options.include_obfuscation"]
    assert '"completion_tokens":1' in answer.text


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("modalities", ["text"], ["modalities"]),
        ("parallel_tool_calls", False, ["parallel_tool_calls"]),
        ("reasoning_effort", "low", ["reasoning_effort"]),
        ("best_of", 1, []),
        *((name, value, []) for name, values in NOT_SERVED.items() for value in values if name != "modalities"),
        *((name, None, []) for name in (*NOT_SERVED, *sorted(IGNORED), "n", "temprature")),
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_taken(service, field, value, says):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        assert named(service.post(path, **body, max_tokens=1, **{field: value})) == says


def test_a_plain_request_names_nothing(service):
    assert named(service.post(CHAT, messages=HELLO, max_tokens=1, top_logprobs=0, logprobs=False)) == []


def test_echoed_messages_are_what_their_text_is(service):
    answer = service.post(CHAT, messages=[*HELLO, ECHOED, *HELLO], max_tokens=1)
    assert named(answer) == ["messages.annotations", "messages.provider_specific_fields"]
    service.chat(messages=[*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_thoughts_that_the_template_does_not_show_are_named(service):
    echoed = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    answer = service.post(CHAT, messages=[*HELLO, echoed, *HELLO], max_tokens=1)
    assert named(answer) == ["messages.reasoning_content"]
    assert named(service.post(CHAT, messages=[{**HELLO[0], "name": "Ann"}], max_tokens=1)) == ["messages.name"]


@pytest.mark.parametrize("absent", [{}, {"content": None}], ids=str)
def test_an_assistant_may_have_said_nothing(service, codec, absent):
    service.chat(messages=[*HELLO, {"role": "assistant", **absent}, *HELLO], max_tokens=1)
    text = "<|bos|><|user|>Hello<|eos|>\n<|assistant|><|eos|>\n<|user|>Hello<|eos|>\n<|assistant|>"
    assert prompts(service) == [tuple(codec.encode(text, add_special_tokens=False))]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "input_text", "text": "b"}],
        ["a", {"type": "text", "text": "b", "annotations": None, "cache_control": {}}],
    ],
)
def test_parts(service, content):
    answer = service.post(CHAT, messages=[{"role": "user", "content": content}], max_tokens=1)
    assert named(answer) == ["messages.content.cache_control"]
    service.chat(messages=[{"role": "user", "content": "a\nb"}], max_tokens=1)
    first, second = prompts(service)
    assert first == second


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "Hi."},
        {"content": [{"type": "refusal", "refusal": "Hi."}]},
        {"content": "", "refusal": "Hi."},
    ],
    ids=json.dumps,
)
def test_a_refusal_is_what_the_assistant_said(service, message):
    service.chat(messages=[*HELLO, {"role": "assistant", **message}], max_tokens=1)
    service.chat(messages=[*HELLO, {"role": "assistant", "content": "Hi."}], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_developer_is_system_where_the_template_has_no_such_role(service):
    for role in ("developer", "system"):
        service.chat(messages=[{"role": role, "content": "Be kind."}, *HELLO], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_the_page_has_every_field():
    """docs/api.md names all fields of the tables and of the models, and `guided_*` for those."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    fields = {*IGNORED, *NOT_SERVED, *ChatRequest.model_fields, *CompletionRequest.model_fields, "parallel_tool_calls"}
    fields |= {*ChatMessage.harmless, *ChatMessage.unserved, *ChatMessage.plain, *TextPart.harmless, *ToolCall.harmless}
    fields |= {*StreamOptions.model_fields, *StreamOptions.harmless}
    fields -= {"dropped", "parts", "type"} | {name for name in NOT_SERVED if name.startswith("guided_")}
    assert {name for name in fields if not re.search(rf"\b{name}\b", page)} == set()
    assert "`guided_*`" in page
