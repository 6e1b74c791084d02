"""Fields that cannot change an answer are accepted and named: nulls, accounting fields, echoed messages."""

import json
import re
from pathlib import Path

import pytest
from tests.router.tool_model import THOUGHT

from moeyard_router.api.fields import IGNORED, NOT_SERVED
from moeyard_router.api.messages import ChatMessage, TextPart, ToolCall
from moeyard_router.api.schema import ChatRequest, CompletionRequest, StreamOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKEN_IDS = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "Hello"}]
HEADER = "x-moeyard-ignored"
# Fields that the openai package (`message.model_dump()`) and other clients echo from an answer.
ECHOED = {
    "role": "assistant",
    "content": "Hi.",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": None,
    "reasoning": None,
    "provider_specific_fields": {"a": 1},
    "thinking_blocks": None,
    "timestamp": 1795900000,
    "model": "tiny",
}


def named(answer):
    """Return the names in the header of a successful answer."""
    assert answer.status_code == 200, answer.text
    header = answer.headers.get(HEADER)
    return [] if header is None else header.split(", ")


def prompts(service):
    return [s.prompt_token_ids for s in service.submits]


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_ignored_fields_are_named(service, field):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        for stream in (False, True):
            assert named(service.post(path, **body, max_tokens=1, stream=stream, **{field: "x"})) == [field]
    assert len(set(prompts(service))) == 2


def test_ignored_fields_keep_the_requests_order(service):
    body = {"store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "max_tokens": 1}
    # `user` has an effect: requests of one user go to the rank that has their prefix.
    assert named(service.post(CHAT, messages=HELLO, **body)) == ["store", "metadata", "service_tier"]


def test_ignored_stream_options_are_named(service):
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
def test_values_without_effect_are_accepted(service, field, value, says):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        assert named(service.post(path, **body, max_tokens=1, **{field: value})) == says


EVERY_API = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
}
CHATS = [path for path in EVERY_API if path != COMPLETIONS]


@pytest.mark.parametrize("path", EVERY_API)
def test_every_api_names_ignored_fields(service, path):
    names = IGNORED - {"metadata"}  # some APIs define its type
    assert set(named(service.post(path, **EVERY_API[path], **dict.fromkeys(names, "x")))) == names


SWITCHES = [
    {"enable_thinking": False},
    {"thinking": False},
    {"thinking": {"type": "disabled", "budget_tokens": None}},
    {"think": False},
    {"think": "none"},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_args": {"enable_thinking": False}},
]


def turned_on(switch):
    """Return the opposite setting of the same field."""
    words = {"disabled": "enabled", "none": "high", False: True}
    return json.loads(
        json.dumps(switch),
        object_hook=lambda d: {k: words.get(v, v) if not isinstance(v, dict) else v for k, v in d.items()},
    )


@pytest.mark.parametrize("path", CHATS)
def test_thinking_switches_work_in_every_api(model, path):
    closed = "<think>\n\n</think>\n\n"

    def prompt(**body):
        answer = model.service.post(path, **EVERY_API[path], **body)
        assert named(answer) == [], "a switch with effect must not be named"
        if "tokens" in answer.json():
            return answer.json()["tokens"]
        ran = not path.endswith("count_tokens")
        return list(model.worker.submits[-1].prompt_token_ids) if ran else answer.json()["input_tokens"]

    plain = prompt()
    off = prompt(chat_template_kwargs={"enable_thinking": False})
    assert off != plain
    if isinstance(off, list):
        assert model.codec.decode(off).endswith(closed)
    for switch in SWITCHES:
        assert (prompt(**switch), prompt(**turned_on(switch))) == (off, plain), switch


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        ({"think": False, "reasoning": {"enabled": True}}, "reasoning"),
        ({"think": "low", "reasoning": {"effort": "high"}}, "think"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": "yes"}, "thinking"),
        ({"think": 3}, "think"),
        ({"reasoning": {"efort": "high"}}, "reasoning.efort"),
    ],
    ids=json.dumps,
)
def test_contradictory_thinking_switches_are_refused(service, path, body, param):
    answer = service.post(path, **EVERY_API[path], **body)
    assert (answer.status_code, f"'{param}" in answer.text) == (400, True), answer.text


