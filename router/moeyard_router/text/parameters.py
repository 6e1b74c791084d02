"""Reads arguments that a family writes one by one, each between markers, and converts them to JSON.

Qwen3-Coder, DeepSeek-V3.2 and V4 write no JSON object, but a name followed by the plain value. A text becomes a JSON
string while it arrives. Any other value waits until it is complete, because only then it is clear whether it is the
expected JSON. The cuts between pieces make no difference.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeyard_router.text.events import held_back
from moeyard_router.text.json_value import valid_json

MAX_NAME = 512  # characters between the markers of a name; a longer text is no name
_DEPTH = 16  # of references and alternatives in the search for a type
_ANY = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarkup:
    """How a family writes arguments: (begin head value end)*.

    head: matches everything between `begin` and the value, with a group `name` and perhaps `string`: "true" for a text
        and "false" for JSON. Its last character, and no other, is ">".
    pad: text that may stand at either end of a value.
    cut: marker that ends a value whose own end the model forgot. It is read again.
    written: the two forms of `head` in the family's templates after the name: before a text, and before JSON.
    behind: text that follows `end` in the templates.
    """

    begin: str
    head: re.Pattern[str]
    end: str
    cut: str
    written: tuple[str, str]
    behind: str
    pad: str = ""


class ParameterReader:
    """Reads the arguments of one call.

    `call`: the markers of a call. `stops` end the arguments. `schema`: of the arguments; it says which ones are texts.

    A value may quote the markup, as code about such calls does. It ends at the first end marker that is followed by
    another parameter or a stop, and that is not part of a parameter or call within the value. If there is none, the
    value quotes half a call, or the model forgot the marker. Then it ends at the first possible place.
    """

    def __init__(
        self, markup: ParameterMarkup, *, call: tuple[str, str], stops: tuple[str, ...], schema: Mapping[str, Any]
    ) -> None:
        self._markup = markup
        self._call = call
        self._tags = (markup.end, markup.begin, *call)
        self._tag = re.compile("|".join(map(re.escape, self._tags)))
        self._stops = stops
        self._schema = schema
        self._count = 0
        self._types: frozenset[str] | None = None  # possible types of the present value
        self._fresh = False
        self._quoted = False  # whether the value is passed on as a string
        self._held = ""  # text of a value of unknown type
        self._scanned = 0  # characters of the value's text that were searched for markers
        self._inner: list[str] = []  # first markers within the value without their last markers
        self._perhaps: tuple[int, int] | None = None  # a possible end of the value, and of the marker there

    def read(self, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Return (new JSON, unread text, whether the arguments ended)."""
        pieces: list[str] = []
        more = True
        while more:
            if self._types is None:
                text, more, ended = self._between(pieces, text)
                if ended:
                    pieces.append("}" if self._count else "{}")
                    return "".join(pieces), text, True
            else:
                text, more = self._value(pieces, text, final=final)
        return "".join(pieces), text, False

    def finish(self, rest: str) -> str:
        """Return the rest of arguments that were cut off. `rest` is the text that was not understood."""
        if self._types is None:
            return ""
        return _escaped(rest) if self._quoted else self._held + rest

    def _between(self, pieces: list[str], text: str) -> tuple[str, bool, bool]:
        """Read a name or a stop."""
        text = text.lstrip()
        if text.startswith(self._stops):
            return text, False, True
        end = text.find(">")
        if end < 0 or not text.startswith(self._markup.begin):
            return text, False, False
        match = self._markup.head.fullmatch(text, len(self._markup.begin), end + 1)
        assert match is not None, "the caller has checked the head"
        self._begin(match, pieces)
        return text[end + 1 :], True, False

    def _begin(self, match: re.Match[str], pieces: list[str]) -> None:
        name, is_string = match["name"], match.groupdict().get("string")
        pieces.append(("{" if not self._count else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._count += 1
        self._types = {"true": frozenset(("string",)), "false": _ANY}.get(is_string or "")
        if self._types is None:
            self._types = parameter_types(self._schema, name)
        self._fresh, self._quoted, self._held = True, False, ""
        self._scanned, self._inner, self._perhaps = 0, [], None

    def _value(self, pieces: list[str], text: str, *, final: bool) -> tuple[str, bool]:
        markup = self._markup
        if self._fresh and text:
            text, self._fresh = text.removeprefix(markup.pad), False
        found = self._end(text, final=final)
        keep = found[0] if found else self._perhaps[0] if self._perhaps else self._scanned
        keep = len(text[:keep].removesuffix(markup.pad))
        self._take(pieces, text[:keep])
        if found is None:
            self._scanned -= keep
            if self._perhaps is not None:
                self._perhaps = (self._perhaps[0] - keep, self._perhaps[1] - keep)
            return text[keep:], False
        pieces.append('"' if self._quoted else value_as_json(self._held, self._types or _ANY))
        self._types = None
        return text[found[1] :], True

    def _end(self, text: str, *, final: bool) -> tuple[int, int] | None:
        """Return the end of the value and of its end marker, or None without an end. Updates `_scanned`."""
        markup, (begins, ends) = self._markup, self._call
        while match := self._tag.search(text, self._scanned):
            tag, (place, behind) = match[0], match.span()
            if tag == markup.end:
                follows = self._follows(text, behind)
                if follows is None and not final:
                    self._scanned = place
                    return None
                if follows is not False:
                    if not self._inner:
                        return place, behind
                    self._perhaps = self._perhaps or (place, behind)
                if self._inner and self._inner[-1] == markup.begin:
                    self._inner.pop()
            elif tag != ends:
                self._inner.append(tag)
            elif begins in self._inner:
                while self._inner.pop() != begins:
                    pass
            elif text.startswith(markup.cut, place) or (final and markup.cut.startswith(text[place:])):
                self._perhaps = self._perhaps or (place, place)
            elif markup.cut.startswith(text[place:]):
                self._scanned = place
                return None
            self._scanned = behind
        self._scanned = max(self._scanned, len(text) - held_back(text, self._tags))
        return self._perhaps if final else None

    def _follows(self, text: str, place: int) -> bool | None:
        """Return whether another parameter or a stop comes next. None if that needs more text."""
        begin = self._markup.begin
        rest = text[place : place + 2 * MAX_NAME]
        room = len(rest) < 2 * MAX_NAME
        rest = rest.lstrip()
        if rest.startswith(self._stops):
            return True
        if rest.startswith(begin):
            end = rest.find(">")
            if end < 0:
                return None if room else False
            return self._markup.head.fullmatch(rest, len(begin), end + 1) is not None
        return None if room and any(marker.startswith(rest) for marker in (begin, *self._stops)) else False

    def _take(self, pieces: list[str], text: str) -> None:
        if self._quoted:
            pieces.append(_escaped(text))
            return
        self._held += text
        types = self._types or _ANY
        # A text that may also be null is a text as soon as it cannot become the word "null".
        null = "null" in types and "null".startswith(self._held.strip().lower())
        if "string" in types and types <= {"string", "null"} and not null:
            pieces.append('"' + _escaped(self._held))
            self._quoted, self._held = True, ""


def value_as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON of one of `types` (empty: any), or else as a string. Accepts Python's constants."""
    bare = text.strip()
    word = {"none": "null"}.get(bare.lower(), bare.lower())
    kind = {"true": "boolean", "false": "boolean", "null": "null"}.get(word)
    if kind is not None and (kind in types or "string" not in types):
        return word
    try:
        value = json.loads(bare, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and "string" in types and not _kinds(value) & (types - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return valid_json(bare, value)


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that the arguments' `schema` allows for parameter `name`. Empty for any type."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    return json_types(properties[name] if isinstance(properties, Mapping) and name in properties else others, schema)


def json_types(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> frozenset[str]:
    """Return the JSON types that `schema` allows. Empty for any type. `root` resolves references."""
    if not isinstance(schema, Mapping) or not depth:
        return _ANY
    if isinstance(schema.get("$ref"), str):
        return json_types(_referred(schema["$ref"], root), root, depth - 1)
    given = schema.get("type")
    if given is not None:
        return frozenset(t for t in (given if isinstance(given, list) else [given]) if isinstance(t, str))
    if "const" in schema:
        return _kinds(schema["const"])
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(_kinds, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [json_types(each, root, depth - 1) for each in schema[key]]
            return frozenset().union(*found) if all(found) else _ANY
    if isinstance(schema.get("allOf"), list):
        return next(filter(None, (json_types(each, root, depth - 1) for each in schema["allOf"])), _ANY)
    return _ANY


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within the schema, or None for another reference."""
    place: Any = root if reference.startswith("#") else None
    for key in filter(None, reference[1:].split("/")):
        place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def _kinds(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("number", "integer") if value == value // 1 else ("number",))
    if value is None:
        return frozenset(("null",))
    return frozenset(("object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string",))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
