"""Where a JSON value ends, in text that arrives in pieces, and what a call's object says once it is whole."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = ("arguments", "parameters")  # keys of a call's arguments: models write either
_ABOUT_CALLS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["<]|\\.?', re.DOTALL)
_COLON = re.compile(r"\s*:\s*")
_MAX_ESCAPE = 12  # characters that the last escape of a JSON string takes at most
_DECODER = json.JSONDecoder(strict=False)


class JsonValue:
    """Finds where a JSON value ends, in text that arrives in pieces. Brackets and strings are followed, no more.

    Outside a string one of `stops` ends it too, for a value whose brackets the model forgot to close. A value that has
    no other end ends at the first stop in a string, for the model may have forgotten a quote. A value that is neither a
    string nor in brackets never ends. `depth`: brackets that were opened before the text.
    """

    def __init__(self, stops: tuple[str, ...], *, depth: int = 0) -> None:
        self._stops = tuple(s for s in stops if s.startswith("<"))
        self._longest = max(map(len, self._stops), default=0)
        self._depth = depth
        self._in_string = False
        self._scanned = 0  # characters of the next text that were looked at before
        self._perhaps: int | None = None  # the place in that text of the first stop in a string
        self.fresh = True

    def scan(self, text: str, *, final: bool = False) -> tuple[int, bool | None]:
        """Return how much of `text` belongs to the value, and True at its end, False at a stop, None if it goes on.

        Text beyond that must come again with more behind it; none will come if `final`.
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
                return place, None  # the escaped character has not come
            place = found.end()
        return len(text), None


def unquoted(text: str) -> str:
    """The text that a JSON string stands for, which may have been cut off; as it is if it is none."""
    for size in range(len(text), max(0, len(text) - _MAX_ESCAPE), -1):
        for end in ("", '"'):
            try:
                found = str(json.loads(text[:size] + end, strict=False))
                found.encode()
                return found
            except ValueError:  # half of a pair of surrogates too
                continue
    return text


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call that is a JSON object. `others`: its other members, by key, as they are written."""

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
    """The values of a JSON object by key, as they are written; None if it is no object."""
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
        assert match is not None, "a colon follows a key"
        _, place = _DECODER.raw_decode(text, match.end())
        found[key] = text[match.end() : place]
    return found


def valid_json(text: str, value: Any) -> str:
    """The JSON text of `value`, which was read from `text`: as it is written, but for control characters in strings."""
    try:
        json.loads(text)
    except ValueError:
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(value)
    return text
