"""The grammar of an answer that must call a tool, in the words of the model's own family.

Lark in llguidance's dialect (its docs/syntax.md). A marker that the tokenizer has as a token of its own is named by its
id, since llguidance lets no special token through where plain text is allowed; any other marker is text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moeyard_router.text.reasoning import END_THINK, THINK
from moeyard_router.text.tool_calls import ToolFormat

# Spaces between the parts of the arguments: without an end to them a model that lost its way writes nothing else.
_BLANKS = r"[ \t\n\r]{1,20}"
Thinking = Literal["none", "possible", "inside"]
_BREAKS = "/\\n{0,4}/"  # between the reasoning and the call


def tool_grammar(
    form: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    one_call: bool,
    thinking: Thinking,
    token_ids: Mapping[str, int],
) -> str:
    """The grammar of one or more calls of `functions`, pairs of a name and a JSON schema of the arguments.

    What `form` and its parser take for calls. `thinking` is what comes before them: "inside" the block that the prompt
    has opened, a block that is "possible", or "none". `token_ids` are the markers that are tokens of their own.
    """
    begin, middle, end = form.written
    # A prefix that all calls share is written once, so that the names stand at one place of the grammar.
    calls = " | ".join(f"call_{i}" for i in range(len(functions)))
    more = "" if one_call else f" ({_lark(form.joint, token_ids)} call)*"
    rules = ["%llguidance {}"]
    parts = [
        "" if thinking == "none" else "thinking",
        _lark(form.section_begin + form.opening, token_ids),
        "call" + more,
        _lark(form.section_end, token_ids),
    ]
    rules.append("start: " + " ".join(p for p in parts if p))
    rules += [] if thinking == "none" else _thinking(token_ids, inside=thinking == "inside")
    rules.append(f"call: {_lark(begin, token_ids)} ({calls}) {_lark(end, token_ids)}")
    for i, (name, schema) in enumerate(functions):
        rules.append(f"call_{i}: {_lark(name + middle, token_ids)} arguments_{i}")
        body = {"x-guidance": {"whitespace_pattern": _BLANKS}, **schema}
        rules.append(f"arguments_{i}: %json {json.dumps(body)}")
    return "\n".join(rules) + "\n"


def _thinking(token_ids: Mapping[str, int], *, inside: bool) -> list[str]:
    first = "" if inside else f"{_lark(THINK, token_ids)} "
    block = f"{first}thought {_BREAKS}"
    rules = [f"thinking: {block}" if inside else f"thinking: ({block})?"]
    if END_THINK in token_ids:
        return [*rules, f"thought: THOUGHT {_lark(END_THINK, token_ids)}", "THOUGHT: /(?s:.*)/"]
    return [*rules, f"thought[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"]


def _lark(text: str, token_ids: Mapping[str, int]) -> str:
    """A text as a sequence of Lark's literals and tokens; {index} is any number."""
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
