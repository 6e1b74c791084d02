"""The grammar of an answer: the family's own parser reads its calls, and schemas hold."""

import json

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moeyard_router.text.answer_grammar import AllowedCalls, answer_grammar
from moeyard_router.text.events import CallArguments, CallBegin, Content, Reasoning, joined
from moeyard_router.text.extraction import Extraction, Extractor
from moeyard_router.text.reasoning import REASONING_FORMATS
from moeyard_router.text.tool_formats import JSON_CALLS
from moeyard_router.text.tool_formats import TOOL_FORMATS as PARSERS
from moeyard_worker.protocol import Grammar

TOOL_FORMATS = {**PARSERS, JSON_CALLS.name: JSON_CALLS}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [("weather", WEATHER), ("weather_now", {"type": "object"})]
FORMS = [(name, special) for name in PARSERS for special in (True, False, None)]


def tokenizer_with(markers, special):
    """Return a tokenizer of bytes and the markers: special tokens, added tokens, or (None) no tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    if special is not None:
        tokenizer.add_tokens([AddedToken(m, special=special, normalized=False) for m in markers])
    return tokenizer


class Checker:
    """Check whether a grammar allows a whole text."""

    def __init__(
        self,
        name,
        special,
        *,
        thinking="none",
        one_call=False,
        calls=True,
        body=None,
        functions=FUNCTIONS,
        among_text=False,
    ):
        form = TOOL_FORMATS[name]
        markers = ("<think>", "</think>", *form.markers)
        self.tokenizer = tokenizer_with(markers, special)
        vocabulary = self.tokenizer.get_vocab()
        grammar = answer_grammar(
            thinking=thinking,
            calls=AllowedCalls(form=form, functions=functions, one_call=one_call, among_text=among_text)
            if calls
            else None,
            body=body,
            token_ids={m: vocabulary[m] for m in markers if m in vocabulary},
        )
        assert grammar.kind == "lark"
        self.grammar = grammar.text
        self.llguidance = llguidance.LLTokenizer(self.tokenizer.to_str(), eos_token=[vocabulary["<eos>"]])
        assert llguidance.LLMatcher.validate_grammar(self.grammar, self.llguidance) == ""

    def allows(self, text):
        matcher = llguidance.LLMatcher(self.llguidance, self.grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def shown(markup, arguments):
    """Return arguments in a format's notation: JSON, or one by one."""
    if markup is None:
        return arguments
    text = ""
    for name, value in json.loads(arguments).items():
        is_text = isinstance(value, str)
        bare = value if is_text else json.dumps(value, ensure_ascii=False)
        text += markup.begin + name + markup.written[not is_text] + bare + markup.pad + markup.end + markup.behind
    return text


def written(name, calls):
    """Return these calls in the notation of the family's templates."""
    form = TOOL_FORMATS[name]
    begin, middle, end = form.written
    texts = [
        begin + function + middle.replace("{index}", str(i)) + shown(form.parameters, arguments) + end
        for i, (function, arguments) in enumerate(calls)
    ]
    return form.section_begin + form.opening + form.joint.join(texts) + form.section_end


@pytest.mark.parametrize(("name", "special"), [*FORMS, (JSON_CALLS.name, None)])
def test_template_notation_is_allowed_and_parsed(name, special):
    checker = Checker(name, special)
    one = [("weather", '{"city": "Köln <b> }", "days": 3}')]
    two = [*one, ("weather_now", json.dumps({"a": [1, {"b": None}]}))]
    for calls in (one, two):
        assert checker.allows(written(name, calls))
        asked = Extraction(visible=[], tools=TOOL_FORMATS[name], id_seed="12345", schemas=dict(FUNCTIONS))
        extractor = Extractor(asked, 0)
        events = extractor.push(written(name, calls)) + extractor.finish()
        names = [e.name for e in events if isinstance(e, CallBegin)]
        arguments = [e.text for e in events if isinstance(e, CallArguments)]
        assert list(zip(names, arguments, strict=True)) == calls
        assert not any(isinstance(e, Content) for e in events)
    assert not checker.allows("I would rather talk.")
    assert not checker.allows("")
    assert not checker.allows(written(name, [("weather", '{"days": 3}')]))
    assert not checker.allows(written(name, [("weather", '{"city": "x", "days": 3.5}')]))
    assert not checker.allows(written(name, [("rain", "{}")]))
    assert checker.allows(written(name, [("weather", '{"city":"x"}')]))
    if TOOL_FORMATS[name].parameters is None:
        assert not checker.allows(written(name, [("weather", '{"city":  "x"}')]))
    assert not checker.allows(written(name, [("weather", '{"city": "x", "other": 1}')]))
    assert not checker.allows(written(name, one) + "!")
    assert ("<[" in checker.grammar) == (special is not None), "the grammar must use the markers' tokens"
    single = Checker(name, special, one_call=True)
    assert single.allows(written(name, one))
    assert not single.allows(written(name, two))


