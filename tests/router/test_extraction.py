"""Reasoning and tool calls in an answer's text, for each format; the split into pieces does not change the result."""

import dataclasses
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeyard_router.text.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, held_back, joined
from moeyard_router.text.extraction import Extraction, Extractor
from moeyard_router.text.reasoning import REASONING_FORMATS
from moeyard_router.text.tool_formats import TOOL_FORMATS, reasoning_format_of, tool_format_of

WEATHER = '{"city": "Köln", "days": [1, 2], "why": "a \\"quoted\\" } brace"}'
TWO = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + WEATHER + "\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{WEATHER}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n"
        '<parameter=why>\na "quoted" } brace\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="why" string="true">a "quoted" } brace</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="why" string="true">a "quoted" } brace</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
    "mistral": (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]'),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "why": {"$ref": "#/$defs/Why"},
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "x": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
        "either": {"type": ["integer", "string"]},
        "color": {"enum": ["red", "1"]},
        "level": {"enum": [1, 2]},
    },
    "$defs": {"Why": {"type": "string"}},
}
IDS = {"kimi_k2": ("functions.weather:0", "functions.now:1"), "mistral": ("seed10300", "seed10301")}


def extraction(tools=None, reasoning=None, **options):
    return Extraction(
        visible=[],
        tools=TOOL_FORMATS[tools] if tools else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        id_seed="seed1",
        schemas=dict.fromkeys(("weather", "f"), SCHEMA),
        **options,
    )


def events_of(form, pieces):
    extractor = Extractor(form, 3)
    out = []
    for piece in pieces:
        out += extractor.push(piece)
    return joined(out + extractor.finish())


def call(index, call_id, name, arguments):
    return [CallBegin(index, call_id, name), CallArguments(index, arguments), CallEnd(index)]


def two_calls(name):
    first, second = IDS.get(name, ("call_seed10300", "call_seed10301"))
    return [*call(0, first, "weather", WEATHER), *call(1, second, "now", "{}")]


@pytest.mark.parametrize("name", TWO)
def test_two_calls(name):
    assert events_of(extraction(name), [TWO[name]]) == two_calls(name)
    assert events_of(extraction(name), TWO[name]) == two_calls(name)  # one character at a time
    assert events_of(extraction(name), ["Let me see.\n\n" + TWO[name] + "\n"]) == [
        Content("Let me see."),
        *two_calls(name),
    ]
    assert events_of(extraction(name, one_call=True), [TWO[name]]) == two_calls(name)[:3]
    assert events_of(extraction(name), ["No call here. "]) == [Content("No call here. ")]


@pytest.mark.parametrize("name", TWO)
def test_arguments_stream_before_the_call_ends(name):
    extractor = Extractor(extraction(name), 3)
    place = TWO[name].index("Köln") + 2
    early = extractor.push(TWO[name][:place])
    assert isinstance(early[0], CallBegin)
    assert early[1] == CallArguments(0, '{"city": "Kö')
    assert extractor.push(TWO[name][place : place + 2]) == [CallArguments(0, "ln")]


@pytest.mark.parametrize("name", TWO)
def test_truncated_output_ends_its_call(name):
    text = TWO[name][: TWO[name].index("days")]
    events = events_of(extraction(name), text)
    # A parameter with its own line is uncertain until its name is complete.
    arguments = '{"city": "Köln"' if TOOL_FORMATS[name].parameters else WEATHER[: WEATHER.index("days")]
    assert events[1:] == [CallArguments(0, arguments), CallEnd(0)]
    head = TWO[name][: TWO[name].index("weather") + 3]
    assert events_of(extraction(name), head) == [Content(head)]


MALFORMED = [
    ("hermes", "Write <tool_call> around it", None),
    ("hermes", '<tool_call>{"nom": "f"}</tool_call> hm', None),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>', None),
    ("hermes", "<tool_call>" + " " * 3000 + "no object", None),
    ("hermes", '<tool_call>{"name": "' + "x" * 3000, None),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>and then?", None),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f g<｜tool▁call▁end｜>.", None),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|> <|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        None,
    ),
    ("kimi_k2", "<|tool_calls_section_begin|>" + " " * 3000 + "x", None),
    ("qwen3_coder", "Write <tool_call> around it", None),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', None),
    ("qwen3_coder", "<function=f> is how it begins, </function> how it ends", None),
    ("qwen3_coder", "<tool_call>\n<function=" + "x" * 3000 + ">\n</function>", None),
    ("deepseek_v32", "<｜DSML｜function_calls>\nand then?", None),
    ("deepseek_v32", '<｜DSML｜invoke name="f">what</｜DSML｜invoke>', None),
    ("deepseek_v4", "<｜DSML｜tool_calls>\nand then?", None),
    ("deepseek_v4", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f" />\n</｜DSML｜function_calls>', None),
    ("mistral", "[TOOL_CALLS] none", None),
    ("mistral", '[TOOL_CALLS] [{"nom": 3}] x', None),
]


