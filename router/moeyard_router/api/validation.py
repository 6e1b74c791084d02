"""From the bytes of a request body to one of its models, or to the error that names the field at fault."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from moeyard_router.api.fields import Strict
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text import exact_json

MAX_MESSAGES = 8192  # of a chat, and parts of their contents together
MAX_STOP_CHARACTERS = 1024  # of one stop string: so much text is held back while it may still become one
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # OpenAI allows 300; each sequence of a request carries them


def check_sizes(data: Mapping[str, Any]) -> None:
    """Raise `ApiError` 400 naming the field that has too many. Knows no types: what is no list is judged later."""
    for name in ("messages", "input"):  # of chats and Anthropic's messages; of responses
        messages = data.get(name)
        if isinstance(messages, list):
            _check(name, len(messages), "messages", MAX_MESSAGES)
            parts = 0
            for message in messages:
                content = message.get("content") if isinstance(message, dict) else None
                parts += len(content) if isinstance(content, list) else 0
            _check(name, parts, "parts of content", MAX_MESSAGES)
    for name in ("stop", "stop_sequences"):
        stop = data.get(name)
        for text in stop[:MAX_STOP_TOKENS] if isinstance(stop, list) else [stop]:
            if isinstance(text, str):
                _check(name, len(text), "characters in a stop string", MAX_STOP_CHARACTERS)
    ids = data.get("stop_token_ids")
    if isinstance(ids, list):
        _check("stop_token_ids", len(ids), "ids", MAX_STOP_TOKENS)
    bias = data.get("logit_bias")
    if isinstance(bias, dict):
        _check("logit_bias", len(bias), "tokens", MAX_BIASES)


def _check(param: str, count: int, what: str, limit: int) -> None:
    if count > limit:
        raise bad_request(f"'{param}': {count} {what}, at most {limit} are allowed", param)


RequestT = TypeVar("RequestT", bound=Strict)
_MOST_NAMED = 32  # unknown fields that the reply names
_UNPRINTABLE = re.compile(r"[^\w.$-]", re.ASCII)
_Place = tuple[int | str, ...]


def parse(body: bytes, kind: type[RequestT], *, ignore_unknown: bool = False) -> RequestT:
    """Validate a body; `ignore_unknown` drops and names unknown fields. Raises `ApiError` 400 naming a field."""
    try:
        data = exact_json.loads(body)
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request(f"the request body must be a JSON object, got {type(data).__name__}")
    check_sizes(data)
    return _without_unknown(data, kind) if ignore_unknown else validate(data, kind)


def validate(data: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Validate a parsed body; raises `ApiError` 400 naming the first field at fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False, include_context=False)[0], kind) from error


def _without_unknown(data: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Validate a parsed body as often as that finds unknown fields, and remove these from it."""
    names: dict[str, None] = {}
    while True:
        try:
            request = kind.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            found = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
            if not [place for place in found if _removed(data, place)]:
                raise _as_api_error(error.errors(include_url=False, include_context=False)[0], kind) from error
            names |= dict.fromkeys(map(_path, found))
        else:
            dropped = (*request.dropped, *list(names)[:_MOST_NAMED])
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


def _path(place: _Place) -> str:
    """The name of a field in a header: without indices, and without characters that a header must not have."""
    return _UNPRINTABLE.sub("?", ".".join(step for step in place if isinstance(step, str)))[:64] or "?"


def _as_api_error(detail: ErrorDetails, kind: type[Strict]) -> ApiError:
    # An error of a whole model has no location; its type is the field's name (see the validators above).
    param = ".".join(str(part) for part in detail["loc"]) if detail["loc"] else detail["type"]
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(param[:64], kind.plain, n=1, cutoff=0.75)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return bad_request(f"unknown or unsupported field '{param}'{hint}", param)
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        return bad_request(f"'{param}': {detail['msg']}, got '{detail['input']:.40}'", param)
    if detail["type"] == "missing":
        return bad_request(f"'{param}' is required", param)
    if detail["type"] == "refused":
        return bad_request(f"'{param}' {detail['msg']}", param)
    return bad_request(f"'{param}': {detail['msg']}", param)
