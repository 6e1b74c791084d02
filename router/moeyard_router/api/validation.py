"""Validate request bodies: a model of the body, or an error that names the field at fault."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moeyard_router.api.fields import Strict
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text import exact_json

MAX_MESSAGES = 8192  # messages of a chat, and content parts of all its messages
MAX_STOP_CHARACTERS = 1024  # of one stop string; as much text is held back while it may become one
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # OpenAI allows 300; each sequence of a request carries them
_SIZES = (
    ("messages", "messages", MAX_MESSAGES),
    ("input", "messages", MAX_MESSAGES),  # of the Responses API
    ("stop_token_ids", "ids", MAX_STOP_TOKENS),
    ("logit_bias", "tokens", MAX_BIASES),
)


def check_sizes(data: Mapping[str, Any]) -> None:
    """Raise `ApiError` 400 naming a field with too many entries. Wrong types are left to the models."""
    for name, unit, limit in _SIZES:
        if isinstance(value := data.get(name), list | dict):
            _check(name, len(value), unit, limit)
    for name in ("messages", "input"):
        if isinstance(messages := data.get(name), list):
            contents = (message.get("content") for message in messages if isinstance(message, dict))
            parts = sum(len(content) for content in contents if isinstance(content, list))
            _check(name, parts, "parts of content", MAX_MESSAGES)
    for name in ("stop", "stop_sequences"):
        stop = data.get(name)
        for text in stop[:MAX_STOP_TOKENS] if isinstance(stop, list) else [stop]:
            if isinstance(text, str):
                _check(name, len(text), "characters in a stop string", MAX_STOP_CHARACTERS)


def _check(param: str, count: int, unit: str, limit: int) -> None:
    if count > limit:
        raise bad_request(f"'{param}': {count} {unit}, at most {limit} are allowed", param)


RequestT = TypeVar("RequestT", bound=Strict)
_MAX_NAMED = 32  # unknown fields that the answer names
_UNPRINTABLE = re.compile(r"[^\w.$-]", re.ASCII)
# Names of token ids in APIs of model servers, and the fields that take them here.
_IDS = frozenset(("ids", "input_ids", "prompt_token_ids", "token_ids", "tokens"))
_TAKE_IDS = frozenset(("prompt", "token_ids", "tokens"))
_Place = tuple[int | str, ...]
# JSON's names of the types in errors of pydantic, which says "list", and "dictionary" or a class.
_EXPECTED = MappingProxyType(
    {"list_type": "an array", **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object")}
)


def parse(body: bytes, kind: type[RequestT], *, ignore_unknown: bool = False) -> RequestT:
    """Parse and validate a body. `ignore_unknown`: drop unknown fields and name them. Raises `ApiError` 400."""
    try:
        data = exact_json.loads(body)
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request(f"the request body must be a JSON object, got {exact_json.kind_of(data)}")
    check_sizes(data)
    return _without_unknown(data, kind) if ignore_unknown else validate(data, kind)


def validate(data: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Validate a parsed body. Raises `ApiError` 400 naming the first field at fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
        raise _as_api_error(details[0], kind, map(_path, unknown[:_MAX_NAMED])) from error


def _without_unknown(data: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Validate a parsed body repeatedly, each time without the unknown fields found before."""
    names: dict[str, None] = {}
    while True:
        try:
            request = kind.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            found = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
            if not [place for place in found if _removed(data, place)]:
                first = error.errors(include_url=False, include_context=False)[0]
                raise _as_api_error(first, kind, list(names)[:_MAX_NAMED]) from error
            names |= dict.fromkeys(map(_path, found))
        else:
            dropped = (*request.dropped, *list(names)[:_MAX_NAMED])
            return request.model_copy(update={"dropped": dropped}) if names else request


def _removed(data: Any, place: _Place) -> bool:
    *path, last = place
    for step in path:
        if not (step in data if isinstance(data, dict) else isinstance(data, list) and isinstance(step, int)):
            return False
        data = data[step]
    there = isinstance(data, dict) and last in data
    if there:
        del data[last]
    return there


def _means(name: str, param: str) -> bool:
    """Return whether an unknown field's name probably stands for the field `param`."""
    return (name in _IDS and param in _TAKE_IDS) or bool(difflib.get_close_matches(name, [param], cutoff=0.75))


def _path(place: _Place) -> str:
    """Return a field's path for a header: without indices and without characters that headers must not contain."""
    return _UNPRINTABLE.sub("?", ".".join(step for step in place if isinstance(step, str)))[:64] or "?"


def _names_at(kind: type[BaseModel], path: Sequence[int | str]) -> frozenset[str]:
    """Return the names of the fields of the object at a place in `kind`, none if that place is not known."""
    for step in path:
        if isinstance(step, str):
            field = kind.model_fields.get(step)
            found = [part for part in _parts(field.annotation) if issubclass(part, BaseModel)] if field else []
            if len(found) != 1:
                return frozenset()
            kind = found[0]
    return kind.plain if issubclass(kind, Strict) else frozenset(kind.model_fields)


def _parts(annotation: Any) -> list[type]:
    """Return the classes that an annotation mentions."""
    parts = [part for each in get_args(annotation) for part in _parts(each)]
    return [annotation, *parts] if isinstance(annotation, type) else parts


def _as_api_error(detail: ErrorDetails, kind: type[Strict], unknown: Iterable[str]) -> ApiError:
    """Return the answer to an error of a body of `kind` with these unknown fields."""
    # An error of a whole model has no location. The models' validators give the field's name as its type.
    param = ".".join(str(part) for part in detail["loc"]) if detail["loc"] else detail["type"]
    message = f"'{param}': {detail['msg']}"
    if detail["type"] == "extra_forbidden":
        *path, name = detail["loc"]
        close = difflib.get_close_matches(str(name)[:64], _names_at(kind, path), n=1, cutoff=0.75)
        hint = f"; did you mean '{'.'.join(map(str, [*path, close[0]]))}'?" if close else ""
        message = f"unknown or unsupported field '{param}'{hint}"
    elif detail["type"] in _EXPECTED:
        message = f"'{param}': expected {_EXPECTED[detail['type']]}, got {exact_json.kind_of(detail['input'])}"
    elif detail["type"] in ("too_short", "too_long"):
        message = message.replace("List", "Array").replace(" after validation", "")
    elif detail["type"] == "literal_error" and isinstance(detail["input"], str):
        message += f", got '{detail['input']:.40}'"
    elif detail["type"] == "missing":
        other = next((name for name in unknown if _means(name, param)), None)
        message = f"'{param}' is required" + (f": send '{other}' as '{param}'" if other else "")
    elif detail["type"] == "refused":
        message = f"'{param}' {detail['msg']}"
    return bad_request(message, param)