def test_reasoning_can_be_omitted_from_the_answer(model):
    model.says(THOUGHT + "Yes.")
    for body in ({"reasoning": {"exclude": True}}, {"include_reasoning": False}):
        assert model.chat(**body)["message"] == {"role": "assistant", "content": "Yes."}
        output = model.service.post("/v1/responses", input="x", **body).json()["output"]
        assert [item["type"] for item in output] == ["message"]


def test_switches_unknown_to_the_template_are_named(service):
    for path in (COMPLETIONS, CHAT, "/v1/messages"):
        for switch in SWITCHES[:6]:
            (name,) = named(service.post(path, **EVERY_API[path], **switch)) or [""]
            assert name.partition(".")[0] == next(iter(switch)), switch
    budgets = {"thinking": {"type": "auto", "budget_tokens": 9}, "reasoning": {"max_tokens": 9}, "thinking_budget": 9}
    says = ["thinking_budget", "thinking.budget_tokens", "reasoning.max_tokens"]
    assert named(service.post(CHAT, **EVERY_API[CHAT], **budgets)) == says


def test_usage_field_of_openrouter(service):
    for path in (COMPLETIONS, CHAT):
        body = {**EVERY_API[path], "usage": {"include": True}}
        assert named(service.post(path, **body)) == ["usage"], "usage must be present in any case"
        last = service.stream(path, **body)[-1]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 1)
        assert "usage" not in service.stream(path, **{**body, "usage": {"include": False}})[-1]


def test_typing_errors_are_refused_with_a_guess(service):
    for name, guess in (("temprature", "temperature"), ("max_token", "max_tokens"), ("top-p", "top_p")):
        answer = service.post(CHAT, **EVERY_API[CHAT], **{name: 0.5})
        assert answer.json()["error"]["message"] == (f"unknown or unsupported field '{name}'; did you mean '{guess}'?")
    answer = service.post(CHAT, **EVERY_API[CHAT], zzz=1)
    assert answer.json()["error"]["message"] == "unknown or unsupported field 'zzz'"
    # Names of an inner object are compared with the fields of that object.
    for fields, message in (
        ({"response_format": {"type": "json_object", "schema": {}}}, "'response_format.schema'"),
        ({"response_format": {"type": "text", "json_schem": {}}}, "'response_format.json_schema'?"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "'stream_options.include_usage'?"),
    ):
        answer = service.post(CHAT, **EVERY_API[CHAT], **fields)
        assert answer.json()["error"]["message"].endswith(message)
    answer = service.post("/generate", text="x", sampling_params={"max_tokens": 1})
    assert answer.json()["error"]["message"].endswith("did you mean 'sampling_params.max_new_tokens'?")


@pytest.fixture(scope="module")
def lenient(starter):
    return starter(1, unknown_fields="ignore")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        *(
            (COMPLETIONS, {name: [5, 6]}, f"'prompt' is required: send '{name}' as 'prompt'")
            for name in ("prompt_token_ids", "token_ids", "input_ids", "promt")
        ),
        (TOKEN_IDS, {"prompt_token_ids": [5]}, "'token_ids' is required: send 'prompt_token_ids' as 'token_ids'"),
        ("/detokenize", {"token_ids": [5]}, "'tokens' is required: send 'token_ids' as 'tokens'"),
        (CHAT, {"token_ids": [5], "zz": 1}, "'messages' is required"),
        (CHAT, {"zz": 1, "message": []}, "'messages' is required: send 'message' as 'messages'"),
        (COMPLETIONS, {"zz": 1, "text": "x"}, "'prompt' is required"),
        (COMPLETIONS, {"prompt_token_ids": None}, "'prompt' is required"),
    ],
)
def test_other_names_of_required_fields(service, lenient, path, fields, message):
    given = {"sampling_params": {}, **fields} if path == TOKEN_IDS else fields
    for each in (service, lenient):
        answer = each.post(path, **given)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        assert answer.json()["error"]["param"] == message.split("'")[1]


