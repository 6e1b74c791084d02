"""/v1/messages with the anthropic package and plain HTTP: text, tools, thinking, streams, Anthropic's error format."""

import asyncio
import json

import anthropic
import pytest
from tests.router.tool_model import CALL, LONG, SECOND, THOUGHT

from moeyard_worker.protocol import Rejected

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
ASK = [{"role": "user", "content": "Wie ist das Wetter?"}]
BODY = {"model": "tiny", "max_tokens": 500, "messages": ASK}


@pytest.fixture(scope="module")
def client(tool_service):
    with anthropic.Anthropic(base_url=tool_service.url, api_key="none", max_retries=0) as client:
        yield client


def events(model, **body):
    """Return the events of a stream."""
    with model.service.client.stream("POST", PATH, json={**BODY, **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [e["type"] for e in found]
    return found


def blocks(message):
    """Return the content blocks of the client package without ids."""
    found = [block.model_dump(exclude_none=True) for block in message.content]
    return [{k: v for k, v in block.items() if k not in ("id", "caller", "parsed_output")} for block in found]


def test_text(model, client):
    model.says("It is sunny.")
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(**BODY, system=system, metadata={"user_id": "u"})
    assert blocks(answer) == [{"type": "text", "text": "It is sunny."}]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == (
        "end_turn",
        None,
        "assistant",
        "tiny",
    )
    assert model.prompt() == "<|system|>Be short.<|eos|>\n<|user|>Wie ist das Wetter?<|eos|>\n<|assistant|>"
    submit = model.worker.submits[-1]
    assert submit.sampling.max_tokens == 500
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(submit.prompt_token_ids) - 3, 3)
    assert usage.output_tokens == len(model.codec.encode("It is sunny.", add_special_tokens=False)) + 1
    raw = client.messages.with_raw_response.create(**BODY, system=system, metadata={"user_id": "u"})
    assert raw.headers["x-moeyard-ignored"] == "metadata, system.cache_control"
    assert raw.headers["x-moeyard-route"].startswith("rank=0")


def test_thinking_text_and_calls_whole_and_streamed(model, client):
    model.says(THOUGHT + "One moment.\n" + CALL + SECOND)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(**BODY, tools=[WEATHER, NOW], thinking=thinking)
    assert whole.stop_reason == "tool_use"
    assert blocks(whole) == [
        {"type": "thinking", "thinking": "I should look. 🙂", "signature": ""},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert '"parameters": {"type": "object", "properties"' in model.prompt()
    for chunk in (1, 5, 500):
        model.worker.chunk = chunk
        with client.messages.stream(**BODY, tools=[WEATHER, NOW], thinking=thinking) as stream:
            kinds = [event.type for event in stream]
            got = stream.get_final_message()
        assert (blocks(got), got.stop_reason) == (blocks(whole), "tool_use")
        assert got.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    stream = events(model, tools=[WEATHER])
    assert [e["type"] for e in stream[:3]] == ["message_start", "ping", "content_block_start"]
    assert stream[0]["message"]["content"] == []
    usage = stream[0]["message"]["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"]  # the worker may have reported it by then
    assert counted == len(model.worker.submits[-1].prompt_token_ids)


def test_anthropic_client_calls_a_tool_and_continues(model, tool_service):
    model.says(THOUGHT + CALL, "It is sunny in Köln.")

    async def run():
        async with anthropic.AsyncAnthropic(base_url=tool_service.url, api_key="none", max_retries=0) as client:
            async with client.messages.stream(**BODY, tools=[WEATHER]) as stream:
                first = await stream.get_final_message()
            (call,) = [block for block in first.content if block.type == "tool_use"]
            assert call.input == {"city": "Köln"}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
            again = [{"type": "text", "text": "And?"}]
            messages = [
                *ASK,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result, *again]},
            ]
            return await client.messages.create(**{**BODY, "messages": messages}, tools=[WEATHER])

    second = asyncio.run(run())
    assert blocks(second) == [{"type": "text", "text": "It is sunny in Köln."}]
    assert model.prompt().endswith(
        f"<|assistant|>{CALL}<|eos|>\n<|user|><tool_response>sunny</tool_response><|eos|>\n<|user|>And?<|eos|>\n"
        "<|assistant|>"
    )


