"""DeepSeek-V4 without a chat template: prompts and parsed answers are those of the authors' package deepseek-recipe."""

import asyncio
import json

import pytest
from deepseek_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversionOptions,
    DeepseekV4Encoding,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.tool_model import ASK, LONG, NOW, WEATHER, Model

from moeyard_router.api.intake import Intake
from moeyard_router.api.schema import ChatRequest
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.text.answer_formats import answer_formats
from moeyard_router.text.chat import TextCodec
from moeyard_router.text.events import CallArguments, CallBegin, Content, Reasoning, joined
from moeyard_router.text.extraction import Extraction, Extractor

TOOLS = [{"type": "function", "function": {**WEATHER["function"], "strict": None}}, NOW]
END = "<｜end▁of▁sentence｜>"
OFF, ON = {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}}


@pytest.fixture(scope="module")
def v4(checkpoint, tmp_path_factory):
    """A checkpoint of the release 0731 without its encoder."""
    directory = tmp_path_factory.mktemp("v4")
    (directory / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "dspark_block_size": 5}))
    return directory


def intake_of(directory):
    config = RouterConfig(
        model_name="v4",
        model_path=directory,
        workers=(WorkerAddress(rank=0, endpoint="ipc://unused"),),
        max_model_len=100_000,
        vocab_size=512,
    )
    codec = TextCodec(directory)
    return lambda body: codec.decode(
        asyncio.run(Intake(config, codec).chat(ChatRequest.model_validate(body))).prompts[0].token_ids
    )


@pytest.fixture(scope="module")
def prompt(v4):
    """Return the prompt's text of a request's body."""
    return intake_of(v4)


def converted(body):
    return ChatCompletionRequest({**body, "model": "DeepSeek-V4-Pro"}).convert(ConversionOptions())


def theirs(body):
    return DeepseekV4Encoding().render_conversation(converted(body).conversation).prompt


# The package turns integers above 64 bits into floats and writes 1e-5 as 0.00001. We write what the authors' Python
# encoder does. Duplicate keys and escapes are equal in both.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    (" a\n\nb ", "</think>", '"quoted"', "<｜DSML｜", "{{ x }}", "a</｜DSML｜parameter>", "\\u00e9", "你好🙂")
)
SOME = TEXTS.filter(bool)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(1e-3, 1e20) | st.booleans() | st.none()
VALUES = st.recursive(
    NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SOME, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(SOME, VALUES, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False)) | (
    st.sampled_from(("[1]", '"text"', "null", '{"cut": "of', '{"a": 1, "a": 2}', ' {"a" :[ 1.50 ]} '))
)
CONTENTS = SOME | st.lists(SOME, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)


@st.composite
def turns(draw, *, most_calls=3):
    """Return a conversation that the package converts: every call has its result."""
    messages = [{"role": "system", "content": draw(CONTENTS)} for _ in range(draw(st.integers(0, 2)))]
    for turn in range(draw(st.integers(1, 4))):
        messages += [{"role": "user", "content": draw(CONTENTS)} for _ in range(draw(st.integers(not turn, 2)))]
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(SOME)})
        message = {"role": "assistant", "content": draw(TEXTS | CONTENTS)}
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        count = draw(st.integers(0, most_calls))
        if count:
            message["tool_calls"] = [
                {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": "f", "arguments": draw(ARGUMENTS)}}
                for i in range(count)
            ]
        messages.append(message)
        for i in draw(st.permutations(range(count))):
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}_{i}", "content": draw(CONTENTS)})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(SOME)})
    return messages


PARAMETERS = st.dictionaries(SOME, VALUES, max_size=2).map(lambda more: {"type": "object", "x-more": more})
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(("f", "look-up"))}, optional={"description": TEXTS, "parameters": PARAMETERS}
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(FUNCTIONS, min_size=1, unique_by=lambda function: function["name"]).map(
            lambda functions: [{"type": "function", "function": function} for function in functions]
        ),
        "tool_choice": st.sampled_from(("auto", "none")),
    },
)
EFFORTS = st.sampled_from((None, "minimal", "low", "medium", "high", "xhigh", "max"))


@settings(deadline=None)
@given(messages=turns(), options=OPTIONS, thinking=st.sampled_from((ON, OFF, {})), effort=EFFORTS)
def test_prompts_are_those_of_the_authors(prompt, messages, options, thinking, effort):
    if "tools" not in options:
        options.pop("tool_choice", None)
    body = {"messages": messages, **options, **thinking}
    if effort is not None and thinking != OFF:
        body["reasoning_effort"] = effort
    assert prompt(body) == theirs(body)


@settings(deadline=None, max_examples=30)
@given(messages=turns(most_calls=0), thinking=st.sampled_from((ON, OFF)), reasoning=TEXTS | st.none())
def test_continued_messages_are_those_of_the_authors(prompt, messages, thinking, reasoning):
    last = {"role": "assistant", "content": "So it is"}
    if reasoning is not None:
        last["reasoning_content"] = reasoning
    ours = {"messages": [*messages, last], "continue_final_message": True, "add_generation_prompt": False}
    assert prompt({**thinking, **ours}) == theirs({**thinking, "messages": [*messages, {**last, "prefix": True}]})
    # The package refuses to continue a message if there are tools or calls.
    with_tools = prompt({**thinking, **ours, "tools": TOOLS})
    begun = f"<think>{reasoning or ''}</think>So it is" if thinking == ON else "</think>So it is"
    assert with_tools.endswith(f"<｜Assistant｜>{begun}")


