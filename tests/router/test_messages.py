"""Template input: roles, tool calls, missing content, reasoning and its effort; transformers is the oracle."""

import json

import pytest
from pydantic import ValidationError

from moeyard_router.api.messages import Arguments, template_messages
from moeyard_router.api.schema import ChatRequest
from moeyard_router.api.thinking import template_variables
from moeyard_router.errors import ApiError
from moeyard_router.text.chat import ChatTemplate

# Three styles of published templates. One prints objects as JSON and treats content as "" unless it is a string.
OBJECTS = """{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'tool' %}<tool {{ m.tool_call_id }}>{{ content }}</tool>
{%- else %}<{{ m.role }}>{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- content }}
{%- for call in m.tool_calls %}<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments
    if call.function.arguments is string else call.function.arguments | tojson }}}</call>{% endfor %}</{{ m.role }}>
{%- endif %}{% endfor %}"""
# DeepSeek-V3's style concatenates the text of messages, and distinguishes null content from empty content.
TEXTS = """{% for m in messages %}{% if m['role'] == 'tool' %}{{ '<out>' + m['content'] }}{% elif m['tool_calls'] %}
{%- for call in m['tool_calls'] %}{% if m['content'] is none %}<call>{% else %}{{ m['content'] + '<also>' }}{% endif %}
{{- call['function']['name'] + '(' + call['function']['arguments'] + ')' }}{% endfor %}
{%- else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"""
# The third style iterates over arguments.
ITEMS = """{% for m in messages %}{% if m.role == 'tool' %}<out>{{ m.content }}{% elif m.tool_calls %}
{%- for call in m.tool_calls %}{% for key, value in call.function.arguments.items() %}<{{ key }}>{{ value | tojson }}
{%- endfor %}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
ARGUMENTS = {"city": "Zürich", "days": 2, "units": None}


def call(arguments, **more):
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


def conversation(arguments, content=None):
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
    ]


TURN = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
# Styles of system messages. Qwen3.5's template raises if one is not the first message.
RAISES = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}
{%- endif %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
# Mixtral's template drops all but the first.
OMITS = """{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
# DeepSeek-R1's template shows the last one before all other messages.
LAST = """{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}
{%- set ns.system = m.content %}{% endfor %}{{ ns.system }}
{%- for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}{% endfor %}"""
# Others allow several before the first turn.
LEADING = """{% set ns = namespace(turn=false) %}{% for m in messages %}{% if m.role == 'system' and ns.turn %}
{{- raise_exception('in front!') }}{% endif %}{% set ns.turn = m.role != 'system' %}
{{- m.role }}: {{ m.content }}{% endfor %}"""
# Others allow them anywhere, or allow one developer message after the system message.
ANY = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
DEVELOPER = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first or m.role == 'developer' and loop.index > 2 %}
{{- raise_exception('in front!') }}{% endif %}{{ m.role }}: {{ m.content }}{% endfor %}"""
# The last one allows none.
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system!') }}{% endif %}
{{- m.content }}{% endfor %}"""
A, B, C = ({"role": "system", "content": text} for text in "ABC")
DEV = {"role": "developer", "content": "B"}
AB, ABC = {"role": "system", "content": "A\n\nB"}, {"role": "system", "content": "A\n\nB\n\nC"}


@pytest.mark.parametrize(
    ("source", "asked", "shown"),
    [
        (RAISES, [A, *TURN], [A, *TURN]),
        (RAISES, [A, B, *TURN], [AB, *TURN]),
        (RAISES, [A, DEV, *TURN], [AB, *TURN]),
        (RAISES, [DEV, *TURN], [B, *TURN]),
        (RAISES, [A, *TURN, DEV, TURN[0], C], [ABC, *TURN, TURN[0]]),
        (RAISES, [*TURN, A, TURN[0]], [A, *TURN, TURN[0]]),
        (OMITS, [A, *TURN, B, TURN[0]], [AB, *TURN, TURN[0]]),
        (OMITS, [*TURN, A, TURN[0]], [A, *TURN, TURN[0]]),
        (LAST, [A, *TURN, B, TURN[0]], [AB, *TURN, TURN[0]]),
        (LEADING, [A, B, *TURN], [A, B, *TURN]),
        (LEADING, [A, B, *TURN, C, TURN[0]], [ABC, *TURN, TURN[0]]),
        (ANY, [A, *TURN, B, TURN[0], C], [A, *TURN, B, TURN[0], C]),
        (ANY, [A, DEV, *TURN], [A, B, *TURN]),
        (DEVELOPER, [A, DEV, *TURN], [A, DEV, *TURN]),
        (DEVELOPER, [A, *TURN, DEV, TURN[0]], [AB, *TURN, TURN[0]]),
        (DEVELOPER, [A, B, *TURN], [AB, *TURN]),
        (NO_SYSTEM, [A, B, *TURN], [A, B, *TURN]),
    ],
)
def test_system_messages_merge_for_templates_that_allow_one(source, asked, shown):
    template = ChatTemplate(source, {})
    assert given(asked, template)[0] == shown
    if source != NO_SYSTEM:
        text = render(asked, source)
        assert sorted(set("ABC") & set(text)) == sorted({m["content"] for m in asked} & set("ABC"))