def test_tool_choice(model, client):
    model.says(CALL + SECOND)

    def ask(**choice):
        answer = client.messages.create(**BODY, tools=[WEATHER, NOW], tool_choice=choice)
        grammar = model.worker.submits[-1].sampling.grammar
        return answer, "" if grammar is None else grammar.text

    answer, grammar = ask(type="any")
    assert (answer.stop_reason, ")*" in grammar, len(answer.content)) == ("tool_use", True, 2)
    answer, grammar = ask(type="any", disable_parallel_tool_use=True)
    assert (")*" in grammar, len(answer.content)) == (False, 1)
    answer, grammar = ask(type="tool", name="weather")
    assert ('"now' in grammar, '"weather' in grammar, answer.stop_reason) == (False, True, "tool_use")
    answer, _ = ask(type="auto", disable_parallel_tool_use=True)
    assert len(answer.content) == 1
    answer, _ = ask(type="none")
    assert (answer.content[0].text, answer.stop_reason) == (CALL + SECOND, "end_turn")
    assert "Tools" not in model.prompt()


def test_how_answers_end(model, client):
    model.says("One two END three")
    answer = client.messages.create(
        **BODY, stop_sequences=["END"], extra_body={"top_k": 3, "top_p": 0.5, "temperature": 0.2}
    )
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("One two ", "stop_sequence", "END")
    assert answer.usage.cache_read_input_tokens == 3
    sampling = model.worker.submits[-1].sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (3, 0.5, 0.2)
    last = events(model, stop_sequences=["END"])[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert last["usage"]["cache_read_input_tokens"] == 3
    answer = client.messages.create(**{**BODY, "max_tokens": 2})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)
    model.says(CALL)
    short = len(model.codec.encode(CALL, add_special_tokens=False)) - 12
    answer = client.messages.create(**{**BODY, "max_tokens": short}, tools=[WEATHER])
    assert answer.stop_reason == "max_tokens"
    assert list(answer.content[0].input) == ["INVALID_JSON"]
    model.says("")
    assert client.messages.create(**BODY).content == []


def test_thinking_is_a_switch_of_the_template(model, client):
    model.says("Yes.")
    off, closed = {"type": "disabled"}, "<think>\n\n</think>\n\n"
    client.messages.create(**BODY, thinking=off)
    assert model.prompt().endswith(closed)
    client.messages.create(**BODY, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert not model.prompt().endswith(closed)
    model.says(THOUGHT + "Yes.")
    for thinking in (off, {"type": "adaptive", "display": "omitted"}):
        answer = client.messages.create(**BODY, thinking=thinking)
        assert answer.content[0].type == "text", "hidden thinking must not appear"


def test_deferred_tools_appear_after_a_reference(model):
    model.says("Yes.")
    search = {"name": "search", "input_schema": {"type": "object"}}
    tools = [{**WEATHER, "defer_loading": True}, {**NOW, "defer_loading": True}, {**search, "defer_loading": False}]

    def shown(*more, **body):
        answer = model.service.post(PATH, **{**BODY, "messages": [*ASK, *more]}, tools=tools, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-moeyard-ignored") is None
        return {
            name
            for name in ("weather", "now", "search")
            if f'"name": "{name}"' in model.prompt().partition("<|user|>")[0]
        }

    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found]}
    turns = {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}
    assert shown() == {"search"}
    assert shown(*turns) == {"search", "weather"}
    assert "<tool_response>Found the tool weather.</tool_response>" in model.prompt()
    assert shown({"role": "assistant", "content": [{**call, "name": "now"}]}, turns[1]) == {"search", "now", "weather"}
    assert shown(tool_choice={"type": "tool", "name": "now"}) == {"search", "now"}
    tools = [{**NOW, "defer_loading": True}]
    assert shown() == {"now"}, "the tool must not appear before a result refers to it"
    tools = [{**NOW, "defer_loading": True}, search, {"name": "f g", "input_schema": {"type": "object"}}]
    answer = model.service.post(PATH, **BODY, tools=tools)
    assert (answer.status_code, "'tools.2.name'" in answer.text) == (400, True)


@pytest.mark.parametrize("words", ["The answer is (", "e", "|", ""])
def test_assistant_prefix_is_continued(model, client, words):
    model.says("B)")
    messages = [*ASK, {"role": "assistant", "content": words}]
    assert client.messages.create(**{**BODY, "messages": messages}).content[0].text == "B)"
    assert model.prompt().endswith(f"<|assistant|>{words}")