def test_unusual_histories(prompt):
    """The package refuses these. Agents send them after they cut a history."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "big": 10**30}}}
    calls = [{**call, "id": "1"}, {**call, "id": "1"}, call]
    results = [
        {"role": "tool", "tool_call_id": "9", "content": "unknown"},
        {"role": "user", "content": "between"},
        {"role": "tool", "content": "without id"},
        {"role": "tool", "tool_call_id": "1", "content": "known"},
    ]
    messages = [*results[:1], *ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    text = prompt({"messages": messages, **OFF})
    first, _, last = text.rpartition(END)
    assert first.startswith(
        f"<｜begin▁of▁sentence｜><｜User｜><tool_result>unknown</tool_result>\n\n{ASK[0]['content']}<"
    )
    assert first.count('<｜DSML｜parameter name="big" string="false">1000000000000000000000000000000<') == 3
    results = ("known", "unknown", "without id")
    shown = "\n\n".join((*(f"<tool_result>{result}</tool_result>" for result in results), "between"))
    assert last == f"<｜User｜>{shown}<｜Assistant｜></think>"


def test_whole_conversations_and_kept_reasoning(prompt):
    messages = [*ASK, {"role": "assistant", "content": "Kalt.", "reasoning": "Winter."}]
    asked = f"<｜begin▁of▁sentence｜><｜User｜>{ASK[0]['content']}<｜Assistant｜>"
    low = {"reasoning_effort": "low"}
    whole = prompt({"messages": messages, **low, "add_generation_prompt": False})
    assert whole == f"{asked}<think>Winter.</think>Kalt.{END}"
    more = {**low, "messages": [*messages, *ASK]}
    dropped, again = f"{asked}</think>Kalt.{END}", f"{asked.partition('>')[2]}<think>"
    assert prompt(more) == dropped + again
    kept = prompt({**more, "chat_template_kwargs": {"drop_thinking": False}})
    assert kept == whole + again


ABSOLUTE, BEYOND = "Reasoning Effort: Absolute maximum", "Reasoning Effort: Beyond maximum"
EARLY = {None: "", "low": "", "medium": "", "high": "", "xhigh": ABSOLUTE, "max": ABSOLUTE}
LATER = {None: ABSOLUTE, "low": "", "medium": ABSOLUTE, "high": ABSOLUTE, "xhigh": ABSOLUTE, "max": BEYOND}


@pytest.mark.parametrize(
    ("config", "encoder", "expected"),
    [
        ({}, None, EARLY),
        ({"dspark_block_size": 5}, None, LATER),
        ({}, f'PROMPTS = {{"max": "{BEYOND} - x"}}', LATER),
        # DeepSeek-V4-Flash-DSpark has the later drafter beside the model of April.
        ({"dspark_block_size": 5}, f'EFFORT_MAX = "{ABSOLUTE} x"', EARLY),
    ],
    ids=["April", "drafter-of-0731", "encoder-of-0731", "April-with-a-new-drafter"],
)
def test_efforts_are_those_of_the_release(v4, tmp_path, config, encoder, expected):
    (tmp_path / "tokenizer.json").write_bytes((v4 / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **config}))
    if encoder is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(encoder)
    prompt = intake_of(tmp_path)
    for effort, prefix in expected.items():
        text = prompt({"messages": ASK, **({} if effort is None else {"reasoning_effort": effort})})
        assert text.startswith(f"<｜begin▁of▁sentence｜>{prefix or '<｜User｜>'}"), effort
        assert text.endswith("<｜Assistant｜><think>")
        assert text.count("Reasoning Effort") == bool(prefix)
    for off in ({"reasoning_effort": "none"}, OFF, {"chat_template_kwargs": {"thinking": False}}):
        text = prompt({"messages": ASK, **off})
        assert text.startswith("<｜begin▁of▁sentence｜><｜User｜>")
        assert text.endswith("<｜Assistant｜></think>")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "high", "thinking": False}, False),
        ({"thinking": {"type": "adaptive"}}, True),
    ],
)
def test_fields_of_other_servers_switch_thinking(prompt, fields, thinks):
    assert prompt({"messages": ASK, **fields}).endswith("<think>" if thinks else "</think>")


def test_own_templates_come_first(v4, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((v4 / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
    assert intake_of(tmp_path)({"messages": ASK}) == ASK[0]["content"] + "<think>"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert TextCodec(tmp_path).template is None


def test_long_conversations_stay_in_the_router(v4):
    """Rendering raises `Elsewhere` beyond the budget."""
    template = TextCodec(v4).template
    messages = [*ASK, {"role": "assistant", "content": "Kalt."}] * 50
    variables = {"tools": TOOLS}
    template.render(messages, add_generation_prompt=True, continue_final_message=False, variables=variables)


def parsed_by_them(body, answer):
    """Return (reasoning, content, calls) of an answer that arrives one character at a time."""
    request = converted(body)
    generator = ChatCompletionRequest.chunk_generator(request, "id", "model")
    processor = StreamProcessor(generator, request.parsing_options)
    response = ChatCompletionResponse("id", "model", 0, 0, 0)
    chunks = processor.push(InferenceChunk.ready())
    for character in answer:
        chunks += processor.push(InferenceChunk.text(character, 1))
    chunks += processor.push(InferenceChunk.finish(InferenceFinishReason.Stop)) + processor.finish()
    for chunk in chunks:
        response.accumulate(chunk)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        message.get("reasoning_content") or "",
        message["content"] or "",
        [(c["name"], c["arguments"]) for c in calls],
    )


def parsed(codec, pieces, *, thinks):
    formats = answer_formats(codec)
    reasoning = formats.reasoning
    extraction = Extraction(visible=[], reasoning=reasoning, inside=thinks, tools=formats.tools, id_seed="12345")
    extractor = Extractor(extraction, 0)
    events = joined([*(event for piece in pieces for event in extractor.push(piece)), *extractor.finish()])
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        list(zip(names, arguments, strict=True)),
    )


# Texts of an answer without markup, and without the white space that both drop around it, each in its own way.
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>`~\x1c\x1d\x1e\x1f"), max_size=20).map(str.strip)
CALLED = st.dictionaries(
    st.text("ab_1é", min_size=1, max_size=5), NUMBERS | PLAIN | st.lists(NUMBERS | PLAIN, max_size=3), max_size=3
)


@settings(deadline=None)
@given(
    thinks=st.booleans(),
    closes=st.booleans(),
    reasoning=PLAIN,
    content=PLAIN,
    calls=st.lists(st.tuples(st.sampled_from(("f", "look-up")), CALLED), max_size=3),
)
def test_answers_are_parsed_as_by_the_authors(v4_codec, thinks, closes, reasoning, content, calls):
    """The authors' package writes the answer as a message of the history."""
    written = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in written]
    body = {"messages": ASK, "tools": TOOLS, **(ON if thinks else OFF)}
    history = {**body, "messages": [*ASK, {**message, **({"tool_calls": written} if calls else {})}, *results]}
    answer = theirs(history).removeprefix(theirs(body)).partition(END)[0]
    if thinks and not closes and calls and not content:
        answer = answer.replace("</think>", "", 1)  # models do this
    mine = parsed(v4_codec, [answer], thinks=thinks)
    assert mine == parsed(v4_codec, answer, thinks=thinks) == parsed_by_them(body, answer)
    # All calls of a history have arguments: `{}` at least.
    assert [(name, json.loads(arguments)) for name, arguments in mine[2]] == calls


