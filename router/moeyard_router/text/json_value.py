"""Where a JSON value ends, in text that arrives in pieces, and what a call's object says once it is whole."""

import json
import re

_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["\\]')


class JsonValue:
    """Finds where a JSON value ends, in text that arrives in pieces. Brackets and strings are followed, no more.

    Outside a string one of `stops` ends it too, for a value whose brackets the model forgot to close. A value that is
    neither a string nor in brackets never ends.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(s for s in stops if s.startswith("<"))
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.fresh = True

    def scan(self, text: str) -> tuple[int, bool | None]:
        """Take more of the value: how much of `text` belongs to it, and True if it ended, False if a stop ended it.

        None: it goes on; text beyond what was taken must come again, with more behind it.
        """
        place = 0
        while place < len(text):
            self.fresh = False
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return len(text), None
            place, char = found.start(), found[0]
            if char == "<":
                rest = text[place : place + max(map(len, self._stops), default=0)]
                if rest.startswith(self._stops):
                    return place, False
                if any(s.startswith(rest) for s in self._stops):
                    return place, None
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
                if not self._in_string and not self._depth:
                    return place + 1, True
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return place + 1, True
            place += 1
        return len(text), None


def unquoted(text: str) -> str:
    """The text that a JSON string stands for; as it is if it is none."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's JSON object, or None if it is not one."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return call["name"], arguments
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments or {}, ensure_ascii=False)