@pytest.mark.parametrize("path", EVERY_API)
def test_unknown_fields_can_be_ignored(lenient, service, path):
    body = {**EVERY_API[path], "temprature": 0.5, "reasoning": {"efort": "high"}, "dropped": ["x"], "store": True}
    for message in body.get("messages", ()):
        body["messages"] = [{**message, "content": [{"type": "text", "text": "Hello", "fancy": 1}], "mood": "good"}]
    assert service.post(path, **body).status_code == 400
    says = {"temprature", "reasoning.efort", "dropped", "store"}
    if path == COMPLETIONS:
        says = says - {"reasoning.efort"} | {"reasoning"}
    if "messages" in body:
        says |= {"messages.mood", "messages.content.fancy"}
    answer = lenient.post(path, **body)
    assert set(named(answer)) == says
    assert set(named(lenient.post(path, **body, zzz="x" * 70_000))) == says | {"zzz"}, "large body"


def test_names_of_unknown_fields_are_escaped_in_the_header(lenient):
    body = {**EVERY_API[CHAT], "a\r\nx-evil: 1": 1, "ü" * 100: 2, "": 3}
    assert named(lenient.post(CHAT, **body)) == ["a??x-evil??1", "?" * 64, "?"]
    many = {**EVERY_API[CHAT], **{f"field_{i}": i for i in range(5000)}}
    assert named(lenient.post(CHAT, **many)) == [f"field_{i}" for i in range(32)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"temperature": "hot"}, "temperature"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}, "extra": 1}}, "response_format"),
        ({"kv_compression": {"method": "other", "extra": 1}}, "kv_compression"),
    ],
    ids=str,
)
def test_known_fields_are_not_ignored(lenient, body, param):
    answer = lenient.post(CHAT, **EVERY_API[CHAT], zzz=1, **body)
    assert (answer.status_code, answer.json()["error"]["param"].partition(".")[0]) == (400, param)


def test_plain_request_names_nothing(service):
    assert named(service.post(CHAT, messages=HELLO, max_tokens=1, top_logprobs=0, logprobs=False)) == []


def test_echoed_messages_equal_their_text(service):
    answer = service.post(CHAT, messages=[*HELLO, ECHOED, *HELLO], max_tokens=1)
    says = ["annotations", "provider_specific_fields", "timestamp", "model"]
    assert named(answer) == [f"messages.{name}" for name in says]
    service.chat(messages=[*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_reasoning_unused_by_the_template_is_named(service):
    echoed = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    answer = service.post(CHAT, messages=[*HELLO, echoed, *HELLO], max_tokens=1)
    assert named(answer) == ["messages.reasoning_content"]
    assert named(service.post(CHAT, messages=[{**HELLO[0], "name": "Ann"}], max_tokens=1)) == ["messages.name"]


@pytest.mark.parametrize("absent", [{}, {"content": None}], ids=str)
def test_empty_assistant_message(service, codec, absent):
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
def test_refusal_is_the_assistants_text(service, message):
    service.chat(messages=[*HELLO, {"role": "assistant", **message}], max_tokens=1)
    service.chat(messages=[*HELLO, {"role": "assistant", "content": "Hi."}], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_developer_becomes_system_without_that_role(service):
    for role in ("developer", "system"):
        service.chat(messages=[{"role": role, "content": "Be kind."}, *HELLO], max_tokens=1)
    first, second = prompts(service)
    assert first == second


def test_api_page_has_every_field():
    """docs/api.md names every field of the tables and of the models, and `guided_*` for those."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    fields = {*IGNORED, *NOT_SERVED, *ChatRequest.model_fields, *CompletionRequest.model_fields, "parallel_tool_calls"}
    fields |= {*ChatMessage.harmless, *ChatMessage.unserved, *ChatMessage.plain, *TextPart.harmless, *ToolCall.harmless}
    fields |= {*StreamOptions.model_fields, *StreamOptions.harmless}
    fields -= {"dropped", "parts", "type"} | {name for name in NOT_SERVED if name.startswith("guided_")}
    assert {name for name in fields if not re.search(rf"\b{name}\b", page)} == set()
    assert "`guided_*`" in page
