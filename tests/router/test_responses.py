"""/v1/responses with the openai package and plain HTTP: text, tools, reasoning, streams and refused fields."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel
from tests.router.tool_model import CALL, LONG, SECOND, THOUGHT

from moeyard_router.api.response_tools import custom_input, offers_of
from moeyard_worker.protocol import Rejected

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
NOW = {"type": "function", "name": "now"}
# Tool types that Codex sends in addition to functions.
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
GROUP = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "description": "Starts one."}, {"type": "custom", "name": "tell"}],
}
HOSTED = {"type": "web_search", "external_web_access": False}


@pytest.fixture(scope="module")
def client(tool_service):
    with openai.OpenAI(base_url=f"{tool_service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(model, **body):
    """Return names and data of a stream's events, which are numbered from 0."""
    with model.service.client.stream("POST", PATH, json={"input": "Hi", **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [e["type"] for e in found]
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def bare(response):
    """Return the response without the parts that differ between answers: ids and time."""
    text = json.dumps({**response, "created_at": 0})
    calls = [item["call_id"] for item in response["output"] if "call_id" in item]
    for given in (response["id"].removeprefix("resp_"), *calls):
        text = text.replace(given, "ID")
    return json.loads(text)


def test_text(model, client):
    model.says("It is sunny.")
    answer = client.responses.create(
        model="tiny",
        input="Weather?",
        instructions="Be short.",
        temperature=0.5,
        max_output_tokens=50,
        metadata={"a": "b"},
    )
    assert (answer.status, answer.output_text, answer.object) == ("completed", "It is sunny.", "response")
    assert model.prompt() == "<|system|>Be short.<|eos|>\n<|user|>Weather?<|eos|>\n<|assistant|>"
    submit = model.worker.submits[-1]
    assert (submit.sampling.temperature, submit.sampling.max_tokens) == (0.5, 50)
    assert (answer.instructions, answer.temperature, answer.metadata) == ("Be short.", 0.5, {"a": "b"})
    assert answer.usage.input_tokens == len(submit.prompt_token_ids)
    assert answer.usage.output_tokens == len(model.codec.encode("It is sunny.", add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 3


def test_reasoning_text_and_calls_whole_and_streamed(model):
    model.says(THOUGHT + "One moment.\n" + CALL + SECOND)
    asked = {"tools": [WEATHER, NOW], "reasoning": {"effort": "high"}}
    whole = model.service.post(PATH, input="Hi", **asked).json()
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "I should look. 🙂"}]
    assert whole["output"][1]["content"][0]["text"] == "One moment."
    calls = [(item["name"], item["arguments"]) for item in whole["output"][2:]]
    assert calls == [("weather", '{"city": "Köln"}'), ("now", "{}")]
    assert len({item["id"] for item in whole["output"]}) == 4
    thought = model.codec.encode(THOUGHT.rstrip("\n"), add_special_tokens=False)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(thought)}
    for chunk in (1, 5, 500):
        model.worker.chunk = chunk
        stream = events(model, **asked)
        assert [e["type"] for e in stream[:2]] == ["response.created", "response.in_progress"]
        last = stream[-1]
        assert last["type"] == "response.completed"
        got, want = bare(last["response"]), bare(whole)
        counts = got["usage"].pop("output_tokens_details"), want["usage"].pop("output_tokens_details")
        assert chunk > 1 or counts[0] == counts[1]
        assert got == want
        built = {}
        for event in stream[2:-1]:
            name, place = event["type"].removeprefix("response."), event["output_index"]
            if name == "output_item.added":
                assert event["item"]["status"] == "in_progress"
                built[place] = ""
            elif name.endswith(".delta"):
                assert event["item_id"] == last["response"]["output"][place]["id"]
                built[place] += event["delta"]
            elif name == "output_item.done":
                assert event["item"] == last["response"]["output"][place]
            elif name.endswith(("text.done", "arguments.done")):
                assert built[place] == event.get("text", event.get("arguments"))
        assert [built[i] for i in range(4)] == ["I should look. 🙂", "One moment.", '{"city": "Köln"}', "{}"]


def test_openai_client_streams_and_continues(model, tool_service):
    model.says(THOUGHT + CALL, "It is sunny in Köln.")

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{tool_service.url}/v1", api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": "Wetter?"}]
            async with client.responses.stream(model="tiny", input=messages, tools=[WEATHER]) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            (call,) = [item for item in first.output if item.type == "function_call"]
            messages += [item.model_dump(exclude_none=True) for item in first.output]
            messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
            return kinds, call, await client.responses.create(model="tiny", input=messages, tools=[WEATHER])

    kinds, call, second = asyncio.run(run())
    assert json.loads(call.arguments) == {"city": "Köln"}
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
    assert second.output_text == "It is sunny in Köln."
    assert f"<|assistant|>{CALL}<|eos|>\n<|user|><tool_response>sunny</tool_response>" in model.prompt()


