"""Builds the grammar of an answer with a required form, in the format of the model's family.

Tool calls have the format of the family's templates. A requested form (JSON, a choice, ...) follows the reasoning, or
replaces the calls. The language is Lark in llguidance's dialect (its docs/syntax.md). A marker that is a token is
written as its id, because llguidance allows no special token in plain text. Any other marker is text.

Arguments that are written one by one (text/parameters.py) follow the schema of their function. Values other than text
are JSON by their own schemas. A text is unquoted, so only constants and `minLength` of its schema apply. (A limit
on characters needs an automaton with a state for each: a mask then takes 12 ms instead of 5 us, with 151,936 token ids,
2026-11-22.)
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeyard_router.text.parameters import ParameterMarkup, json_types
from moeyard_router.text.reasoning import END_THINK, THINK
from moeyard_router.text.tool_formats import ToolFormat
from moeyard_worker.protocol import SCHEMA_MAPS, Grammar

# Blanks between the parts of a JSON text, as llguidance's `whitespace_pattern`. All families write arguments in one
# line. A confused model writes all blanks that are allowed: the demo model wrote 20 per gap until its end.
BLANKS, BLANKS_OF_ARGUMENTS = r"[ \t\n\r]{1,20}", " "
# Keywords of a schema that do not constrain values.
_NOTES = frozenset(("default", "description", "examples", "title"))
ANY_TEXT = "(?s:.*)"


def json_text(schema: Mapping[str, Any], blanks: str = BLANKS) -> str:
    """Return the grammar of a JSON text that is valid by `schema`."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": blanks}, **schema})


def lost_integer(schema: Any) -> int | None:
    """Return an integer constant of a schema that llguidance would change, because it reads numbers as doubles."""
    waiting: list[tuple[Any, bool]] = [(schema, False)]  # a part of the schema, and whether it is a constant
    while waiting:
        part, constant = waiting.pop()
        if constant and isinstance(part, int) and not _is_kept(part):
            return part
        if isinstance(part, list):
            waiting += ((each, constant) for each in part)
        elif isinstance(part, dict):
            for key, value in part.items():
                if not constant and key in SCHEMA_MAPS and isinstance(value, dict):
                    waiting += ((each, False) for each in value.values())
                elif constant or key not in _NOTES:
                    waiting.append((value, constant or key in ("const", "enum")))
    return None