def test_continued_system_message_stays_last():
    asked = ChatRequest.model_validate({"messages": [A, *TURN, B]}).messages
    messages, _ = template_messages(asked, ChatTemplate(OMITS, {}).traits, continued=True)
    assert messages == [A, *TURN, B]


PARTS = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}?{% endif %}{% endfor %}
{%- endif %}{% endfor %}"""
PARTS_ALONE = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
USERS_PARTS = """{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}
{{- m.content | map(attribute='text') | join('+') }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
PRINTED = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PARTS, "<system>ab<user>cd<assistant>e<user>f"),
        (PARTS_ALONE, "<system>ab<user>cd<assistant>e<user>f"),
        (USERS_PARTS, "<system>a\nb<user>c+d<assistant>e<user>f"),
        (PRINTED, '<system>"a\\nb"<user>"c\\nd"<assistant>"e"<user>"f"'),
        (ANY, "system: a\nbuser: c\ndassistant: euser: f"),
    ],
    ids=["parts", "parts alone", "parts of users", "printed", "texts"],
)
def test_template_that_iterates_over_parts_gets_parts(source, text):
    """As in transformers and vLLM; other templates get the texts joined by a newline, as in vLLM."""
    parts = [{"type": "text", "text": text} for text in "abcd"]
    messages = [
        {"role": "system", "content": parts[:2]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, "d"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "e"}]},
        {"role": "user", "content": "f"},
    ]
    assert render(messages, source) == text


def given(messages, template):
    request = ChatRequest.model_validate({"messages": messages})
    return template_messages(request.messages, template.traits)


def render(messages, source):
    template = ChatTemplate(source, {})
    return template.render(
        given(messages, template)[0], add_generation_prompt=False, continue_final_message=False, variables={}
    )


def oracle(messages, source):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source)
    return rendered[0]


@pytest.mark.parametrize("content", [None, "", "I look."])
@pytest.mark.parametrize(
    ("source", "form"),
    [(OBJECTS, lambda a: a), (ITEMS, lambda a: a), (TEXTS, lambda a: json.dumps(a, ensure_ascii=False))],
    ids=["objects", "items", "texts"],
)
def test_calls_of_tools_render_as_in_transformers(source, form, content):
    """OpenAI's messages have arguments as text; transformers gets the type that each template was written for."""
    mine = render(conversation(json.dumps(ARGUMENTS, ensure_ascii=False), content), source)
    assert mine == oracle(conversation(form(ARGUMENTS), content), source)
    assert "Zürich" in mine
    assert "Sun." in mine
    assert render(conversation(ARGUMENTS, content), source) == mine


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), (None, "{}"), ('{"a": 1', '{"a": 1'), ("[1]", "[1]"), ('{"a" :1}', '{"a": 1}')]
)
def test_arguments_that_are_not_an_object_keep_their_text(arguments, shown):
    assert f'"arguments": {shown}}}</call>' in render(conversation(arguments), OBJECTS)


ITEMS_FILTER = ITEMS.replace("call.function.arguments.items()", "call.function.arguments | items")
MAPPINGS = """{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}
{%- if call.function.arguments is mapping %}{% for key in call.function.arguments %}
{{- '<' + key + '>' }}{{ call.function.arguments[key] | tojson }}{% endfor %}{% endif %}
{%- endfor %}{% endfor %}"""


@pytest.mark.parametrize("source", [ITEMS, ITEMS_FILTER, MAPPINGS], ids=["items()", "items", "mapping"])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Ber', '<city>"Ber"'),
        ('{"city": "Bern", "da', '<city>"Bern"'),
        ('{"a": [1, {"b": "x', '<a>[1, {"b": "x"}]'),
        ('{"a": 1, "b": tr', "<a>1"),
        ('{"code": "one\ntwo', '<code>"one\\ntwo"'),
        ('{\n "code": "one\ntwo"\n}', '<code>"one\\ntwo"'),
        ('{"n": 123456789012345678901', "<n>123456789012345678901"),
        ("{", ""),
        ("null", ""),
        ("[1]", '<INVALID_JSON>"[1]"'),
        ('"text"', '<INVALID_JSON>"\\"text\\""'),
        ("no JSON", '<INVALID_JSON>"no JSON"'),
        ('{"a": oops}', '<INVALID_JSON>"{\\"a\\": oops}"'),
        ("[" * 5000, f'<INVALID_JSON>"{"[" * 5000}"'),
    ],
)
def test_template_that_iterates_over_arguments_gets_an_object(source, arguments, shown):
    assert render(conversation(arguments)[:2], source) == "Weather?" + shown


def test_arguments_are_both_object_and_text():
    arguments = Arguments({"a": 1}, '{"a" : 1}')
    assert arguments == {"a": 1}
    assert str(arguments) == '{"a" : 1}'
    assert "<" + arguments + ">" == '<{"a" : 1}>'