@pytest.mark.parametrize(("name", "text", "_"), MALFORMED, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(MALFORMED)])
def test_text_similar_to_a_call_is_content(name, text, _):
    assert events_of(extraction(name), [text]) == [Content(text)]
    assert events_of(extraction(name), text) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}', []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>done', '{"a": 1}', [Content("done")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>done', '{"a": [1', [Content("done")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            '{"a": "</tool_call>"}',
            [],
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": "' + "y" * 2000 + '"}, "name": "f"}</tool_call>\n\nand more',
            '{"a": "' + "y" * 2000 + '"}',
            [Content("\n\nand more")],
        ),
        ("mistral", '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', '{"a": 1}', []),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "{}", []),
        *(
            ("qwen3_coder", f"<tool_call>\n<function=f>\n{written}\n</function>\n</tool_call>{behind}", arguments, rest)
            for written, arguments, behind, rest in (
                ("<parameter=n>\n 42 \n</parameter>", '{"n": 42}', "", []),
                ("<parameter=n>\nmany\n</parameter>", '{"n": "many"}', "", []),
                ("<parameter=on>\nTrue\n</parameter>", '{"on": true}', "\n\nand more", [Content("\n\nand more")]),
                ("<parameter=x>\nnull\n</parameter>", '{"x": null}', "", []),
                ("<parameter=x>\nNone\n</parameter>", '{"x": "None"}', "", []),
                ("<parameter=x>\nnullable\n</parameter>", '{"x": "nullable"}', "", []),
                ("<parameter=city>\n\n\n</parameter>", '{"city": "\\n"}', "", []),
                ("<parameter=city></parameter>", '{"city": ""}', "", []),
                ("<parameter=city>\nnull\n</parameter>", '{"city": "null"}', "", []),
                ("<parameter=city>\n12\n</parameter>", '{"city": "12"}', "", []),
                ("<parameter=city>\nif a<b: c\n</parameter>", '{"city": "if a<b: c"}', "", []),
                ("<parameter=city>\na <parameter=b> c\n</parameter>", '{"city": "a <parameter=b> c"}', "", []),
                ("<parameter=either>\n12\n</parameter>", '{"either": 12}', "", []),
                ("<parameter=either>\n[1]\n</parameter>", '{"either": "[1]"}', "", []),
                ("<parameter=color>\n1\n</parameter>", '{"color": "1"}', "", []),
                ("<parameter=level>\n1\n</parameter>", '{"level": 1}', "", []),
                ("<parameter=any>\n{'a': 1}\n</parameter>", '{"any": "{\'a\': 1}"}', "", []),
                ('<parameter=any>\n{"a": 1}\n</parameter>', '{"any": {"a": 1}}', "", []),
                ("<parameter=days>\n[\n  1\n]\n</parameter>", '{"days": [\n  1\n]}', "", []),
                ('<parameter=days>\n["a\nb"]\n</parameter>', '{"days": ["a\\nb"]}', "", []),
                ('<parameter=days>\n["\\ud83d\n"]\n</parameter>', '{"days": ["\\ud83d\\n"]}', "", []),
                ("<parameter=days>\n[\n1e999]\n</parameter>", '{"days": [\n1e999]}', "", []),
                ("<parameter=days>\n[NaN]\n</parameter>", '{"days": "[NaN]"}', "", []),
                ("<parameter=other>\nx\n</parameter>", '{"other": "x"}', "", []),
                # Missing and misplaced parts.
                ("<parameter=city>\nKöln", '{"city": "Köln"}', "", []),
                (
                    "<parameter=n>\n1\n</parameter> and <parameter>\n<parameter=city>\nb\n</parameter>",
                    '{"n": "1\\n</parameter> and <parameter>\\n<parameter=city>\\nb"}',
                    "",
                    [],
                ),
                ('{"n": 1, "city": "b"}', '{"n": 1, "city": "b"}', "", []),
            )
        ),
        ("qwen3_coder", "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", '{"n": 1}', []),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>\nSo.",
            '{"n": 1}',
            [Content("\nSo.")],
        ),
        ("qwen3_coder", "<function=f>\n</function>\nSo.", "{}", [Content("\nSo.")]),
        *(
            (name, f'<｜DSML｜invoke name="f">\n{written}\n</｜DSML｜invoke>', arguments, [])
            for name in ("deepseek_v32", "deepseek_v4")
            for written, arguments in (
                ('<｜DSML｜parameter name="n" string="true">1</｜DSML｜parameter>', '{"n": "1"}'),
                ('<｜DSML｜parameter name="n">1</｜DSML｜parameter>', '{"n": 1}'),
                ('<｜DSML｜parameter name="n" string="false">{"a": </｜DSML｜parameter>', '{"n": "{\\"a\\": "}'),
                ('<｜DSML｜parameter name="x" string="true"> a </b> \n</｜DSML｜parameter>', '{"x": " a </b> \\n"}'),
                ('<｜DSML｜parameter name="x" string="true">cut', '{"x": "cut\\n"}'),
                ('{"n": {"a": [1]}}', '{"n": {"a": [1]}}'),
            )
        ),
        ("deepseek_v3", TWO["deepseek_v31"][:20] + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x", "{}", [Content("x")]),
    ],
)
def test_variants_of_calls(name, text, arguments, rest):
    expected = [*call(0, "call_seed10300" if name != "mistral" else "seed10300", "f", arguments), *rest]
    assert events_of(extraction(name), [text]) == expected
    assert events_of(extraction(name), text) == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nWell.\n</think>\n\nYes.\n", False, [Reasoning("Well."), Content("Yes.\n")]),
        ("Well.\n\nSo <b>.\n</think>\nYes.", True, [Reasoning("Well.\n\nSo <b>."), Content("Yes.")]),
        ("<think>\nWell.</think>", True, [Reasoning("Well.")]),
        ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
        ("\n<think>cut off\n", False, [Reasoning("cut off")]),
        ("cut </thin", True, [Reasoning("cut </thin")]),
        (" Say <think> now </think>.", False, [Content(" Say <think> now </think>.")]),
        ("<thi", False, [Content("<thi")]),
        (" " * 100 + "<think>", False, [Content(" " * 100 + "<think>")]),
    ],
)
def test_reasoning(text, inside, expected):
    form = extraction(reasoning="qwen3", inside=inside)
    assert events_of(form, [text]) == events_of(form, text) == expected


