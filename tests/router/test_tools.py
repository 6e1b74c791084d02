"""Tools and reasoning seen by clients: whole and streamed, with plain HTTP and the openai package."""

import asyncio
import json

import openai
import pytest
from tests.router.tool_model import ASK, CALL, CHAT, LONG, NOW, SECOND, THOUGHT, WEATHER, Model

from moeyard_router.api.intake import formats_of
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.text.chat import TextCodec
from moeyard_worker.protocol import Rejected


def bare(calls):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def test_calls_whole_and_streamed(model):
    model.says(THOUGHT + "One moment.\n" + CALL + SECOND)
    choice = model.chat(tools=[WEATHER, NOW])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["stop_reason"] is None
    message = choice["message"]
    assert message["reasoning_content"] == "I should look. 🙂"
    assert message["content"] == "One moment."
    assert bare(message["tool_calls"]) == [("weather", '{"city": "Köln"}'), ("now", "{}")]
    assert [c["type"] for c in message["tool_calls"]] == ["function"] * 2
    ids = [c["id"] for c in message["tool_calls"]]
    assert len({*ids, *(c["id"] for c in model.chat(tools=[WEATHER])["message"]["tool_calls"])}) == 4
    for chunk in (1, 4, 100):
        model.worker.chunk = chunk
        got, reason, _ = model.streamed(tools=[WEATHER, NOW])
        assert reason == "tool_calls"
        assert {k: got[k] for k in ("content", "reasoning_content")} == {
            k: message[k] for k in ("content", "reasoning_content")
        }
        assert bare(got["tool_calls"]) == bare(message["tool_calls"])


