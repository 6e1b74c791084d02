"""Finds the end of a JSON value in text that arrives in pieces, and reads a call from a complete object."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = ("arguments", "parameters")  # models use either key for a call's arguments
_ABOUT_CALLS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["<]|\\.?', re.DOTALL)
_COLON = re.compile(r"\s*:\s*")
_MAX_ESCAPE = 12  # characters of the longest escape in a JSON string, a surrogate pair
_DECODER = json.JSONDecoder(strict=False)


class JsonValue:
    """Finds the end of a JSON value in text that arrives in pieces. Tracks only brackets and strings.

    Outside a string, one of `stops` also ends the value, because models forget closing brackets. A value without
    another end ends at the first stop inside a string, because models forget quotes. A value that is neither a string
    nor in brackets never ends. `depth`: number of brackets that are open before the text.
    """

    def __init__(self, stops: tuple[str, ...], *, depth: int = 0) -> None:
        self._stops = tuple(s for s in stops if s.startswith("<"))
        self._longest = max(map(len, self._stops), default=0)
        self._depth = depth
        self._in_string = False
        self._scanned = 0  # characters of the next text that were scanned before
        self._perhaps: int | None = None  # position in that text of the first stop inside a string
        self.fresh = True

    def scan(self, text: str, *, final: bool = False) -> tuple[int, bool | None]:
        """Return how much of `text` belongs to the value, and True at its end, False at a stop, None if it continues.

        The caller passes the text beyond that again, with more text behind it. With `final` no more text follows.
        """
        self.fresh = self.fresh and not text
        end, ended = self._scan(text)
        if ended is None:
            self._scanned = end
            if self._perhaps is not None:
                end, ended = self._perhaps, False if final else None
                self._perhaps = 0
            self._scanned -= end
        return end, ended

    def _scan(self, text: str) -> tuple[int, bool | None]:
        place = self._scanned
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, place):
            place, char = found.start(), found[0]
            if char == "<":
                rest = text[place : place + self._longest]
                if rest.startswith(self._stops):
                    if not self._in_string:
                        return place, False
                    self._perhaps = place if self._perhaps is None else self._perhaps
                elif any(s.startswith(rest) for s in self._stops):
                    return place, None
            elif char == '"':
                self._in_string = not self._in_string
                if not self._in_string and not self._depth:
                    return place + 1, True
            elif char[0] != "\\":
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return place + 1, True
            elif len(char) == 1:
                return place, None  # the escaped character is missing
            place = found.end()
        return len(text), None


def unquoted(text: str) -> str:
    """Return the value of a JSON string that may have been cut off. Another text is returned unchanged."""
    for size in range(len(text), max(0, len(text) - _MAX_ESCAPE), -1):
        for end in ("", '"'):
            try:
                found = str(json.loads(text[:size] + end, strict=False))
                found.encode()
                return found
            except ValueError:  # also for half of a surrogate pair
                continue
    return text


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call that is a JSON object. `others`: the text of its other members, by key."""

    name: str
    arguments: str
    others: Mapping[str, str]


def read_call(text: str) -> ObjectCall | None:
    """Return the call that a JSON object describes. None if it is not a call, or if its arguments are ambiguous."""
    members = members_of(text) or {}
    name = _DECODER.decode(members.pop("name", "null"))
    if not isinstance(name, str) or not name.isprintable() or not name:
        return None
    keys = [key for key in ARGUMENTS if key in members]
    if not keys:
        return None if members.keys() - _ABOUT_CALLS else ObjectCall(name, "{}", members)
    key = next((key for key in keys if _DECODER.decode(members[key])), keys[0])
    written = members.pop(key)
    value = _DECODER.decode(written)
    if isinstance(value, str):
        return ObjectCall(name, unquoted(written) if value.strip() else "{}", members)
    if value is not None and not isinstance(value, dict):
        return None
    return ObjectCall(name, valid_json(written, value) if value else "{}", members)


def members_of(text: str) -> dict[str, str] | None:
    """Return the texts of a JSON object's values by key, or None if it is no object."""
    try:
        if not isinstance(_DECODER.decode(text), dict):
            return None
    except (ValueError, RecursionError):
        return None
    found: dict[str, str] = {}
    place = text.index("{") + 1
    while (start := text.find('"', place)) >= 0:
        key, place = _DECODER.raw_decode(text, start)
        match = _COLON.match(text, place)
        assert match is not None, "a key without a colon"
        _, place = _DECODER.raw_decode(text, match.end())
        found[key] = text[match.end() : place]
    return found


def valid_json(text: str, value: Any) -> str:
    """Return `text`, from which `value` was read, as valid JSON. It may have control characters in strings."""
    try:
        json.loads(text)
    except ValueError:
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(value)
    return text
