"""Hostile chat templates fail soon with an error, and other requests continue."""

import asyncio
import gc
import itertools
import json
import random
import shutil
import statistics
import time

import jinja2
import pytest

from moeyard_router.api.intake import formats_of
from moeyard_router.api.large import Bodies
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.text.bounded import UNITS, Elsewhere
from moeyard_router.text.chat import TextCodec
from moeyard_router.text.template import MAX_SOURCE, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<&>"}]
DOUBLED = "{% set x = 'ab' %}" + "{% set x = x + x %}" * 40
HELD = "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 60
# Each template would take more than a day, or more memory than exists.
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "recursive macros": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for m in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 90 }}{% endfor %}",
    "generators": "{% for a in range(99999) | map(attribute='real') %}{% for b in range(99999) | select %}"
    "{% for c in range(99999) | list %}{% endfor %}{% endfor %}{% endfor %}",
    "doubled text": DOUBLED + "{{ x | length }}",
    "doubled by ~": DOUBLED.replace("+", "~") + "{{ x }}",
    "doubled in a loop": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "doubled by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "doubled by set": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "long sums": "{% set x = 'ab' %}" + ("{% set x = " + " + ".join(["x"] * 100) + " %}") * 12,
    "printed lists": HELD + "{{ x }}",
    "joined lists": HELD + "{{ x | join(',') }}",
    "lists as text": HELD + "{{ x | string }}",
    "lists and text": HELD + "{{ 'a' ~ x }}",
    "lists as JSON": HELD + "{{ x | tojson }}",
    "maps as JSON": HELD.replace("[x, x]", "{'a': x, 'b': x}") + "{{ x | tojson }}",
    "compared lists": HELD + HELD.replace("x", "y") + "{{ x == y }}",
    "lists in a list": HELD + HELD.replace("x", "y") + "{{ x in [y] }}",
    "tuples as keys": HELD.replace("[x, x]", "(x, x)").replace("['a']", "'a'") + "{{ {}.get(x) }}",
    "a tuple as an index": HELD.replace("[x, x]", "(x, x)").replace("['a']", "'a'") + "{{ {}[x] }}",
    "a tuple in a map": HELD.replace("[x, x]", "(x, x)").replace("['a']", "'a'") + "{{ {x: 1} }}",
    "a namespace": HELD + "{{ namespace(x=x) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "product": "{{ 'x' * 10 ** 11 }}",
    "list product": "{{ ([1] * 10 ** 11) | length }}",
    "sum of products": "{{ messages[0].content * 10 ** 11 }}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "ljust": "{{ 'x'.ljust(100000000000) }}",
    "zfill": "{{ 'x'.zfill(100000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) * 99 }}",
    "indent": "{{ 'x\ny' | indent(99999999999) }}",
    "JSON indent": "{{ [1] | tojson(indent=99999999999) }}",
    "format": "{{ '{:99999999999}'.format(1) }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "percent": "{{ '%*d' % (99999999999, 1) }}",
    "percent precision": "{{ '%.1999999999f' % 1.5 ~ '%.1999999999f' % 1.5 }}",
    "odd": "{{ '%1999999999d' is odd }}{{ '%1999999999d' is even }}",
    "divisibleby": "{{ '%1999999999d' is divisibleby(3) }}",
    "replace": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x | replace('a', x) %}" * 6,
    "replace nothing": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x.replace('', x) %}" * 6,
    "join": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x.join(x | list) %}" * 6,
    "lipsum": "{{ lipsum(n=99999999) }}",
    "batch": "{{ [1] | batch(99999999999, 0) | list }}",
    "slice": "{{ [1] | slice(99999999999) | list }}",
    "wordwrap": "{{ ('x ' * 50000000) | wordwrap(1) }}",
    "strftime": "{{ strftime_now('%1999999999Y' ~ '%1999999999Y') }}",
    "a filter block": "{% filter center(99999999999) %}x{% endfilter %}",
    "a map of a filter": "{{ ['x'] | map('center', 99999999999) | list }}",
    "blocks": "{% block a %}{% for i in range(99999) %}{{ self.a() }}{% endfor %}{% endblock %}",
    "caller": "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f(1) %}" * 15
    + "x" * 9000
    + "{% for i in range(99999) %}x{% endfor %}"
    + "{% endcall %}" * 15,
}
# Limits of a template's CPU time in units of `unit`. Some templates above fail on their own.
COMPILING, RENDERING = 250, 25