def test_template_gets_the_tools_unchanged(model):
    model.says("Sunny.")
    assert model.chat(tools=[WEATHER])["message"] == {"role": "assistant", "content": "Sunny."}
    function = {k: v for k, v in WEATHER["function"].items() if v is not None}
    assert json.dumps({"type": "function", "function": function}) in model.prompt()
    assert model.worker.submits[-1].sampling.grammar is None
    model.chat(tools=[WEATHER], tool_choice="none")
    assert "weather" not in model.prompt()
    model.chat(tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert "Tools" not in model.prompt()


def test_without_tools_calls_stay_text(model):
    model.says(CALL)
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = model.chat(**body)
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"


def test_parallel_tool_calls_off_keeps_the_first_call(model):
    model.says(CALL + SECOND)
    choice = model.chat(tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert bare(choice["message"]["tool_calls"]) == [("weather", '{"city": "Köln"}')]
    got, reason, _ = model.streamed(tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert (len(got["tool_calls"]), reason) == (1, "tool_calls")


def test_reasoning_without_tools(model):
    model.says(THOUGHT + "Yes.")
    choice = model.chat()
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "I should look. 🙂"}
    assert choice["finish_reason"] == "stop"
    got, reason, _ = model.streamed()
    assert (got["content"], got["reasoning_content"], reason) == ("Yes.", "I should look. 🙂", "stop")
    assert model.chat(include_reasoning=False)["message"] == {"role": "assistant", "content": "Yes."}
    got, _, _ = model.streamed(include_reasoning=False)
    assert (got["content"], got["reasoning_content"]) == ("Yes.", "")
    completion = model.service.complete(prompt="x", max_tokens=100)["choices"][0]
    assert completion["text"] == THOUGHT + "Yes."


def test_truncated_answer_keeps_its_finish_reason(model):
    model.says(THOUGHT + CALL)
    size = len(model.codec.encode(THOUGHT, add_special_tokens=False))
    choice = model.chat(max_tokens=size - 5)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"].startswith("I should")
    cut = THOUGHT + CALL[: CALL.index("öln")]
    choice = model.chat(tools=[WEATHER], max_tokens=len(model.codec.encode(cut, add_special_tokens=False)))
    assert choice["finish_reason"] == "length"
    assert bare(choice["message"]["tool_calls"]) == [("weather", '{"city": "K')]


def test_tokens_of_a_chat_with_tools_are_counted(model):
    model.says("Hm.")
    model.chat(tools=[WEATHER])
    answer = model.service.post("/tokenize", messages=ASK, tools=[WEATHER]).json()
    assert answer["tokens"] == list(model.worker.submits[-1].prompt_token_ids)


def test_template_may_close_the_reasoning_block(model):
    model.says("No need to <think>.")
    choice = model.chat(chat_template_kwargs={"enable_thinking": False})
    assert model.prompt().endswith("<think>\n\n</think>\n\n")
    assert choice["message"] == {"role": "assistant", "content": "No need to <think>."}


def test_continued_message(model):
    model.says("so on.</think>\n\nYes.")
    body = {"continue_final_message": True, "add_generation_prompt": False}
    begun = [*ASK, {"role": "assistant", "content": "<think>\nWell, and"}]
    message = model.service.chat(messages=begun, **body)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "so on."}


def test_choices_are_parsed_separately(model):
    model.says(CALL, "Sunny.", THOUGHT + CALL)
    answer = model.service.chat(messages=ASK, tools=[WEATHER], n=3)
    reasons = sorted(c["finish_reason"] for c in answer["choices"])
    assert reasons == ["stop", "tool_calls", "tool_calls"]
    ids = [c["id"] for choice in answer["choices"] for c in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == 2


def test_stop_strings_and_logprobs(model):
    model.says("Let me see. " + CALL)
    choice = model.chat(tools=[WEATHER], stop=["see"], logprobs=True, return_token_ids=True)
    assert choice["message"]["content"] == "Let me "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "see")
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    _, _, chunks = model.streamed(tools=[WEATHER], logprobs=True, return_token_ids=True)
    said = [byte for c in chunks for lp in (c["logprobs"] or {}).get("content", ()) for byte in lp["bytes"]]
    assert bytes(said).decode() == "Let me see. " + CALL + "<|eos|>"


@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named_have_a_grammar(model, stream):
    model.says(CALL)
    ask = model.streamed if stream else model.chat

    def reason(**body):
        answer = ask(tools=[WEATHER, NOW], **body)
        return answer[1] if stream else answer["finish_reason"]

    assert reason(tool_choice="required") == "tool_calls"
    grammar = model.worker.submits[-1].sampling.grammar
    assert grammar.kind == "lark"
    assert '"weather' in grammar.text
    assert '"now' in grammar.text
    assert ")*" in grammar.text
    assert reason(tool_choice="required", parallel_tool_calls=False) == "tool_calls"
    assert ")*" not in model.worker.submits[-1].sampling.grammar.text
    assert reason(tool_choice={"type": "function", "function": {"name": "now"}}) == "stop"  # like OpenAI and vLLM
    assert '"weather' not in model.worker.submits[-1].sampling.grammar.text


def test_strict_functions_follow_their_schema_with_auto(model):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    model.says(THOUGHT + "One moment.\n" + CALL)
    assert bare(model.chat(tools=[strict, NOW])["message"]["tool_calls"]) == [("weather", '{"city": "Köln"}')]
    grammar = model.worker.submits[-1].sampling.grammar
    assert grammar.text.startswith("%llguidance {}\nstart: thinking (calls)\ncalls: spoken* text\n")
    assert '"city"' in grammar.text
    assert '"now' in grammar.text
    model.chat(tools=[strict], parallel_tool_calls=False)
    assert "calls: spoken | text\n" in model.worker.submits[-1].sampling.grammar.text
    for tools in ([WEATHER], [{**NOW, "function": {"name": "now", "strict": False}}]):
        model.chat(tools=tools)
        assert model.worker.submits[-1].sampling.grammar is None
    model.chat(tools=[strict], tool_choice="none")
    assert model.worker.submits[-1].sampling.grammar is None
    loose = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}
    model.chat(tools=[strict, {"type": "function", "function": loose}])
    assert '"not"' not in model.worker.submits[-1].sampling.grammar.text, "only strict tools may have a schema"