def test_deeply_nested_arguments_are_refused():
    deep = {}
    for _ in range(63):
        deep = {"a": deep}
    ChatRequest.model_validate({"messages": conversation(deep)})
    deep = {"a": deep}
    with pytest.raises(ValidationError, match="nested deeper than 64 levels"):
        ChatRequest.model_validate({"messages": conversation(deep)})


def test_extra_fields_of_calls_are_named():
    messages = conversation("{}")
    messages[1]["tool_calls"] = [call("{}", index=0, provider_specific_fields=None, extra_content={"a": 1})]
    messages[1]["tool_calls"][0]["function"]["parsed_arguments"] = {"a": 1}
    messages[1]["parsed"] = {"name": "x"}
    ignored = given(messages, ChatTemplate(OBJECTS, {}))[1]
    assert ignored == (
        "messages.parsed",
        "messages.tool_calls.index",
        "messages.tool_calls.extra_content",
        "messages.tool_calls.function.parsed_arguments",
    )


@pytest.mark.parametrize(
    ("source", "where"),
    [("{{ messages }}", "messages.1.tool_calls"), ("{{ messages[1].tool_calls }}", "messages.2.role")],
)
def test_tools_that_the_template_drops_are_refused(source, where):
    with pytest.raises(ApiError, match=where) as caught:
        given(conversation("{}"), ChatTemplate(source, {}))
    assert (caught.value.status, caught.value.param) == (400, where)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_a_template_that_uses_it(name):
    messages = [{"role": "assistant", "content": "4", name: "2 and 2"}]
    template = ChatTemplate(OBJECTS, {})
    assert given(messages, template)[1] == ()
    assert render(messages, OBJECTS) == "<assistant><think>2 and 2</think>4</assistant>"
    assert render(messages, TEXTS) == "<assistant>4"
    assert given(messages, ChatTemplate(TEXTS, {}))[1] == (f"messages.{name}",)


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}", "developer"),
        ("{% if messages[0]['role'] in ['system', 'developer'] %}{{ messages[0].role }}{% endif %}", "developer"),
    ],
)
def test_developer_message(source, role):
    assert render([{"role": "developer", "content": "Be kind."}], source) == role


EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
)
BOTH = "{{ enable_thinking | default(true) }} " + EFFORT
SWITCH = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"


@pytest.mark.parametrize(
    ("source", "body", "text", "unused"),
    [
        (EFFORT, {}, "medium", ()),
        (EFFORT, {"enable_thinking": True}, "medium", ()),
        (EFFORT, {"thinking": {"type": "disabled"}}, "none", ()),
        (EFFORT, {"thinking": {"type": "adaptive"}}, "medium", ()),
        (EFFORT, {"think": "low"}, "low", ()),
        (EFFORT, {"reasoning": {"effort": "low"}}, "low", ()),
        (EFFORT, {"reasoning": {"effort": "low", "enabled": False}}, "none", ()),
        (EFFORT, {"reasoning": {"effort": "none", "enabled": True}}, "medium", ()),
        (BOTH, {"enable_thinking": False}, "False medium", ()),
        (BOTH, {"think": True, "reasoning_effort": "high"}, "True high", ()),
        (BOTH, {"think": False, "reasoning_effort": "high"}, "False none", ()),
        (BOTH, {"thinking": {"type": "auto"}}, "True medium", ()),
        (BOTH, {"chat_template_args": {"enable_thinking": 3}, "enable_thinking": False}, "3 medium", ()),
        ("{{ thinking }}", {"reasoning": {"enabled": True}}, "True", ()),
        ("{{ clear_thinking }}", {"thinking": {"type": "auto", "clear_thinking": False}}, "False", ()),
        (
            "plain",
            {"enable_thinking": False, "reasoning": {"effort": "low"}},
            "plain",
            ("enable_thinking", "reasoning.effort"),
        ),
        (
            "plain",
            {"thinking": {"type": "enabled", "clear_thinking": True}},
            "plain",
            ("thinking", "thinking.clear_thinking"),
        ),
        (EFFORT, {"reasoning_effort": "high"}, "high", ()),
        (EFFORT, {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low", ()),
        (SWITCH, {}, "False", ()),
        (SWITCH, {"reasoning_effort": "high"}, "True", ()),
        (SWITCH, {"reasoning_effort": "none"}, "False", ()),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False", ()),
        ("{{ enable_thinking }}", {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 3}}, "3", ()),
        ("plain", {"reasoning_effort": "high"}, "plain", ("reasoning_effort",)),
    ],
)
def test_thinking_switches_become_template_variables(source, body, text, unused):
    template = ChatTemplate(source, {})
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **body})
    variables, ignored = template_variables(request, template.traits)
    assert ignored == unused
    messages = [{"role": "user", "content": "a"}]
    options = {"add_generation_prompt": True, "continue_final_message": False}
    assert template.render(messages, **options, variables=variables) == text