def test_hidden_reasoning_before_calls():
    text = "<think>I call <tool_call>.</think>\n\n" + TWO["hermes"]
    assert events_of(extraction("hermes", "qwen3"), text) == [
        Reasoning("I call <tool_call>."),
        *two_calls("hermes"),
    ]
    assert events_of(extraction("hermes", "qwen3", hide_reasoning=True), text) == two_calls("hermes")
    implicit = "<think>Now:\n" + TWO["kimi_k2"]
    assert events_of(extraction("kimi_k2", "kimi_k2"), implicit) == [Reasoning("Now:"), *two_calls("kimi_k2")]


def test_call_inside_an_open_reasoning_block():
    """Qwen3.5 may call a tool in an open block; with a grammar of calls this is reasoning, as the grammar has it."""
    text = "I look it up.\n\n" + TWO["qwen3_coder"]
    form = extraction("qwen3_coder", "qwen3", inside=True, calls_end_reasoning=True)
    assert (
        events_of(form, text)
        == events_of(form, [text])
        == [
            Reasoning("I look it up."),
            *two_calls("qwen3_coder"),
        ]
    )
    for other in (
        extraction("qwen3_coder", "qwen3", inside=True),
        extraction("hermes", "qwen3", inside=True, calls_end_reasoning=True),
    ):
        assert events_of(other, text) == [Reasoning(text.strip("\n"))]
    thought = "A call is <tool_call>, then a name.</think>Yes"
    assert events_of(form, thought) == [Reasoning("A call is <tool_call>, then a name."), Content("Yes")]


def test_prompt_may_open_or_close_the_block():
    qwen, assumed = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
    assert qwen.inside_after("<|assistant|><think>\n")
    assert assumed.inside_after("<|assistant|>")
    for prompt in ("<|assistant|>", "<|user|>what is <think>?<|assistant|>", "<|assistant|><think>\n\n</think>\n\n"):
        assert not qwen.inside_after(prompt)
    assert not assumed.inside_after("<|assistant|><think>\n\n</think>\n\n")


def test_formats_are_detected_from_the_template():
    for name, text in TWO.items():
        assert tool_format_of(f"{{{{ '{text}' }}}}").name == name
    assert tool_format_of("{{ messages }}") is reasoning_format_of("{{ messages }}") is None
    assert reasoning_format_of("<|im_start|>assistant\n<think>\n").name == "qwen3"
    assert reasoning_format_of("<｜Assistant｜></think>").name == "deepseek_v3"