@pytest.fixture(scope="module")
def v4_codec(v4):
    return TextCodec(v4)


def test_formats_are_found(v4_codec):
    assert answer_formats(v4_codec).describe() == "tool calls: deepseek_v4, reasoning: deepseek_v4"


CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Hm.\n\n" + CALL + "</think>\nBye.", ("Hm.", "\nBye.", [("weather", '{"city": "Köln"}')])),
        ("So:\n```\n" + CALL + "\n```\n</think>No.", ("So:\n```\n" + CALL + "\n```", "No.", [])),
        (
            '</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="now"/>\n<｜DSML｜invoke name="now" />\n'
            "</｜DSML｜tool_calls>",
            ("", "", [("now", "{}")] * 2),
        ),
        ('</think><｜DSML｜invoke name="now"/> is a call', ("", '<｜DSML｜invoke name="now"/> is a call', [])),
    ],
    ids=["call-in-the-block", "example-in-the-block", "calls-without-body", "text-about-a-call"],
)
def test_untidy_answers(v4_codec, answer, expected):
    for at in range(len(answer)):
        assert parsed(v4_codec, [answer[:at], answer[at:]], thinks=True) == expected
    assert parsed(v4_codec, answer, thinks=True) == expected


@pytest.fixture(scope="module")
def v4_service(starter, v4):
    return starter(1, model_path=v4, **LONG)


@pytest.fixture
def model(v4_service, v4_codec):
    v4_service.workers[0].reset()
    yield Model(v4_service, v4_codec)
    v4_service.wait_idle()


def test_calls_over_http(model):
    model.says("I look.\n</think>\n\n" + CALL)
    whole = model.chat(tools=TOOLS)
    streamed, reason, _ = model.streamed(tools=TOOLS)
    assert reason == whole["finish_reason"] == "tool_calls"
    for message in (whole["message"], streamed):
        assert (message["reasoning_content"], message["content"] or "") == ("I look.", "")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert model.prompt().endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_are_enforced_by_a_grammar(model, choice):
    model.says(CALL)
    body = {"tools": TOOLS, "tool_choice": choice, "chat_template_kwargs": {"thinking": False}}
    (call,) = model.chat(**body)["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Köln"}'
    grammar = model.worker.submits[-1].sampling.grammar
    assert grammar.kind == "lark"
    assert "<｜DSML｜tool_calls>" in grammar.text
