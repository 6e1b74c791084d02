"""The grammar of an answer that must have a form, in the words of the model's own family.

Calls of tools are what the family's templates write and its parser reads; what a request says of the form of its answer
(JSON, a choice, ...) holds behind the block of reasoning, or in the place of calls. Lark in llguidance's dialect (its
docs/syntax.md). A marker that the tokenizer has as a token of its own is named by its id, since llguidance lets no
special token through where plain text is allowed; any other marker is text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeyard_router.text.lark import ANY_TEXT, BLANKS_OF_ARGUMENTS, json_text, literal, slashed
from moeyard_router.text.parameter_grammar import parameter_rules
from moeyard_router.text.reasoning import END_THINK, THINK
from moeyard_router.text.tool_formats import ToolFormat
from moeyard_worker.protocol import Grammar

# What comes first: the rest of a block that the prompt has opened, a block if the model wants one, or neither.
Thinking = Literal["inside", "possible", "none"]
_BREAKS = "/\\n{0,4}/"  # between the reasoning and what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls that an answer may hold: of `functions`, pairs of a name and a JSON schema of the arguments.

    `among_text`: they stand anywhere in an answer, or nowhere; what is not one is any text in which none begins.
    """

    form: ToolFormat
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    one_call: bool
    among_text: bool = False


def answer_grammar(
    *, thinking: Thinking, calls: Calls | None, body: Grammar | None, token_ids: Mapping[str, int]
) -> Grammar | None:
    """The grammar of an answer: what comes first, then `calls`, at least one, or `body`, or either if both are given.

    With `calls.among_text` there is no `body`.

    `token_ids` are the markers that are tokens of their own. None if nothing is asked of the answer. Raises
    `ValueError` for a `body` in a grammar of its own words, of which no part of another can be made.
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
    """Whether a grammar can stand behind reasoning or beside calls: one in words of its own cannot."""
    return body.kind != "lark"


def _calls(calls: Calls, token_ids: Mapping[str, int]) -> list[str]:
    form, begin = calls.form, calls.form.written[0]
    before = literal(form.section_begin + form.opening + begin, token_ids)
    return [f"calls: {before} called{_more(calls, token_ids)}", *_called(calls, token_ids)]


def _calls_among_text(calls: Calls, token_ids: Mapping[str, int]) -> list[str]:
    """Text, and once the first marker of a call stands there, that call and what belongs to it."""
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


def _more(calls: Calls, token_ids: Mapping[str, int]) -> str:
    """What may follow the first call: more of them, and the section's end; among text only those of one section."""
    form = calls.form
    in_section = bool(form.section_end) and form.section_end not in form.joint
    joint = literal(form.joint + form.written[0], token_ids)
    several = not calls.one_call and (in_section or not calls.among_text)
    return (f" ({joint} called)*" if several else "") + f" {literal(form.section_end, token_ids)}"


def _called(calls: Calls, token_ids: Mapping[str, int]) -> list[str]:
    """`called`: a call behind its beginning, and the rules below."""
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
    """`body` and the rules below."""
    if body.kind == "json_object":
        return [f"body: {json_text({'type': 'object'})}"]
    if body.kind == "json_schema":
        schema = json.loads(body.text)
        return [f"body: {json_text(schema if isinstance(schema, dict) else {} if schema else {'not': {}})}"]
    if body.kind == "regex":
        return [f"body: /{slashed(body.text)}/"]
    if body.kind == "choice":
        # One terminal: llguidance takes 2,000 alternatives of a rule.
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(body.text))
        return ["body: CHOICE", f"CHOICE: {' | '.join(choices)}"]
    raise ValueError(f"a grammar of kind {body.kind} is no part of another")


def _thinking(token_ids: Mapping[str, int], *, inside: bool) -> list[str]:
    first = "" if inside else f"{literal(THINK, token_ids)} "
    block = f"{first}thought {_BREAKS}"
    rules = [f"thinking: {block}" if inside else f"thinking: ({block})?"]
    if END_THINK in token_ids:
        return [*rules, f"thought: THOUGHT {literal(END_THINK, token_ids)}", "THOUGHT: /(?s:.*)/"]
    return [*rules, f"thought[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"]