def _is_kept(number: int) -> bool:
    largest = 2**63 - 1
    return number == largest or (abs(number) < largest and int(float(number)) == number)


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Return the grammar of a text as a sequence of literals and tokens. {index} is any number."""
    known = [re.escape(m) for m in sorted(token_ids, key=len, reverse=True)]
    out = []
    for part in re.split(f"({'|'.join([*known, re.escape('{index}')])})", text):
        if part == "{index}":
            out.append("/[0-9]{1,4}/")
        elif part in token_ids:
            out.append(f"<[{token_ids[part]}]>")
        elif part:
            out.append(json.dumps(part, ensure_ascii=False))
    return " ".join(out)


def text_until(rule: str, marker: str, token_ids: Mapping[str, int], *, text: str = ANY_TEXT) -> list[str]:
    """Return rules for `rule`: a match of the regular expression `text` up to the first `marker`, and the marker."""
    tokens = [(marker.index(token), token) for token in token_ids if token in marker]
    if not tokens:
        return [f"{rule}[suffix={json.dumps(marker, ensure_ascii=False)}]: /{text}/"]
    # A token ends the text before it. That text includes the part of the marker before the token.
    place, token = min(tokens)
    terminal, before = rule.upper(), slashed(re.escape(marker[:place]))
    without = f"~/{ANY_TEXT}{slashed(re.escape(token))}{ANY_TEXT}/"  # a token that is not special can occur as text too
    return [f"{rule}: {terminal} {literal(marker[place:], token_ids)}", f"{terminal}: /{text}{before}/ & {without}"]


def slashed(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")


MAX_LEAST = 100  # the largest `minLength` in characters that is enforced
_DEFINITIONS = ("$defs", "definitions")


def parameter_rules(
    number: int, schema: Mapping[str, Any], markup: ParameterMarkup, token_ids: Mapping[str, int]
) -> list[str]:
    """Return rules for `arguments_{number}`: declared parameters in order, then others if the schema allows any."""
    others = schema.get("additionalProperties", True)
    given = schema.get("properties")
    declared = dict(given) if isinstance(given, Mapping) else {}
    needed = schema.get("required")
    needed = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
    declared |= {name: others for name in needed if name not in declared}
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    maker = _Values(markup, token_ids, definitions)
    parts = []
    for i, (name, own) in enumerate(declared.items()):
        if own is False:
            continue
        rule = f"p_{number}_{i}"
        maker.parameter(rule, json.dumps(name, ensure_ascii=False), own)
        parts.append(rule if name in needed else f"{rule}?")
    if others is not False:
        maker.parameter(f"other_{number}", f"OTHER_{number}", others)
        names = "|".join(_escaped(name) for name in declared)
        without = f" & ~/{names}/" if declared else ""
        maker.rules.append(f'OTHER_{number}: /[^<>"\\n]{{1,64}}/{without}')
        parts.append(f"other_{number}*")
    return [f"arguments_{number}: {' '.join(parts) or json.dumps('')}", *maker.rules]


class _Values:
    def __init__(self, markup: ParameterMarkup, token_ids: Mapping[str, int], definitions: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._markup = markup
        self._token_ids = token_ids
        self._definitions = definitions

    def parameter(self, rule: str, name: str, schema: Any) -> None:
        """Add `rule`: a parameter of this name (a literal or a terminal) with a value by `schema`."""
        markup, ids = self._markup, self._token_ids
        own = dict(schema) if isinstance(schema, Mapping) else {}
        types = json_types(own, {**self._definitions, **own})
        as_text, as_json = markup.written
        texts = f"{literal(as_text, ids)} {self._text(rule, own, types)}"
        value = json_text({**self._definitions, **own}, BLANKS_OF_ARGUMENTS)
        jsons = f"{literal(as_json, ids)} {rule}_json {literal(markup.pad + markup.end + markup.behind, ids)}"
        allowed = []
        if not types or "string" in types:
            allowed.append(texts)
        # If the markup does not distinguish texts from JSON, only values that cannot be texts are JSON.
        if (as_text != as_json and types != {"string"}) or (types and "string" not in types):
            allowed.append(jsons)
            self.rules.append(f"{rule}_json: {value}")
        self.rules.append(f"{rule}: {literal(markup.begin, ids)} {name} ({' | '.join(allowed)})")

    def _text(self, rule: str, schema: Mapping[str, Any], types: frozenset[str]) -> str:
        """Return the grammar of a value that is a text, with its end."""
        markup, ids = self._markup, self._token_ids
        if types and "string" not in types:
            return ""
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(constants, list):
            texts = [c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in constants]
            either = " | ".join(literal(text, {}) for text in texts if text)
            return f"({either}) {literal(markup.pad + markup.end + markup.behind, ids)}"
        least = schema.get("minLength")
        text = ANY_TEXT
        if isinstance(least, int) and 0 < least <= MAX_LEAST and types == {"string"}:
            text = f"(?s:.{{{least},}})"
        # A text may quote the end marker, but not with the characters that the family's templates write around it.
        self.rules += text_until(f"{rule}_text", markup.pad + markup.end + markup.behind, ids, text=text)
        return f"{rule}_text"


def _escaped(name: str) -> str:
    return slashed("".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in name))


# The beginning of an answer: the rest of a block that the prompt has opened, an optional block, or neither.
Thinking = Literal["inside", "possible", "none"]
_BREAKS = "/\\n{0,4}/"  # between the reasoning and what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedCalls:
    """The calls that an answer may hold. `functions`: (name, schema of the arguments).

    among_text: whether calls are optional and may follow text.
    """

    form: ToolFormat
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    one_call: bool
    among_text: bool = False


def answer_grammar(
    *, thinking: Thinking, calls: AllowedCalls | None, body: Grammar | None, token_ids: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of reasoning followed by at least one of `calls`, or by `body`. None without constraints.

    `token_ids`: the markers that are tokens. Raises `ValueError` for a `body` that `can_be_part` excludes.
    """
    if calls is None and (body is None or thinking == "none"):
        return body
    rules, parts = [], []
    if calls is not None:
        parts.append("calls")
        rules += _calls_among_text(calls, token_ids) if calls.among_text else _calls(calls, token_ids)
    if body is not None:
        parts.append("body")
        rules += _body(body)
    first = "" if thinking == "none" else "thinking "
    rules += [] if thinking == "none" else _thinking(token_ids, inside=thinking == "inside")
    text = "\n".join(["%llguidance {}", f"start: {first}({' | '.join(parts)})", *rules, ""])
    return Grammar(kind="lark", text=text)


