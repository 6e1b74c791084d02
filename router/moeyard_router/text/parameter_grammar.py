"""The grammar of arguments that are written one by one (text/parameters.py), by the schema of their function.

Values of any other type than text are JSON by their own schemas. A text stands there bare, so of its schema only the
choice among constants and `minLength` hold; `maxLength`, `pattern` and `format` do not. (A count of characters makes an
automaton with a state for each, and in a vocabulary of 151,936 a mask of 12 ms in place of 5 us, 2026-11-22.)
"""

import json
from collections.abc import Mapping
from typing import Any

from moeyard_router.text.lark import ANY_TEXT, BLANKS_OF_ARGUMENTS, json_text, literal, slashed, text_until
from moeyard_router.text.parameters import ParameterMarkup, json_types

MAX_LEAST = 100  # characters of a `minLength` that is held to
_DEFINITIONS = ("$defs", "definitions")


def parameter_rules(
    number: int, schema: Mapping[str, Any], markup: ParameterMarkup, token_ids: Mapping[str, int]
) -> list[str]:
    """Rules of `arguments_{number}`: declared parameters in their order, then others if the schema lets any in."""
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
    """Makes rules of single parameters."""

    def __init__(self, markup: ParameterMarkup, token_ids: Mapping[str, int], definitions: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._markup = markup
        self._token_ids = token_ids
        self._definitions = definitions

    def parameter(self, rule: str, name: str, schema: Any) -> None:
        """`rule`: a parameter of this name (a literal or a terminal), whose value is as `schema` says."""
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
        # Where the markup does not tell one from the other, whatever is not certainly JSON is read as what it may be.
        if (as_text != as_json and types != {"string"}) or (types and "string" not in types):
            allowed.append(jsons)
            self.rules.append(f"{rule}_json: {value}")
        self.rules.append(f"{rule}: {literal(markup.begin, ids)} {name} ({' | '.join(allowed)})")

    def _text(self, rule: str, schema: Mapping[str, Any], types: frozenset[str]) -> str:
        """What stands for a value that is a text, its end included."""
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
        # A text may quote the end marker, though not with what the family's templates write around it.
        self.rules += text_until(f"{rule}_text", markup.pad + markup.end + markup.behind, ids, text=text)
        return f"{rule}_text"


def _escaped(name: str) -> str:
    """A name as a regular expression."""
    return slashed("".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in name))