@pytest.mark.parametrize("special", [True, False, None])
def test_reasoning_may_precede_a_call(special):
    call = written("hermes", [("weather", '{"city": "x"}')])
    free = Checker("hermes", special, thinking="possible")
    assert free.allows(call)
    assert free.allows("<think>\nSo <b> it is.\n</think>\n\n" + call)
    assert not free.allows("So it is.</think>" + call)
    opened = Checker("hermes", special, thinking="inside")
    assert opened.allows("So it is.\n</think>\n\n" + call)
    assert not opened.allows(call)
    closed = Checker("hermes", special, thinking="none")
    assert closed.allows(call)
    assert not closed.allows("<think>\nSo.\n</think>\n\n" + call)
    extractor = Extractor(
        Extraction(visible=[], tools=TOOL_FORMATS["hermes"], reasoning=REASONING_FORMATS["qwen3"], inside=True), 0
    )
    events = extractor.push("So it is.\n</think>\n\n" + call)
    assert events[0] == Reasoning("So it is.")


BODIES = [
    (Grammar(kind="json_object"), ['{"a": [1]}', "{}"], ["[]", "a", ""]),
    (Grammar(kind="json_schema", text=json.dumps(WEATHER)), ['{"city": "x"}'], ["{}", '{"city": 3}']),
    (Grammar(kind="json_schema", text="true"), ["3", '"x"'], ["x"]),
    (Grammar(kind="regex", text=r"[a-c]+/\d\/\n?"), ["ab/3/", "c/9/\n"], ["ab", "d/3/"]),
    (Grammar(kind="regex", text="x\ny|z"), ["x\ny", "z"], ["x", "y"]),
    (Grammar(kind="choice", text='["yes", "n\\"o\\n"]'), ["yes", 'n"o\n'], ["y", "no"]),
]


@pytest.mark.parametrize("special", [True, None])
@pytest.mark.parametrize(("body", "good", "bad"), BODIES, ids=[f"{i}-{b.kind}" for i, (b, _, _) in enumerate(BODIES)])
def test_body_grammar_holds_after_reasoning_and_with_calls(special, body, good, bad):
    call = written("hermes", [("weather", '{"city": "x"}')])
    opened = Checker("hermes", special, thinking="inside", calls=False, body=body)
    free = Checker("hermes", special, thinking="possible", body=body)
    for text in good:
        assert opened.allows("So {it} is.</think>\n\n" + text)
        assert not opened.allows(text)
        assert free.allows(text)
        assert free.allows("<think>So</think>" + text)
        assert not free.allows(call + text)
    for text in bad:
        assert not opened.allows("So.</think>\n" + text)
        assert not free.allows(text)
    assert free.allows(call)
    assert not opened.allows("So.</think>\n" + call)


def test_grammar_is_unchanged_without_reasoning_and_calls():
    body = Grammar(kind="lark", text='start: "x"')
    assert answer_grammar(thinking="none", calls=None, body=body, token_ids={}) is body
    assert answer_grammar(thinking="inside", calls=None, body=None, token_ids={}) is None


