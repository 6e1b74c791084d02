"""Malformed calls that models really write, for every parser: no text is lost for any split or truncation."""

import ast
import json

import pytest

from moeyard_router.text.events import CallArguments, CallBegin, Content, Reasoning, joined
from moeyard_router.text.extraction import Extraction, Extractor
from moeyard_router.text.reasoning import REASONING_FORMATS
from moeyard_router.text.tool_formats import TOOL_FORMATS

TEXT = {"type": "string"}
SCHEMAS = {
    "save": {"type": "object", "properties": {"path": TEXT, "body": TEXT, "n": {"type": "integer"}}},
    "look": {"type": "object", "properties": {"city": TEXT}},
    "now": {"type": "object", "properties": {}},
}
WORDS = ("save", "look", "now", "Bern", "Rome", "a.txt", "before", "between", "behind", "quoted")


def said(tools, pieces, reasoning=None):
    """Return (content, reasoning, [(name, arguments)]) of an output."""
    extractor = Extractor(
        Extraction(
            visible=[],
            tools=TOOL_FORMATS[tools],
            schemas=SCHEMAS,
            id_seed="seed1",
            calls_end_reasoning=True,
            reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
            inside=reasoning is not None,
        ),
        0,
    )
    events = joined([*(event for piece in pieces for event in extractor.push(piece)), *extractor.finish()])
    texts = ["".join(e.text for e in events if isinstance(e, kind)) for kind in (Content, Reasoning)]
    calls = [[e.name, ""] for e in events if isinstance(e, CallBegin)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return *texts, [(name, arguments) for name, arguments in calls]


def written(tools, *calls):
    """Return these calls in the notation of the family's templates."""
    form = TOOL_FORMATS[tools]
    begin, middle, end = form.written
    texts = []
    for i, (name, arguments) in enumerate(calls):
        shown = json.dumps(arguments)
        if form.parameters is not None:
            markup, shown = form.parameters, ""
            for key, value in arguments.items():
                head, bare = markup.written[not isinstance(value, str)], value if isinstance(value, str) else str(value)
                shown += markup.begin + key + head + bare + markup.pad + markup.end + markup.behind
        texts.append(begin + name + middle.replace("{index}", str(i)) + shown + end)
    return form.section_begin + form.opening + form.joint.join(texts) + form.section_end


SAVE = ("save", {"path": "a.txt", "n": 3})
LOOK, ROME, NOW = ("look", {"city": "Bern"}), ("look", {"city": "Rome"}), ("now", {})
FENCED = "before\n```xml\n{}\n```\nbehind"
KIMI = "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
QWEN = "<tool_call>\n<function=save>\n{}</function>\n</tool_call>"
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="save">\n{}</｜DSML｜invoke>\n</｜DSML｜function_calls>'


def parameter(name, value, form="qwen3_coder"):
    markup = TOOL_FORMATS[form].parameters
    return markup.begin + name + markup.written[0] + value + markup.pad + markup.end + markup.behind


# Parser, text, content, calls.
OBJECTS = [
    *(
        ("hermes", f"<tool_call>{text}</tool_call> behind", content, calls)
        for text, content, calls in (
            ('{"name": "save", "parameters": {"path": "a.txt", "n": 3}}', " behind", [SAVE]),
            ('\n{"parameters": {"path": "a.txt", "n": 3}, "name": "save"}\n', " behind", [SAVE]),
            ('{"id": "x", "type": "function", "name": "look", "arguments": {"city": "Bern"}}', " behind", [LOOK]),
            ('{"name": "look", "arguments": {"city": "Bern"}, "id": "x", "why": ["y"]}', " behind", [LOOK]),
            ('{"name": "look", "arguments": {"city": "Bern"}, "id": "x"', " behind", [LOOK]),
            ('{"name": "look", "arguments": {"city": "Bern"}', " behind", [LOOK]),
            ('{"name": "look", "arguments": "{\\"city\\": \\"Bern\\"}", "id": 3}', " behind", [LOOK]),
            (
                '{"name": "look", "arguments": {}, "parameters": {"city": "Bern"}}',
                '"parameters": {"city": "Bern"} behind',
                [("look", {})],
            ),
            ('{"arguments": {}, "name": "look", "parameters": {"city": "Bern"}}', " behind", [LOOK]),
            ('{"name": "look", "arguments": {}, "city": "Bern"}', '"city": "Bern" behind', [("look", {})]),
            (
                '{"type": "function", "name": "look", "arguments": {}, "city": "Bern"}',
                '"city": "Bern" behind',
                [("look", {})],
            ),
            ('{"name": "now"}', " behind", [NOW]),
            ('{"name": "now", "id": "x"}', " behind", [NOW]),
            ('{"name": "now", "arguments": null}', " behind", [NOW]),
            ('{"name": "now", "arguments": ""}', " behind", [NOW]),
            (
                '{"name": "look", "arguments": {"city": "Bern"}}\n{"name": "now", "arguments": {}}',
                " behind",
                [LOOK, NOW],
            ),
            ('{"name": "look", "arguments": {"city": "Bern"}} between', "between behind", [LOOK]),
            (
                '{"name": "look", "arguments": {"city": "Bern </tool_call> quoted"}}',
                " behind",
                [("look", {"city": "Bern </tool_call> quoted"})],
            ),
            ('{"name": "look", "arguments": {"city": "Bern}}', " behind", [("look", '{"city": "Bern}}')]),
        )
    ),
    *(
        ("hermes", f"<tool_call>{text}</tool_call> behind", None, [])
        for text in (
            '{"name": "look", "args": {"city": "Bern"}}',
            '{"name": "look", "city": "Bern"}',
            '{"name": "look", "arguments": ["Bern"]}',
            '{"name": "look", "arguments": }',
            '{"function": {"name": "look", "arguments": {"city": "Bern"}}}',
            "{'name': 'look', 'arguments': {'city': 'Bern'}}",
            "look(city='Bern')",
        )
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"path": "a.txt}, "name": "save"}</tool_call> between ' + written("hermes", LOOK),
        '<tool_call>{"arguments": {"path": "a.txt}, "name": "save"}</tool_call> between',
        [LOOK],
    ),
    *(
        ("mistral", f"[TOOL_CALLS][{text}] behind", content, calls)
        for text, content, calls in (
            ('{"name": "look", "arguments": {"city": "Bern"}, "id": "a1B2c3D4e"}', " behind", [LOOK]),
            (
                '{"name": "look", "arguments": {"city": "Bern"}, "id": "a"}, '
                '{"name": "look", "arguments": {"city": "Rome"}, "id": "b"}',
                " behind",
                [LOOK, ROME],
            ),
            ('{"id": "a", "name": "look", "arguments": {"city": "Bern"}}, {"name": "now"}', " behind", [LOOK, NOW]),
            ('{"name": "save", "parameters": {"path": "a.txt", "n": 3}}', " behind", [SAVE]),
            (
                '{"name": "look", "arguments": {}, "city": "Bern"}, {"name": "now", "arguments": {}}',
                '"city": "Bern" behind',
                [("look", {}), NOW],
            ),
            (
                '{"name": "look", "arguments": {"city": "Bern"}, {"name": "look", "arguments": {"city": "Rome"}}',
                " behind",
                [LOOK, ROME],
            ),
        )
    ),
]
MARKED = [
    *(
        ("kimi_k2", text, content, calls)
        for text, content, calls in (
            ("before " + KIMI.format('{"city": "Bern"}'), "before", [LOOK]),
            (
                f"<|tool_call_section_begin|>{KIMI.format('{}')}<|tool_call_section_end|>behind",
                "behind",
                [("look", {})],
            ),
            (f"<|tool_call_section_begin|>\n{KIMI.format('{}')}\n<|tool_calls_section_end|>", "", [("look", {})]),
            (f"{KIMI.format('{}')}<|tool_calls_section_end|>behind", "behind", [("look", {})]),
            (
                f"<|tool_calls_section_begin|>{KIMI.format('{}')} between {KIMI.format('{}')}"
                "<|tool_call_section_end|>behind",
                " betweenbehind",
                [("look", {})] * 2,
            ),
            (KIMI.format('{"city": "Bern"} between') + "<|tool_calls_section_end|>", "between", [LOOK]),
            (KIMI.format('"{\\"city\\": \\"Bern\\"}"'), "", [LOOK]),
            (KIMI.format('{"city": "Bern') + "behind", "behind", [("look", '{"city": "Bern')]),
            (KIMI.format(""), "", [("look", {})]),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>now:3<|tool_call_end|><|tool_calls_section_end|>",
                "",
                [NOW],
            ),
            ("<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|> <|tool_calls_section_end|>", "", [NOW]),
            (KIMI.format("[3]"), None, []),
        )
    ),
    *(
        (parser, DEEPSEEK.format(text) + "behind", "behind", [call])
        for parser in ("deepseek_v3", "deepseek_v31")
        for text, call in (
            ("function<｜tool▁sep｜>now\n```json\n{}\n```", NOW),
            ("function<｜tool▁sep｜>now\n```json\n```", NOW),
            ("function<｜tool▁sep｜>now", NOW),
            ("now<｜tool▁sep｜>", NOW),
            ("now", NOW),
            ('look<｜tool▁sep｜>"{\\"city\\": \\"Bern\\"}"', LOOK),
        )
    ),
    ("deepseek_v31", DEEPSEEK.format('look<｜tool▁sep｜>{"city": "Bern"} between'), "between", [LOOK]),
]
INNER = QWEN.format(parameter("body", "quoted") + parameter("path", "x"))
ONE_BY_ONE = [
    *(
        (
            "qwen3_coder",
            QWEN.format(parameter("path", "a.txt") + parameter("body", value)) + "\nbehind",
            "\nbehind",
            [("save", {"path": "a.txt", "body": value})],
        )
        for value in (
            'def f():\n    return "</parameter>"',
            "<a><parameter=x>quoted</parameter></a>",
            "<parameter=x>\nquoted\n</parameter>\n<parameter=y>\n1\n</parameter>",
            "It ends with </parameter> and\n</parameter>\nquoted.",
            "It ends with\n</function>\n</tool_call>\nquoted.",
            "Write <parameter=path> first.",
            "Write <function=f> and <parameter=path> first, quoted.",
            INNER,
            f"Like this:\n{INNER}\nor {INNER}",
            "</function>",
            "<tool_call>",
            "</parameter",
            "x</parameter>\n\n</parameter>",
        )
    ),
    (
        "qwen3_coder",
        QWEN.format(parameter("body", INNER)) + "\n" + QWEN.format(parameter("path", "a.txt")),
        "",
        [("save", {"body": INNER}), ("save", {"path": "a.txt"})],
    ),
    (
        "qwen3_coder",
        QWEN.format("<parameter=path>\na.txt\n") + "\n" + QWEN.format(parameter("n", "3")) + "behind",
        "behind",
        [("save", {"path": "a.txt"}), ("save", {"n": 3})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>behind", "behind", [NOW]),
    ("qwen3_coder", QWEN.format("") + " between " + QWEN.format(""), " between", [("save", {})] * 2),
    ("qwen3_coder", QWEN.format("between " + parameter("path", "a.txt")), None, []),
    ("qwen3_coder", QWEN.format("<parameter=\n>\nquoted\n</parameter>\n"), None, []),
    (
        "qwen3_coder",
        QWEN.format(parameter("path", "a.txt") + "between"),
        "",
        [("save", {"path": "a.txt\n</parameter>\nbetween"})],
    ),
    *(
        (
            "deepseek_v32",
            DSML.format(parameter("body", value, "deepseek_v32")) + "behind",
            "behind",
            [("save", {"body": value})],
        )
        for value in (
            'x = "</｜DSML｜parameter>"',
            DSML.format(parameter("body", "quoted", "deepseek_v32")),
            '<｜DSML｜parameter name="path" string="true">quoted',
        )
    ),
    (
        "deepseek_v32",
        DSML.format(parameter("body", "a.txt", "deepseek_v32").replace('" s', '" type="string" s')),
        "",
        [("save", {"body": "a.txt"})],
    ),
    ("deepseek_v32", '<｜DSML｜invoke name="now">\n</｜DSML｜function_calls>behind', "behind", [NOW]),
    ("deepseek_v32", '<｜DSML｜invoke name="now" />\n</｜DSML｜function_calls>behind', "behind", [NOW]),
]
ONE_BY_ONE += [
    ("deepseek_v4", *(ast.literal_eval(repr(part).replace("function_calls", "tool_calls")) for part in row))
    for name, *row in ONE_BY_ONE
    if name == "deepseek_v32"
]
EVERY = [
    row
    for name in TOOL_FORMATS
    for row in (
        (name, f"before\n\n{written(name, LOOK, SAVE)}\nbehind", "before\nbehind", [LOOK, SAVE]),
        (name, f"{written(name, NOW)} between {written(name, ROME)}", " between", [NOW, ROME]),
        (name, written(name, ("rain", {"city": "Bern"})), "", [("rain", {"city": "Bern"})]),
        (
            name,
            FENCED.format(written(name, LOOK)) + "\n" + written(name, ROME),
            FENCED.format(written(name, LOOK)),
            [ROME],
        ),
        (name, "```py\nx\n```" + written(name, ROME), "```py\nx\n```", [ROME]),
        (name, "````md\n```\n```json\n{}\n```\n" + written(name, LOOK), None, []),
        (name, written(name, ("save", {"body": written(name, LOOK)})), "", [("save", {"body": written(name, LOOK)})]),
        (
            name,
            written(name, ("save", {"body": "```quoted"})) + "\n" + written(name, NOW),
            "",
            [("save", {"body": "```quoted"}), NOW],
        ),
    )
]
ROWS = [*OBJECTS, *MARKED, *ONE_BY_ONE, *EVERY]


def values(calls):
    """Return arguments as values if they are JSON."""
    out = []
    for name, arguments in calls:
        try:
            out.append((name, json.loads(arguments)))
        except (TypeError, ValueError):
            out.append((name, arguments))
    return out


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"), ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)]
)
def test_malformed_calls(tools, text, content, calls):
    whole = said(tools, [text])
    assert whole[0] == (text if content is None else content)
    assert values(whole[2]) == values(calls)
    assert said(tools, text) == whole, "one character at a time"
    for place in range(1, len(text), 3):
        assert said(tools, [text[:place], text[place:]]) == whole, text[:place]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_truncated_output_keeps_its_text(name):
    """A token limit may end an output at any character."""
    for tools, text, _, _ in ROWS:
        if tools != name:
            continue
        for end in range(len(text)):
            content, _, calls = said(tools, [text[:end]])
            kept = " ".join((content, *(each for call in calls for each in call)))
            for word in WORDS:
                assert kept.count(word) == text[:end].count(word), (word, text[:end])


CALL = KIMI.format('{"city": "</think>"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"before{CALL}", ("", "before", 1)),
        (f"before\n<|tool_call_section_begin|>{CALL}<|tool_call_section_end|>", ("", "before", 1)),
        (f"before<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|></think>behind", ("behind", "before", 1)),
        (f"before{CALL} between</think>behind", (" betweenbehind", "before", 1)),
        (f"{FENCED.format(KIMI)}</think>", ("", FENCED.format(KIMI), 0)),
        ("before <|tool_call_begin|> behind", ("<|tool_call_begin|> behind", "before ", 0)),
    ],
)
def test_kimi_calls_during_reasoning(text, expected):
    whole = said("kimi_k2", [text], "kimi_k2")
    assert (whole[0], whole[1], len(whole[2])) == expected
    assert said("kimi_k2", text, "kimi_k2") == whole