def test_output_format_with_tools_and_reasoning(model):
    form = {"response_format": {"type": "json_object"}}

    def grammar(says, **body):
        model.says(says)
        choice = model.chat(**body)
        return model.worker.submits[-1].sampling.grammar, choice["message"]

    got, message = grammar(THOUGHT + "{}", **form)
    assert got.text.startswith("%llguidance {}\nstart: thinking (body)")
    assert (message["content"], message["reasoning_content"]) == ("{}", "I should look. 🙂")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert grammar("{}", **form, **off)[0].kind == "json_object"
    got, message = grammar(CALL, tools=[WEATHER], **form, **off)
    assert "start: (calls | body)" in got.text
    assert bare(message["tool_calls"]) == [("weather", '{"city": "Köln"}')]
    got, _ = grammar(CALL, tools=[WEATHER], tool_choice="required", **form, **off)
    assert "start: (calls)" in got.text
    own = {"structured_outputs": {"grammar": 'start: "{}"'}}
    got, message = grammar("{}", **own)
    assert got.text == 'start: "{}"'
    assert message == {"role": "assistant", "content": "{}"}
    answer = model.service.post(CHAT, messages=ASK, tools=[WEATHER], **own)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.grammar")
    own = {"guided_grammar": 'start: "{}"'}
    answer = model.service.post(CHAT, messages=ASK, tools=[WEATHER], **own)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_grammar")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"tool_choice": "required"}, "'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "'tools'"),
        ({"tools": [], "response_format": {"type": "json_object"}}, "'response_format'"),
        ({"response_format": {"type": "json_object"}}, "'tools' or 'response_format'"),
    ],
    ids=["required", "named", "format", "both"],
)
def test_a_grammar_that_the_worker_refuses_names_the_fields(model, body, names):
    message = "the schema is no schema"
    model.worker.reject = Rejected(request_id="", reason="bad_request", message=message, param="grammar")
    answer = model.service.post(CHAT, messages=ASK, **{"tools": [WEATHER], **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, f"{names}: {message}")
    assert error["param"] == names.split("'")[1]


def test_a_refused_grammar_without_a_format_of_calls_names_tools(start):
    """The server writes the calls as JSON if it does not know the model's form."""
    service = start(1)
    service.workers[0].reject = Rejected(request_id="", reason="bad_request", message="no", param="grammar")
    answer = service.post(CHAT, messages=ASK, tools=[WEATHER], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


DEEP: dict = {}
for _ in range(70):
    DEEP = {"properties": {"x": DEEP}}
BAD = [
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "no"}}]}, "tools.0.function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools"),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tools": "weather"}, "tools"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 70000}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_unsupported_fields_are_refused(model, body, param):
    answer = model.service.post(CHAT, messages=ASK, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert model.worker.submits == []


NAMED = {"type": "function", "function": {"name": "weather"}}
LISTED = '[{"name": "weather", "parameters": {"city": "K\u00f6ln"}}, {"name": "now", "parameters": {}}]'


def check_required_calls_have_vllms_format(model):
    """A list of calls, or only the arguments; whole and streamed, in every API."""
    tools = {"tools": [WEATHER, NOW]}
    both, one = [("weather", '{"city": "Köln"}'), ("now", "{}")], [("weather", '{"city": "Köln"}')]
    for text, choice, calls, reason in (
        (LISTED, "required", both, "tool_calls"),
        (LISTED[: LISTED.index(', {"name": "now"')] + "]", "required", one, "tool_calls"),
        ('{"city": "Köln"}', NAMED, one, "stop"),
    ):
        model.says(text)
        whole = model.chat(**tools, tool_choice=choice)
        assert bare(whole["message"]["tool_calls"]) == calls
        assert (whole["message"]["content"], whole["finish_reason"]) == (None, reason)
        grammar = model.worker.submits[-1].sampling.grammar
        assert grammar.kind == ("lark" if choice == "required" else "json_schema")
        message, streamed_reason, _ = model.streamed(**tools, tool_choice=choice)
        assert (bare(message["tool_calls"]), message["content"], streamed_reason) == (calls, "", reason)
    flat = {"type": "function", **WEATHER["function"]}
    answer = model.service.post(
        "/v1/responses", input="?", tools=[flat], tool_choice={"type": "function", "name": "weather"}
    )
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", '{"city": "Köln"}')
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    answer = model.service.post(
        "/v1/messages", messages=ASK, max_tokens=90, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
    ).json()
    (block,) = answer["content"]
    assert (block["name"], block["input"], answer["stop_reason"]) == ("weather", {"city": "Köln"}, "tool_use")
    begun = '{"city": "K'
    model.says(begun)
    room = len(model.codec.encode(begun, add_special_tokens=False))
    cut = model.chat(**tools, tool_choice=NAMED, max_tokens=room)
    assert bare(cut["message"]["tool_calls"]) == [("weather", begun)]
    assert cut["finish_reason"] == "length"
    model.service.wait_idle()
    model.worker.reset()


def test_template_without_tools_or_known_format(starter, tool_checkpoint, tool_codec):
    plain = starter(1, model_path=tool_checkpoint, chat_template=tool_checkpoint / "plain.jinja")
    error = plain.post(CHAT, messages=ASK, tools=[WEATHER]).json()["error"]
    assert "takes no tools" in error["message"]
    assert plain.post(CHAT, messages=ASK, tools=[WEATHER], tool_choice="none").status_code == 200
    off = starter(1, model_path=tool_checkpoint, tool_call_parser="none", reasoning_parser="none", **LONG)
    error = off.post(CHAT, messages=ASK, tools=[WEATHER]).json()["error"]
    assert "--tool-call-parser" in error["message"]
    for service in (plain, off):
        check_required_calls_have_vllms_format(Model(service, tool_codec))
    manual = starter(1, model_path=tool_checkpoint, enable_auto_tool_choice=False, **LONG)
    error = manual.post(CHAT, messages=ASK, tools=[WEATHER]).json()["error"]
    assert "--enable-auto-tool-choice" in error["message"]
    assert manual.post(CHAT, messages=ASK, tools=[WEATHER], tool_choice="required").status_code == 200


def test_markers_may_be_special_tokens(starter, tool_checkpoint, tool_codec):
    kimi = starter(1, model_path=tool_checkpoint, chat_template=tool_checkpoint / "kimi.jinja", **LONG)
    model = Model(kimi, tool_codec)
    begin, end = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>", "<|tool_call_end|>"
    model.says(f"So<|user|>.<|tool_calls_section_begin|>{begin}{{}}{end}<|tool_calls_section_end|>")
    choice = model.chat(tools=[NOW])
    assert choice["message"]["content"] == "So.", "other special tokens must stay out of the text"
    (call,) = choice["message"]["tool_calls"]
    assert call == {"id": "functions.now:7", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert model.chat()["message"]["content"] == "So.functions.now:7{}"


def test_separate_arguments_have_their_schemas_types(starter, tool_checkpoint, tool_codec):
    model = Model(starter(1, model_path=tool_checkpoint, tool_call_parser="qwen3_coder", **LONG), tool_codec)
    parameters = {"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, "required": ["path"]}
    tool = {"type": "function", "function": {"name": "edit", "parameters": parameters}}
    model.says(
        "So.\n<tool_call>\n<function=edit>\n<parameter=path>\n12\n</parameter>\n<parameter=line>\n12\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    message = model.chat(tools=[tool])["message"]
    assert message["content"] == "So."
    assert bare(message["tool_calls"]) == [("edit", '{"path": "12", "line": 12}')]
    got, reason, chunks = model.streamed(tools=[tool])
    assert (bare(got["tool_calls"]), reason) == ([("edit", '{"path": "12", "line": 12}')], "tool_calls")
    assert len(chunks) > 2
    model.streamed(tools=[tool], tool_choice="required")
    assert "<parameter=" in model.worker.submits[-1].sampling.grammar.text


def test_parsers_are_configured_or_detected(tool_checkpoint, tool_codec):
    def formats(codec=tool_codec, **options):
        config = RouterConfig(
            model_name="m",
            model_path=tool_checkpoint,
            workers=(WorkerAddress(rank=0, endpoint="tcp://x"),),
            max_model_len=9,
            vocab_size=9,
            **options,
        )
        return formats_of(config, codec)

    assert formats().describe() == "tool calls: hermes, reasoning: qwen3"
    kimi = TextCodec(tool_checkpoint, tool_checkpoint / "kimi.jinja")
    assert formats(kimi).describe() == "tool calls: kimi_k2, reasoning: none"
    plain = TextCodec(tool_checkpoint, tool_checkpoint / "plain.jinja")
    assert formats(plain).describe() == "tool calls: none, reasoning: none"
    assert formats(plain, tool_call_parser="mistral").auto_tools
    assert formats(reasoning_parser="deepseek_r1").reasoning.assumed
    with pytest.raises(ValueError, match="--tool-call-parser"):
        formats(plain, enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="'pythonic' is not one of auto, none, hermes"):
        formats(tool_call_parser="pythonic")


def test_openai_client_calls_a_tool_and_continues(model):
    model.says(THOUGHT + CALL, "It is sunny in Köln.")
    with openai.OpenAI(base_url=f"{model.service.url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        messages = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "It is sunny in Köln."
        assert second.choices[0].message.tool_calls is None
    assert f"<|assistant|>{CALL}<|eos|>\n<|user|><tool_response>sunny</tool_response>" in model.prompt()


def test_openai_client_streams_a_call(model):
    model.says(THOUGHT + CALL + SECOND)

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{model.service.url}/v1", api_key="none", max_retries=0) as client:
            options = {"model": "tiny", "messages": ASK, "tools": [WEATHER, NOW]}
            async with client.chat.completions.stream(**options) as stream:
                kinds = [event.type async for event in stream]
                return kinds, await stream.get_final_completion()

    kinds, final = asyncio.run(run())
    (choice,) = final.choices
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("weather", '{"city": "Köln"}'),
        ("now", "{}"),
    ]
    assert choice.finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 3