FILE = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "maxLength": 9},
        "mode": {"$ref": "#/$defs/Mode"},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["a/b", "c"]},
    },
    "required": ["path", "mode"],
    "additionalProperties": {"type": "boolean"},
    "$defs": {"Mode": {"type": "integer", "maximum": 9}},
}
GOOD = [
    {"path": "a </b>", "mode": 3},
    {"path": "a\n", "mode": 3, "lines": [1, 2], "note": "<x>", "kind": "a/b"},
    {"path": "a", "mode": 3, "note": None, "more": True, "other": False},
]
BAD = [
    {"path": "a"},
    {"mode": 3},
    {"path": "", "mode": 3},
    {"path": "a", "mode": 10},
    {"path": "a", "mode": "x"},
    {"path": "a", "mode": 3, "lines": [1, 2, 3]},
    {"path": "a", "mode": 3, "kind": "b"},
    {"path": "a", "mode": 3, "more": 1},
    {"mode": 3, "path": "a"},
    {"path": "a", "mode": 3, "mode ": 3},
]


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32", "deepseek_v4"])
def test_separate_arguments_follow_their_schema(name, special):
    checker = Checker(name, special, functions=[("file", FILE), ("silent", {"type": "object", "required": ["a"]})])
    quoted = {"path": 'say "</parameter>" and <parameter=x>', "mode": 3}
    for arguments in (*GOOD, *([quoted] if name == "qwen3_coder" else [])):
        text = written(name, [("file", json.dumps(arguments))])
        assert checker.allows(text), text
        asked = Extraction(visible=[], tools=TOOL_FORMATS[name], schemas={"file": FILE}, id_seed="12345")
        extractor = Extractor(asked, 0)
        events = joined(extractor.push(text) + extractor.finish())
        assert json.loads(events[1].text) == arguments
    for arguments in BAD:
        assert not checker.allows(written(name, [("file", json.dumps(arguments))])), arguments
    assert checker.allows(written(name, [("silent", '{"a": {"b": 1}, "c": "d"}')]))
    assert not checker.allows(written(name, [("silent", '{"c": "d"}')]))


@pytest.mark.parametrize(("name", "special"), FORMS)
def test_call_in_free_text_follows_its_schema(name, special):
    checker = Checker(name, special, among_text=True)
    one = written(name, [("weather", '{"city": "x"}')])
    two = written(name, [("weather", '{"city": "x"}'), ("weather_now", '{"a": 1}')])
    plain = "I would rather <talk>.\n{["
    for text in ("", plain, one, two, "Let me see.\n\n" + one, two + "\nSo <b>.", one + "\n" + one):
        assert checker.allows(text), text
    wrong = [
        written(name, [(function, arguments)])
        for function, arguments in (
            ("rain", "{}"),
            ("weather", '{"days": 3}'),
            ("weather", '{"city": "x", "other": 1}'),
            ("weather", '{"city": "x", "days": "y"}'),
        )
    ]
    for text in (*wrong, "So. " + wrong[0], one[:-4], one + wrong[1]):
        assert not checker.allows(text), text
    for opener in TOOL_FORMATS[name].openers:
        assert not checker.allows(f"It begins with {opener}, then a name")
    single = Checker(name, special, among_text=True, one_call=True)
    assert single.allows("So. " + one)
    assert single.allows("So.")
    assert not single.allows(two)
    thinking = Checker(name, special, among_text=True, thinking="possible")
    assert thinking.allows("<think>\nSo <b>.\n</think>\n\nHm. " + one)
    assert thinking.allows(one)


@pytest.mark.parametrize("name", PARSERS)
def test_additional_properties_follow_the_schema(name):
    """Absent and true allow any property, false allows none, and a schema must match."""
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = [("absent", {}), ("true", {"additionalProperties": True}), ("false", {"additionalProperties": False})]
    given.append(("numbers", {"additionalProperties": {"type": "integer"}}))
    for among_text in (False, True):
        checker = Checker(name, None, among_text=among_text, functions=[(n, base | extra) for n, extra in given])
        for function, lets in (("absent", "tn"), ("true", "tn"), ("false", ""), ("numbers", "n")):
            assert checker.allows(written(name, [(function, '{"a": 1}')]))
            assert checker.allows(written(name, [(function, '{"a": 1, "b": "x"}')])) == ("t" in lets)
            assert checker.allows(written(name, [(function, '{"a": 1, "b": 2}')])) == ("n" in lets)