def shown(value):
    """Return a value between its markers."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written_one_by_one(form, function, arguments):
    """Return a call in a format with argument markers."""
    markup, (before, middle, behind) = form.parameters, form.written
    text = before + function + middle
    for name, value in arguments.items():
        head = markup.written[not isinstance(value, str)]
        text += markup.begin + name + head + shown(value) + markup.pad + markup.end + markup.behind
    return text + behind


PARTS = st.sampled_from(
    [
        *TWO.values(),
        *(m for f in TOOL_FORMATS.values() for m in f.markers),
        "<think>",
        "</think>",
        "\n",
        " ",
        '{"name": "f", "arguments": ',
        '{"a": "x"}',
        "}",
        "]",
        "{",
        '"',
        "\\",
        "<",
        "word",
        "é🙂",
        ",",
        "```json\n",
        "function",
        "functions.f:0",
        "f>",
        'f">',
        "weather>\n",
        'weather">\n',
        "city",
        "<parameter=",
        "</parameter>",
        '<｜DSML｜parameter name="',
        '" string="true">',
        '" string="false">',
        "</｜DSML｜parameter>",
        "days>",
        "null",
        "</",
        "\n```xml\n",
        "\n```\n",
        ', "id": "x"',
        '"parameters": {',
        '"name": "f", ',
        "</function>\n</tool_call>",
        '{"arguments": {}, "name": "g"}',
        "\n" * 70,
        "[",
        ":",
    ]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def bare(text):
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


@given(
    TEXTS,
    st.sampled_from([*TWO, None]),
    st.sampled_from([*REASONING_FORMATS, None]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
@example('<tool_call>{"name": "f", "arguments": "a', "hermes", None, False, False, [5])
@example("Now:\n<tool_call>\n<function=f>\n</function>", "qwen3_coder", "qwen3", True, True, [3])
def test_split_does_not_change_the_result(text, tools, reasoning, inside, ends, sizes):
    form = extraction(tools, reasoning, inside=inside, calls_end_reasoning=ends)
    pieces, place = [], 0
    while place < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[place : place + size])
        place += size
    events = events_of(form, pieces)
    assert events == events_of(form, [text])
    begun = [e.index for e in events if isinstance(e, CallBegin)]
    assert begun == [e.index for e in events if isinstance(e, CallEnd)] == list(range(len(begun)))
    order = [type(e) for e in events]
    assert Reasoning not in order[1:], "reasoning must come first"
    if not begun:  # only the markers of reasoning and the white space next to them disappear
        found = "".join(e.text for e in events)
        assert bare(found) == bare(text)


@given(TEXTS)
def test_plain_text_is_all_content(text):
    for name, form in TOOL_FORMATS.items():
        if not any(opener in text for opener in form.openers):
            assert events_of(extraction(name), text) == joined([Content(text)])


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5))
def test_arguments_keep_their_text(value):
    arguments = json.dumps({"v": value, "w": {"x": value}})
    for form in TOOL_FORMATS.values():
        if form.parameters is not None:
            continue
        before, middle, behind = form.written
        text = before.replace("{index}", "0") + "f" + middle.replace("{index}", "0") + arguments + behind
        text = form.section_begin + form.opening + text + form.section_end
        events = events_of(extraction(form.name), text)
        assert [e.text for e in events if isinstance(e, CallArguments)] == [arguments]
        assert isinstance(events[0], CallBegin)
        assert len(events) == 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text("abc_1", min_size=1), VALUES, max_size=3))
@example({"a": {"</parameter>": None}, "b": "</function>", "c": "<parameter="})
def test_parameters_keep_their_values(arguments):
    """Templates write texts bare and other values as JSON; the schema or the markup decides which one it is."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    schema = {"properties": {k: {"type": kinds.get(type(v), "null")} for k, v in arguments.items()}}
    for name in ("qwen3_coder", "deepseek_v32", "deepseek_v4"):
        form = TOOL_FORMATS[name]
        text = written_one_by_one(form, "f", arguments)
        asked = dataclasses.replace(extraction(name), schemas={"f": schema})
        events = events_of(asked, [form.section_begin + form.opening + text + form.section_end])
        assert [type(e) for e in events] == [CallBegin, CallArguments, CallEnd]
        assert json.loads(events[1].text) == arguments


def test_only_possible_markers_are_held_back():
    assert held_back("a <tool", ["<tool_call>", "<think>"]) == 5
    assert held_back("a <t", ["<tool_call>", "<think>"]) == 2
    assert held_back("<tool_call>", ["<tool_call>"]) == 0
    assert held_back("", ["<tool_call>"]) == 0