def test_items_become_turns(model):
    model.says("Yes.")
    text = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    items = [
        {"type": "message", "role": "developer", "content": "Rules."},
        {"role": "user", "content": text},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "night"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Sure?"},
    ]
    answer = model.service.post(PATH, input=items, tools=[NOW], tool_choice="none")
    assert answer.json()["output"][0]["content"][0]["text"] == "Yes."
    call = SECOND.strip()
    assert model.prompt() == (
        "<|system|>Rules.<|eos|>\n<|user|>one\ntwo<|eos|>\n"
        f"<|assistant|>Wait.{call}{call}<|eos|>\n"
        "<|user|><tool_response>noon</tool_response><|eos|>\n<|user|><tool_response>night</tool_response><|eos|>\n"
        "<|assistant|>Noon.<|eos|>\n<|user|>Sure?<|eos|>\n<|assistant|>"
    )
    ignored = answer.headers["x-moeyard-ignored"].split(", ")
    assert {"input.id", "input.status", "input.content.annotations", "input.reasoning"} <= set(ignored)


def test_output_format(model, client):
    class City(BaseModel):
        name: str

    model.says(THOUGHT + '{"name": "Köln"}')
    answer = client.responses.parse(model="tiny", input="City?", text_format=City)
    assert answer.output_parsed == City(name="Köln")
    assert "json" in model.worker.submits[-1].sampling.grammar.text
    model.says("{}")
    client.responses.create(model="tiny", input="?", text={"format": {"type": "json_object"}})
    assert model.worker.submits[-1].sampling.grammar is not None


def test_tool_choice_and_effort(model, client):
    model.says(CALL)
    chosen = {"type": "function", "name": "weather"}
    answer = client.responses.create(
        model="tiny", input="?", tools=[WEATHER, NOW], tool_choice=chosen, reasoning={"effort": "none"}
    )
    assert (answer.output[0].type, answer.tool_choice.name, answer.status) == ("function_call", "weather", "completed")
    grammar = model.worker.submits[-1].sampling.grammar.text
    assert '"weather' in grammar
    assert '"now' not in grammar
    assert model.prompt().endswith("<think>\n\n</think>\n\n")


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_custom_tools_and_namespaces_whole_and_streamed(model):
    patch = "*** Begin Patch\n+ü"
    calls = [called("agents__spawn", task="t"), called("apply_patch", input=patch), called("agents__tell", words="Go.")]
    model.says("".join([CALL, *calls]))
    asked = {"tools": [HOSTED, WEATHER, GROUP, PATCH]}
    answer = model.service.post(PATH, input="Hi", **asked)
    whole = answer.json()
    bare_items = [{k: v for k, v in item.items() if k not in ("id", "call_id", "status")} for item in whole["output"]]
    assert bare_items == [
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"task": "t"}'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": patch},
        {"type": "custom_tool_call", "name": "tell", "namespace": "agents", "input": "Go."},
    ]
    assert [item["id"].partition("_")[0] for item in whole["output"]] == ["fc", "fc", "ctc", "ctc"]
    assert answer.headers["x-moeyard-ignored"] == "tools.web_search"
    assert [tool["type"] for tool in whole["tools"]] == ["function", "namespace", "custom"]
    prompt = model.prompt()
    for text in ("Tools of agents: Sub-agents.", "Starts one.", "Edits files.", "*** Begin Patch", "agents__tell"):
        assert prompt.count(text) == 1, text
    assert "web_search" not in prompt
    for chunk in (1, 500):
        model.worker.chunk = chunk
        stream = events(model, **asked)
        assert bare(stream[-1]["response"])["output"] == bare(whole)["output"]
        done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
        assert done == stream[-1]["response"]["output"]
        deltas = {e["output_index"]: e["delta"] for e in stream if e["type"] == "response.custom_tool_call_input.delta"}
        ends = {e["output_index"]: e["input"] for e in stream if e["type"] == "response.custom_tool_call_input.done"}
        assert deltas == ends == {2: patch, 3: "Go."}
        added = [event["item"] for event in stream if event["type"] == "response.output_item.added"]
        assert [(item["name"], item.get("input", item.get("arguments"))) for item in added[1:3]] == [
            ("spawn", ""),
            ("apply_patch", ""),
        ]
    large = model.service.post(PATH, input="Hi", metadata={"a": "x" * 70_000}, **asked)
    assert bare(large.json())["output"] == bare(whole)["output"], "an intake process must give the same answer"