def test_integers_above_64_bits_keep_their_digits(model):
    number = 123456789012345678901
    model.says(f'<tool_call>\n{{"name": "pay", "arguments": {{"wei": {number}}}}}\n</tool_call>')
    tool = {"name": "pay", "input_schema": {"type": "object", "properties": {"wei": {"maximum": number}}}}
    (block,) = model.service.post(PATH, **BODY, tools=[tool]).json()["content"]
    assert (block["input"], type(block["input"]["wei"])) == ({"wei": number}, int)
    assert str(number) in model.prompt()
    messages = [*ASK, {"role": "assistant", "content": [block]}, *ASK]
    model.service.post(PATH, **{**BODY, "messages": messages})
    assert f'{{"wei": {number}}}' in model.prompt()


def test_truncated_call_returns_as_the_model_wrote_it(model, client):
    model.says("Hm.")
    written = '{"city": "K'
    block = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"INVALID_JSON": written}}
    messages = [*ASK, {"role": "assistant", "content": [block]}, *ASK]
    client.messages.create(**{**BODY, "messages": messages})
    assert json.dumps(written) in model.prompt(), "the template must write arguments with tojson"


def test_output_format(model, client):
    model.says('{"a": 1}')
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert client.messages.create(**BODY, output_config=form).content[0].text == '{"a": 1}'
    assert model.worker.submits[-1].sampling.grammar is not None


def test_tokens_are_counted(model, client):
    model.says("Hi.")
    for more in ({}, {"tools": [WEATHER]}, {"system": "Be short."}):
        count = client.messages.count_tokens(model="tiny", messages=ASK, **more).input_tokens
        assert len(model.worker.submits) == 0
        client.messages.create(**BODY, **more)
        assert count == len(model.worker.submits[-1].prompt_token_ids)
        model.worker.submits.clear()
    answer = model.service.post(COUNT, model="tiny", messages=[])
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_fields_without_effect_are_named(model):
    model.says("Hi.")
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "abc"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "tool_use", "id": "t", "name": "now", "input": {}, "cache_control": {"type": "ephemeral"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    messages = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    answer = model.service.post(
        PATH,
        **{**BODY, "messages": messages},
        tools=[{**NOW, "type": "custom", "cache_control": None, "strict": True}],
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 2000},
        context_management={"edits": []},
        mcp_servers=[],
    )
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-moeyard-ignored"].split(", ")) == {
        "service_tier",
        "messages.content.signature",
        "messages.content.data",
        "messages.content.redacted_thinking",
        "messages.content.cache_control",
        "messages.content.is_error",
        "messages.content.thinking",
        "thinking.budget_tokens",
    }
    assert "<|user|><tool_response></tool_response>" in model.prompt()
    assert model.worker.submits[-1].sampling.grammar is not None, "a strict tool must follow its schema"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
CALLED = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**NOW, "name": "f g"}]}, "tools.0.name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"container": "c"}, "container"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_unsupported_fields_are_refused(model, body, param):
    answer = model.service.post(PATH, **{**BODY, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert param in error["error"]["message"] or param == "messages"
    assert model.worker.submits == []


def test_all_errors_have_anthropics_format(model, client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**BODY, "model": "other"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    model.worker.reject = Rejected(request_id="", reason="queue_full", message="full", retry_after=2.0)
    with pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(**BODY, stream=True)
    assert full.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    for answer in (
        model.service.client.get(PATH),
        model.service.client.post(PATH, content="x", headers={"content-type": "text/plain"}),
        model.service.client.post(COUNT, content="[", headers={"content-type": "application/json"}),
    ):
        assert (answer.status_code >= 400, answer.json()["type"]) == (True, "error"), answer.text


def test_failed_stream(start, tool_checkpoint):
    service = start(1, model_path=tool_checkpoint, recovery_timeout=0.0, **LONG)
    service.workers[0].pace = 0.01
    with (
        anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**{**BODY, "max_tokens": 4000}) as stream,
    ):
        next(stream.text_stream)
        service.workers[0].fail("a rank was lost")
        with pytest.raises(anthropic.APIStatusError) as caught:
            stream.get_final_message()
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_large_body_is_read_by_a_process(model):
    model.says("Long.")
    answer = model.service.post(PATH, **BODY, metadata={"user_id": "x" * 70_000})
    assert answer.json()["content"][0]["text"] == "Long."
    answer = model.service.post(PATH, **{**BODY, "system": "word " * 20_000})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
