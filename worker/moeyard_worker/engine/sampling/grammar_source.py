"""Grammars in llguidance's own words, and what is mended in them first. Runs in `grammar_process.py`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between the parts of a JSON text a model may write this and no more, a few blanks or a line break with indentation: a
# model that has lost its way writes empty lines until it may write nothing at all.
_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
# Of an automaton, at 1 to 2 kB each. llguidance allows 250,000.
_MAX_STATES = 50_000
# An automaton that counts modulo n has n states, made before any of llguidance's limits is asked: a million took 8 s
# and 250 MB (2026-11-22).
_MAX_MULTIPLE = 10_000
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')
_SCHEMA = re.compile(r"%json\s*(?=\{)")
# Keywords of JSON Schema whose value maps names to schemas, and those whose value holds none.
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_PLAIN = frozenset(("const", "enum", "default", "examples", "x-guidance"))


def matcher_of(source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher, which may be in an error."""
    limits = LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def source_of(kind: str, text: str, tokenizer: LLTokenizer) -> str:
    """The grammar in llguidance's own words. Raises ValueError."""
    if kind in ("json_schema", "lark"):
        _check_multiples(text)
    if kind == "json_object":
        return _json('{"type": "object"}', tokenizer)
    if kind == "json_schema":
        return _json(text, tokenizer)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ValueError("a choice is a list of strings, none of them empty")
        # One terminal. As a rule each string is an item of the parser, and it takes 2,000 at once.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
    return LLMatcher.grammar_from_lark(_closed_within(any_to_lark(text), tokenizer))


def _json(text: str, tokenizer: LLTokenizer) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"no answer can satisfy {text:.20}, a schema is an object")
    own = schema.get("x-guidance")
    # A default pattern would win over "whitespace_flexible": false.
    chosen = isinstance(own, dict) and any(name.startswith("whitespace_") for name in own)
    defaults: JsonCompileOptions | None = None if chosen else {"whitespace_pattern": _WHITESPACE}
    # The schema is passed as text because llguidance refuses Python's integers above 64 bits.
    return LLMatcher.grammar_from_json_schema(json.dumps(_closed(schema, schema, tokenizer)), defaults=defaults)


def _closed_within(text: str, tokenizer: LLTokenizer) -> str:
    """The same Lark grammar, with `_closed` schemas behind `%json`."""
    parts, end = [], 0
    for found in _SCHEMA.finditer(text):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:  # a text of the grammar, or llguidance's to refuse
            continue
        if (closed := _closed(schema, schema, tokenizer)) != schema:
            parts += [text[end : found.end()], json.dumps(closed)]
            end = after
    return "".join([*parts, text[end:]])


def _closed(schema: Any, root: Mapping[str, Any], tokenizer: LLTokenizer) -> Any:
    """The same schema, with objects closed whose patterns match no name but those of their properties.

    llguidance would let a comma through behind the last property, and nothing after it
    (https://github.com/guidance-ai/llguidance/issues/265).
    """
    if isinstance(schema, list):
        return [_closed(each, root, tokenizer) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: _closed(each, root, tokenizer) for name, each in value.items()}
        else:
            made[key] = value if key in _PLAIN else _closed(value, root, tokenizer)
    patterns, properties = made.get("patternProperties"), made.get("properties", {})
    if not patterns or not isinstance(patterns, dict) or not isinstance(properties, dict):
        return made
    names = [*properties, *(n for n in made.get("required", ()) if isinstance(n, str) and n not in properties)]
    if not names or not _is_complete(names, made, root, tokenizer):
        return made
    others = made.get("additionalProperties", True)
    del made["patternProperties"]
    made["properties"] = {}
    for name in names:
        parts = [properties[name]] if name in properties else []
        parts += [each for pattern, each in patterns.items() if re.search(pattern, name)]
        made["properties"][name] = {"allOf": parts} if len(parts) > 1 else (parts or [others])[0]
    return {**made, "additionalProperties": False}


def _is_complete(
    names: Sequence[str], schema: Mapping[str, Any], root: Mapping[str, Any], tokenizer: LLTokenizer
) -> bool:
    """Whether no object of a schema has a member of another name than these."""
    given = ("patternProperties", "additionalProperties")
    other = {
        **{key: root[key] for key in ("$schema", "$defs", "definitions") if key in root},
        **{key: schema[key] for key in given if key in schema},
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False},
    }
    matcher = matcher_of(LLMatcher.grammar_from_json_schema(json.dumps(other)), tokenizer)
    if matcher.is_error():
        return "Unsatisfiable" in matcher.get_error()
    matcher.try_consume_tokens(tokenizer.tokenize_str("{"))
    return not any(matcher.compute_bitmask()) or "NoExtension" in matcher.get_error()


def _check_multiples(text: str) -> None:
    plain = re.sub(r"\\u00([0-7][0-9a-fA-F])", lambda found: chr(int(found[1], 16)), text)
    for number in _MULTIPLE.findall(plain):
        mantissa = re.split("[eE]", number)[0].replace(".", "").strip("-0") or "0"
        if int(mantissa) > _MAX_MULTIPLE or float(number) > _MAX_MULTIPLE:
            raise ValueError(f"multipleOf {number} is not served: an automaton of so many states would be needed")