def can_be_part(body: Grammar) -> bool:
    """Return whether a grammar can follow reasoning or be an alternative to calls. A Lark grammar cannot."""
    return body.kind != "lark"


def _calls(calls: AllowedCalls, token_ids: Mapping[str, int]) -> list[str]:
    form, begin = calls.form, calls.form.written[0]
    before = literal(form.section_begin + form.opening + begin, token_ids)
    return [f"calls: {before} called{_more(calls, token_ids)}", *_called(calls, token_ids)]


def _calls_among_text(calls: AllowedCalls, token_ids: Mapping[str, int]) -> list[str]:
    """Return rules for text in which the first marker of a call begins a complete call."""
    form = calls.form
    written = form.section_begin + form.opening + form.written[0]
    trigger = form.section_begin or form.call_begin
    none = "".join(f" & ~/{ANY_TEXT}{slashed(re.escape(opener))}{ANY_TEXT}/" for opener in form.openers)
    spoken = f"until_call {literal(written.removeprefix(trigger), token_ids)} called{_more(calls, token_ids)}"
    if trigger in token_ids:
        until = [f"until_call: TEXT {literal(trigger, token_ids)}"]
    else:
        until = [f"until_call[lazy]: /{ANY_TEXT}{slashed(re.escape(trigger))}/"]
    answer = f"calls: spoken | text\nspoken: {spoken}" if calls.one_call else f"calls: spoken* text\nspoken: {spoken}"
    return [answer, *until, "text: TEXT", f"TEXT: /{ANY_TEXT}/{none}", *_called(calls, token_ids)]


def _more(calls: AllowedCalls, token_ids: Mapping[str, int]) -> str:
    """Return the grammar after the first call: more calls and the section's end. In text, only those of one section."""
    form = calls.form
    in_section = bool(form.section_end) and form.section_end not in form.joint
    joint = literal(form.joint + form.written[0], token_ids)
    several = not calls.one_call and (in_section or not calls.among_text)
    return (f" ({joint} called)*" if several else "") + f" {literal(form.section_end, token_ids)}"


def _called(calls: AllowedCalls, token_ids: Mapping[str, int]) -> list[str]:
    """Return rules for `called`: a call after its first marker."""
    form = calls.form
    _, middle, end = form.written
    names = " | ".join(f"call_{i}" for i in range(len(calls.functions)))
    rules = [f"called: ({names}) {literal(end, token_ids)}"]
    for i, (name, schema) in enumerate(calls.functions):
        rules.append(f"call_{i}: {literal(name + middle, token_ids)} arguments_{i}")
        if form.parameters is not None:
            rules += parameter_rules(i, schema, form.parameters, token_ids)
        else:
            rules.append(f"arguments_{i}: {json_text(schema, BLANKS_OF_ARGUMENTS)}")
    return rules


def _body(body: Grammar) -> list[str]:
    """Return rules for `body`."""
    if body.kind == "json_object":
        return [f"body: {json_text({'type': 'object'})}"]
    if body.kind == "json_schema":
        schema = json.loads(body.text)
        return [f"body: {json_text(schema if isinstance(schema, dict) else {} if schema else {'not': {}})}"]
    if body.kind == "regex":
        return [f"body: /{slashed(body.text)}/"]
    if body.kind == "choice":
        # One terminal, because llguidance allows only 2,000 alternatives of a rule.
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(body.text))
        return ["body: CHOICE", f"CHOICE: {' | '.join(choices)}"]
    raise ValueError(f"a grammar of kind {body.kind} cannot be part of another")


def _thinking(token_ids: Mapping[str, int], *, inside: bool) -> list[str]:
    first = "" if inside else f"{literal(THINK, token_ids)} "
    block = f"{first}thought {_BREAKS}"
    rules = [f"thinking: {block}" if inside else f"thinking: ({block})?"]
    if END_THINK in token_ids:
        return [*rules, f"thought: THOUGHT {literal(END_THINK, token_ids)}", "THOUGHT: /(?s:.*)/"]
    return [*rules, f"thought[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"]