def test_custom_calls_and_namespaces_as_input(model):
    model.says("Done.")
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "function_call", "call_id": "c1", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {
            "type": "custom_tool_call",
            "id": "t",
            "status": "completed",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "+ü",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Patched."},
        {"type": "function_call", "call_id": "c3", "namespace": "gone", "name": "f", "arguments": "{}"},
    ]
    answer = model.service.post(PATH, input=items, tools=[GROUP, PATCH])
    assert answer.status_code == 200, answer.text
    calls = [called("agents__spawn"), called("apply_patch", input="+ü").replace("\\u00fc", "ü")]
    assert "".join([f"<|assistant|>{''.join(calls)}", "<|eos|>\n<|user|><tool_response>Patched."]) in model.prompt()
    assert called("gone__f") in model.prompt()
    assert {"input.id", "input.status", "input.web_search_call"} == set(answer.headers["x-moeyard-ignored"].split(", "))


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
    ],
)
def test_tool_choice_of_custom_and_namespaced_tools(model, choice, name):
    model.says(called(name, input="x"))
    answer = model.service.post(PATH, input="Hi", tools=[GROUP, PATCH, NOW], tool_choice=choice).json()
    assert answer["tool_choice"] == choice
    assert [item["name"] for item in answer["output"]] == [choice["name"]]
    grammar = model.worker.submits[-1].sampling.grammar.text
    assert (f'"{name}' in grammar, '"now' in grammar) == (True, False)


def test_function_names_of_tools():
    def names(*tools):
        return list(offers_of(tools))

    def group(name, *members):
        return {"type": "namespace", "name": name, "tools": [{"type": "function", "name": each} for each in members]}

    assert names(group("mcp__files__", "read"), group("a.b", "c d")) == ["mcp__files__read", "a_b__c_d"]
    twins = names({**NOW, "name": "a__b"}, group("a", "b"), group("a__", "b"), group("a_", "_b"))
    assert twins == ["a__b", "a__b_2", "a__b_3", "a____b"]
    long = names(
        group("n" * 40, "m" * 40 + "1", "m" * 40 + "2"), group("n" * 63 + "_", "x"), group("n" * 63 + ".", "x")
    )
    assert len(set(long)) == 4
    assert all(len(name) <= 64 for name in long)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": "a", "why": "b"}', "a"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"input": "cut o', '{"input": "cut o'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
    ],
)
def test_custom_tool_input(arguments, text):
    assert custom_input(arguments) == text


def test_truncated_answer(model, client):
    model.says(CALL)
    short = len(model.codec.encode(CALL, add_special_tokens=False)) - 12
    whole = client.responses.create(model="tiny", input="?", tools=[WEATHER], max_output_tokens=short)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.output[-1].type, whole.output[-1].status) == ("function_call", "incomplete")
    last = events(model, tools=[WEATHER], max_output_tokens=short)[-1]
    assert last["type"] == "response.incomplete"
    assert bare(last["response"])["output"] == bare(whole.model_dump(exclude_unset=True))["output"]


