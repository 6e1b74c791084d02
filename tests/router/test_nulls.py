"""Absent answer fields are omitted, not null, unless the API's own type has null there."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.router.tool_model import ASK, CALL, CHAT, NOW, SECOND, THOUGHT, WEATHER

SPOKEN = ("Yes.", THOUGHT + "One moment.\n" + CALL + SECOND, CALL, "")
# OpenAI's chats and completions have null for log-probabilities without a request for them and vLLM's `stop_reason`.
CHOICE = {"choices.logprobs", "choices.stop_reason"}
CHUNK = {*CHOICE, "choices.finish_reason"}
# OpenAI's own Responses objects have all of these.
RESPONSE = {
    *("error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id", "user"),
    *("reasoning.effort", "reasoning.summary", "tools.description", "tools.parameters", "tools.strict"),
}
ENDS = {"stop_reason", "stop_sequence"}
RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
RESPONSE_TOOLS += [{"type": "namespace", "name": "n", "description": "N", "tools": [{"type": "custom", "name": "c"}]}]
MESSAGE_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in (WEATHER, NOW)
]
APIS = {
    CHAT: (
        {"messages": ASK, "tools": [WEATHER, NOW]},
        ChatCompletion,
        CHOICE | {"choices.message.content"},
        ChatCompletionChunk,
        CHUNK | {"choices.delta.content"},
    ),
    f"{CHAT} with usage": (
        {"messages": ASK, "stream_options": {"include_usage": True}, "logprobs": True, "stream": True},
        None,
        set(),
        ChatCompletionChunk,
        CHUNK | {"choices.delta.content", "usage"},
    ),
    "/v1/completions": (
        {"prompt": "x"},
        Completion,
        CHOICE,
        None,
        CHUNK,  # the package's type has no null here, unlike OpenAI's streams
    ),
    "/v1/responses": (
        {"input": "x", "tools": RESPONSE_TOOLS},
        Response,
        RESPONSE,
        ResponseStreamEvent,
        {f"response.{name}" for name in (*RESPONSE, "usage")},
    ),
    "/v1/messages": (
        {"messages": ASK, "max_tokens": 500, "tools": MESSAGE_TOOLS},
        Message,
        {"stop_sequence"},
        RawMessageStreamEvent,
        {*(f"message.{name}" for name in ENDS), "delta.stop_sequence"},
    ),
}


def nulls(value, path=""):
    """Return the paths of all nulls, without indices."""
    if isinstance(value, dict):
        return {each for name, part in value.items() for each in nulls(part, f"{path}.{name}" if path else name)}
    if isinstance(value, list):
        return {each for part in value for each in nulls(part, path)}
    return {path} if value is None else set()


@pytest.mark.parametrize("api", APIS)
def test_absent_fields_are_omitted(model, api):
    body, whole_type, in_whole, event_type, in_events = APIS[api]
    path = api.partition(" ")[0]
    whole_check = None if whole_type is None else TypeAdapter(whole_type)
    event_check = None if event_type is None else TypeAdapter(event_type)
    found_whole, found_events = set(), set()
    for text in SPOKEN:
        model.says(text)
        if whole_check is not None:
            answer = model.service.post(path, **body)
            assert answer.status_code == 200, answer.text
            whole_check.validate_python(answer.json())
            found_whole |= nulls(answer.json())
        streamed = model.service.post(path, **{**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert lines, streamed.text
        for line in lines:
            event = json.loads(line)
            if event_check is not None and event.get("type") != "ping":  # the package has no type for a ping
                event_check.validate_python(event)
            found_events |= nulls(event)
    assert found_whole == in_whole
    assert found_events - in_events == set(), "the split of tokens over events depends on timing"


def test_other_answers_have_nulls_only_as_in_vllm(model):
    get = model.service.client.get
    assert nulls(get("/v1/models").json()) == {"data.parent"}
    assert nulls(model.service.post("/tokenize", prompt="x").json()) == {"token_strs"}
    assert nulls(model.service.post("/v1/messages/count_tokens", messages=ASK).json()) == set()
    assert nulls(model.service.post("/v1/messages", messages=ASK).json()) == set(), "Anthropic's error type"
    assert nulls(get("/v1/none").json()) == {"error.param"}
