"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and the older `guided_*`, as one grammar.

A request has at most one of them. Errors that need no compiler are found here. The worker compiles the grammar, and its
errors become a 400 too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeyard_router.errors import bad_request
from moeyard_router.text import exact_json
from moeyard_router.text.answer_grammar import lost_integer
from moeyard_worker.protocol import MAX_GRAMMAR_BYTES, Grammar

_COMPACT = (("whitespace_flexible", False),)  # llguidance's option for JSON without white space
_Named = tuple[str, Grammar]  # a field's name and its grammar


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the fields of the request that it enforces."""

    grammar: Grammar
    fields: tuple[str, ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class JsonSchema(_Part):
    """`response_format.json_schema`. The schema applies whatever `strict` is. Name and description have no effect."""

    name: str
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Part):
    """vLLM's `structured_outputs`. `json` is a schema, as JSON or as its text."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # of vLLM's backends; here is one, without a fallback


class StructuredFields(BaseModel):
    """The fields of a request that constrain the answer's form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None


def constraint_of(request: StructuredFields) -> Constraint | None:
    """Return the request's constraint. Raises `ApiError` 400 for several, or for an invalid one."""
    found = [*_format(request.response_format), *_outputs(request.structured_outputs), *_guided(request)]
    if not found:
        return None
    (name, grammar), *others = found
    if others:
        other = others[0][0]
        raise bad_request(f"'{name}' and '{other}' are both given, one constraint at most is allowed", other)
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise bad_request(f"'{name}' has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed", name)
    return Constraint(grammar, (name,))


def _format(given: ResponseFormat | None) -> list[_Named]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", Grammar(kind="json_object"))]
    name = "response_format.json_schema"
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise bad_request(f"'{name}' with a schema is required by type json_schema", name)
    return [_schema(f"{name}.schema", given.json_schema.schema_, {})]


def _outputs(given: StructuredOutputs | None) -> list[_Named]:
    if given is None:
        return []
    fields = {name.removesuffix("_"): value for name, value in given}
    found = _each("structured_outputs.", fields, compact=bool(given.disable_any_whitespace))
    if not found:
        raise bad_request(
            "'structured_outputs': expected one of json, regex, choice, grammar, json_object", "structured_outputs"
        )
    return found


def _guided(request: StructuredFields) -> list[_Named]:
    prefix = "guided_"
    names = (name for name in StructuredFields.model_fields if name.startswith(prefix))
    return _each(prefix, {name.removeprefix(prefix): getattr(request, name) for name in names}, compact=False)


def _each(prefix: str, fields: Mapping[str, Any], *, compact: bool) -> list[_Named]:
    """Return the given constraints with their fields' names. An empty `whitespace_pattern` means `compact`."""
    found: list[_Named] = []
    pattern, schema, choice = (fields[name] for name in ("whitespace_pattern", "json", "choice"))
    if pattern is not None and schema is None:
        name = f"{prefix}whitespace_pattern"
        raise bad_request(f"'{name}' is allowed only with a JSON schema", name)
    if schema is not None:
        compact = compact or pattern == ""
        blanks = dict(_COMPACT) if compact else {} if pattern is None else {"whitespace_pattern": pattern}
        found.append(_schema(f"{prefix}json", schema, blanks))
    for name, kind in (("regex", "regex"), ("grammar", "lark")):
        text = fields[name]
        if text is not None:
            if not text.strip():
                raise bad_request(f"'{prefix}{name}' must not be empty", prefix + name)
            found.append((prefix + name, Grammar(kind=kind, text=text)))
    if choice is not None:
        name = f"{prefix}choice"
        if not choice or "" in choice:
            raise bad_request(f"'{name}': expected a list of strings, none of them empty", name)
        found.append((name, Grammar(kind="choice", text=exact_json.dumps(list(dict.fromkeys(choice))).decode())))
    if fields["json_object"]:
        found.append((f"{prefix}json_object", Grammar(kind="json_object")))
    return found


def check_constants(schema: Any, name: str) -> None:
    """Raise `ApiError` 400 naming a field whose schema has an integer constant that grammars cannot enforce."""
    lost = lost_integer(schema)
    if lost is not None:
        message = f"'{name}': no grammar can hold an answer to the constant {lost!s:.80}: its digits exceed a double"
        raise bad_request(message, name)


def _schema(name: str, given: Any, blanks: dict[str, Any]) -> _Named:
    """Return the grammar of a schema, given as JSON or as its text (as in vLLM), with its white space options."""
    schema = given
    if isinstance(given, str):
        try:
            schema = exact_json.loads(given)
        except ValueError as error:
            raise bad_request(f"'{name}' is not valid JSON: {error}", name) from error
    if not isinstance(schema, dict | bool):
        raise bad_request(f"'{name}' must be a JSON object or a boolean, got {exact_json.kind_of(schema)}", name)
    check_constants(schema, name)
    if blanks and isinstance(schema, dict):
        schema = {**schema, "x-guidance": blanks}
    try:
        return name, Grammar(kind="json_schema", text=exact_json.dumps(schema).decode())
    except TypeError as error:
        raise bad_request(f"'{name}' is nested too deeply", name) from error