def test_integers_above_64_bits_keep_their_digits(model):
    number = 123456789012345678901
    model.says(f'<tool_call>\n{{"name": "pay", "arguments": {{"wei": {number}}}}}\n</tool_call>')
    parameters = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": number}}}
    tool = {"type": "function", "name": "pay", "parameters": parameters}
    whole = model.service.post(PATH, input="Pay.", tools=[tool]).json()
    last = events(model, tools=[tool])[-1]["response"]
    for answer in (whole, last):
        assert answer["tools"][0]["parameters"] == parameters
        (item,) = answer["output"]
        assert item["arguments"] == f'{{"wei": {number}}}'
    model.service.post(PATH, input=[{"role": "user", "content": "Pay."}, whole["output"][0]], tools=[tool])
    assert model.prompt().count(str(number)) == 2


def test_answer_without_text_is_an_empty_message(model, client):
    model.says("")
    assert client.responses.create(model="tiny", input="?").output_text == ""
    kinds = [e["type"].removeprefix("response.") for e in events(model)]
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    assert kinds[-1] == "completed"


def test_failed_stream(start, tool_checkpoint):
    service = start(1, model_path=tool_checkpoint, recovery_timeout=0.0, **LONG)
    service.workers[0].pace = 0.01
    body = {"input": "Hi", "stream": True, "max_output_tokens": 4000}
    with service.client.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        while "output_text.delta" not in next(lines):
            pass
        service.workers[0].fail("a rank was lost")
        last = [line for line in lines if line][-1]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "response.failed"
    response = event["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"] == []


def test_worker_refusal_keeps_its_status(model, client):
    model.worker.reject = Rejected(request_id="", reason="queue_full", message="full", retry_after=2.0)
    with pytest.raises(openai.RateLimitError):
        list(client.responses.create(model="tiny", input="?", stream=True))


def test_fields_without_effect_are_named(model):
    model.says("Hi.")
    answer = model.service.post(
        PATH,
        input="?",
        store=True,
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        truncation="auto",
        prompt_cache_key="k",
        reasoning={"summary": "auto"},
        background=False,
        previous_response_id=None,
        user="u",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        service_tier="auto",
        stream_options=None,
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-moeyard-ignored"].split(", ") == [
        "store",
        "metadata",
        "include",
        "truncation",
        "prompt_cache_key",
        "service_tier",
        "reasoning.summary",
    ]
    assert answer.headers["x-moeyard-route"].startswith("rank=0")
    assert answer.json()["store"] is False


DEEP: dict = {}
for _ in range(245):
    DEEP = {"not": DEEP}
IMAGE = {"type": "input_image", "image_url": "http://x"}
BAD = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["x"]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
    ({"tools": [HOSTED, {**NOW, "name": "f g"}]}, "tools.1.name"),
    ({"tools": [HOSTED, {**GROUP, "tools": [{**NOW, "parameters": {"type": "array"}}]}]}, "tools.1.tools.0.parameters"),
    ({"tools": [GROUP], "tool_choice": {"type": "function", "name": "spawn"}}, "tool_choice"),
    ({"tools": [HOSTED], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [HOSTED], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f g"}]}, "tools.0.name"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_unsupported_fields_are_refused(model, body, param):
    answer = model.service.post(PATH, **{"input": "Hi", **body})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert (error["param"], param in error["message"]) == (param, True), error
    assert model.worker.submits == []


def test_large_body_is_read_by_a_process(model):
    model.says("Long.")
    text = " ".join(["word"] * 20_000)
    items = [{"role": "user", "content": text}]
    answer = model.service.post(PATH, input=items, instructions="Be short.")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"
    answer = model.service.post(PATH, input="Hi", metadata={"a": "x" * 70_000}, instructions="Be short.")
    assert (answer.status_code, answer.json()["instructions"]) == (200, "Be short.")
    assert answer.json()["output"][0]["content"][0]["text"] == "Long."