def render(template, messages=MESSAGES, **variables):
    return template.render(messages, add_generation_prompt=True, continue_final_message=False, variables=variables)


@pytest.fixture
def unit():
    """CPU seconds of a legal text of 18,890 characters."""
    template, seconds = ChatTemplate("{% for i in range(5000) %}{{ i }}{% endfor %}", {}), []
    for _ in range(5):
        begun = time.thread_time()
        render(template)
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds)


@pytest.mark.sampled(0)
@pytest.mark.timing
@pytest.mark.parametrize("name", ENDLESS)
def test_streams_do_not_wait_for_a_template(name, unit):
    """The thread that writes streams refuses a template, or gives up before streams are late."""
    begun = time.thread_time()
    template = ChatTemplate(ENDLESS[name], {})
    compiled = time.thread_time()
    with pytest.raises((Elsewhere, ApiError)):
        render(template)
    ended = time.thread_time()
    assert compiled - begun < COMPILING * unit
    assert ended - compiled < RENDERING * unit


@pytest.fixture(scope="module")
def processes(checkpoint, tmp_path_factory):
    """The intake processes of a router whose template runs the part named by the message."""
    directory = tmp_path_factory.mktemp("hostile")
    parts = (f"{{% if messages[0].content == '{name}' %}}{text}{{% endif %}}" for name, text in IN_A_PROCESS.items())
    served(checkpoint, directory, "".join(parts) + "fine")
    config = RouterConfig(
        model_name="tiny",
        model_path=directory,
        workers=(WorkerAddress(rank=0, endpoint="tcp://h:1"),),
        max_model_len=1000,
        vocab_size=400,
        eos_token_ids=(1,),
        intake_processes=1,
    )
    bodies = Bodies(config, formats_of(config, TextCodec(directory)))
    yield bodies
    bodies.close()


IN_A_PROCESS = {name: ENDLESS[name] for name in ("loops", "product", "printed lists", "power", "format", "replace")}


def ask(processes, content):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    return asyncio.run(processes.job([body], api="chat"))


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_hostile_template_ends_its_process(processes, name):
    """The kernel ends the process if necessary; the next request gets another one."""
    with pytest.raises(ApiError) as caught:
        ask(processes, name)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "chat template" in caught.value.message
    assert len(ask(processes, "else").prompts[0].token_ids) > 0


def test_all_endpoints_use_the_process(start, checkpoint, tmp_path):
    """Over HTTP every endpoint renders a template that the router itself refuses to render."""
    source = "{% for m in messages %}{{ m.content | center(20) }}{% endfor %}"
    service = start(model_path=served(checkpoint, tmp_path, source))
    messages = [{"role": "user", "content": "story"}]
    answers = [
        service.post("/v1/chat/completions", messages=messages, max_tokens=3),
        service.post("/v1/messages", messages=messages, max_tokens=3, model="tiny"),
        service.post("/tokenize", messages=messages),
        service.post("/v1/messages/count_tokens", messages=messages, model="tiny"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4
    count = len(TextCodec(checkpoint).encode("story".center(20), add_special_tokens=False))
    assert answers[0].json()["usage"]["prompt_tokens"] == count
    usage = answers[1].json()["usage"]
    assert usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) == count
    assert answers[2].json()["count"] == answers[3].json()["input_tokens"] == count


def served(checkpoint, directory, source):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, directory)
    (directory / "chat_template.jinja").write_text(source)
    return directory


QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' }}
            {{- reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MACROS = """{% macro kind(p, depth) %}{% if p.type == 'object' %}{ {%- for k, v in p.properties | items %}{{ k }}: {{
kind(v, depth + 1) }}{{ ', ' if not loop.last }}{% endfor %} }{% else %}{{ p.type | default('any') | upper }}{% endif %}
{%- endmacro %}{% for t in tools %}{{ t.function.name }}({{ kind(t.function.parameters, 0) }})
{% endfor %}{% set roles = messages | map(attribute='role') | list %}{{ roles | join('/') }}{{ roles | first }}
{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content | replace('a', 'bb') | trim }}{{
loop.index0 % 2 == 0 }}{% endfor %}{% set block %}{{ messages | length }} of {{ [1, 'b', none] }}{% endset %}
{{- block }}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"type": "object", "properties": {"c": {}}}},
            },
        },
    }
]


@pytest.mark.parametrize("source", [QWEN, MACROS], ids=["qwen", "macros"])
def test_published_template_renders_as_in_jinja(source):
    """The text equals plain jinja's, and the budget allows conversations that fill a small body."""
    messages = [{"role": "system", "content": "Be <b>kind</b>."}]
    for i in range(40):
        messages.append({"role": "user", "content": f"banana {i} " * 60})
        messages.append({"role": "assistant", "content": f"<think>\nhm {i}\n</think>\n\nanswer"})
    template = ChatTemplate(source, {})
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    for tools in (None, TOOLS) if source == QWEN else (TOOLS,):
        expected = plain.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)
        assert render(template, messages, tools=tools) == expected
        assert template._bounded.left > UNITS // 3


WORDS = (
    "x",
    "y",
    "'a'",
    "1",
    "[x, y]",
    "{'k': x}",
    "x + y",
    "x ~ y",
    "x == y",
    "x[1:]",
    "x | length",
    "x | upper",
    "x | list",
    "x.split('a')",
    "x | tojson",
    "x | join('-')",
    "x in y",
    "x or y",
    "(x, y)",
    "x | first",
    "x | replace('a', 'bb')",
    "messages",
    "messages[0].content",
    "x | string",
    "loop",
    "x.items()",
    "x % 3",
)


@pytest.mark.timing
def test_random_templates(unit):
    """Small templates render or fail as in plain jinja, or are given up; none takes long."""
    chance = random.Random(1)
    plain = jinja2.Environment()
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    rendered = 0
    for _ in range(400):
        lines = ["{% set x = 'ab' %}{% set y = ['a', 'b'] %}"]
        for _ in range(chance.randint(1, 8)):
            a, b = chance.choice(WORDS), chance.choice(WORDS)
            lines.append(
                chance.choice(
                    [
                        f"{{% set x = {a} %}}",
                        f"{{% set y = {a} %}}",
                        f"{{{{ {a} }}}}",
                        f"{{% for x in {a} %}}{{{{ {b} }}}}{{% endfor %}}",
                        f"{{% if {a} %}}{{{{ {b} }}}}{{% endif %}}",
                    ]
                )
            )
        source = "".join(lines)
        theirs = outcome(plain_render, plain, source)
        begun = time.thread_time()
        mine = outcome(bounded_render, source)
        assert time.thread_time() - begun < (COMPILING + RENDERING) * unit
        assert mine in (theirs, Elsewhere), source
        rendered += isinstance(mine, str)
    assert rendered > 100


def plain_render(plain, source):
    return plain.from_string(source).render(messages=[dict(m) for m in MESSAGES])


def bounded_render(source):
    return render(ChatTemplate(source, {}))


def outcome(function, *args):
    try:
        return function(*args)
    except Elsewhere:
        return Elsewhere
    except (ApiError, ValueError, TypeError, jinja2.TemplateError, AttributeError, LookupError, ArithmeticError):
        return None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x" * (MAX_SOURCE + 1), "at most"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "too deeply nested"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "too deeply nested"),
        ("{{ " + "-" * 5000 + "1 }}", "too deeply nested"),
        ("{% if %}", "line 1"),
    ],
    ids=["long", "parentheses", "loops", "signs", "syntax"],
)
def test_templates_that_cannot_be_compiled(source, said):
    with pytest.raises(ValueError, match=said):
        ChatTemplate(source, {})


def test_template_error_text_is_truncated():
    with pytest.raises(ApiError) as caught:
        render(ChatTemplate("{{ raise_exception('x' ~ messages[0].content) }}", {}), [{"content": "y" * 9000}])
    assert 400 < len(caught.value.message) < 700


def test_budget_covers_one_rendering():
    template = ChatTemplate("{% for i in range(5000) %}{{ i }}{% endfor %}", {})
    for _ in itertools.repeat(None, 30):
        assert len(render(template)) == 18890
    gc.collect()
