"""Calls of tools in the text of an answer, found while it arrives.

A family marks a call by strings before and after it, and most by a second pair around all calls. One machine reads
them all; what a family is like is a `ToolFormat` (tool_formats.py). A call is announced as soon as its head is whole,
and its arguments are passed on as they come. Until then nothing is certain: text that begins like a call and goes on
otherwise comes out as content, to the last character. Where the text was cut into pieces makes no difference.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeyard_router.text.events import (
    MAX_BLANK,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    TextEvent,
    held_back,
    joined,
)
from moeyard_router.text.json_value import JsonValue, read_call, unquoted
from moeyard_router.text.parameters import ParameterMarkup, ParameterReader

MAX_HEAD = 1024  # characters between a call's first marker and its arguments; what is longer is no call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes calls: [section_begin] (call_begin head arguments closing call_end)+ [section_end].

    `head` matches what is between `call_begin` and the arguments, with a group `name` and perhaps `id`; it must end
    before the arguments' first character, never look further and match in one way only; `inner` are the markers in it.
    `between` and `closing` are characters without a meaning that may stand around calls and behind arguments. With
    `whole`, a call is a JSON object of `name` and `arguments`, which is read in one piece if its keys come in another
    order than `head` has them. With `parameters`, arguments are written one by one; those that are one JSON object all
    the same are read too. `id_length`: the family's templates take ids of so many letters and digits only.
    `written` is how the family's own templates write a call, in three parts: before the function's name, from there to
    the arguments ({index} is the call's number), and behind these; `opening` stands before the first call, `joint`
    between two. `unthought` is the beginning of a call that models of the family also make while they think, without
    the end of that.
    """

    name: str
    call_begin: str
    call_end: str
    head: re.Pattern[str]
    written: tuple[str, str, str]
    opening: str = ""
    joint: str = ""
    unthought: str = ""
    inner: tuple[str, ...] = ()
    section_begin: str = ""
    section_end: str = ""
    between: str = " \t\r\n"
    closing: str = " \t\r\n"
    whole: bool = False
    id_length: int | None = None
    parameters: ParameterMarkup | None = None

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that end content: the section's, and a call's own where it cannot be mistaken."""
        own = (self.call_begin,) if len(self.call_begin) > 1 else ()
        return (self.section_begin, *own) if self.section_begin else own

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings that must be seen in the text, special tokens or not."""
        given = (self.section_begin, self.call_begin, *self.inner, self.call_end, self.section_end)
        return tuple(dict.fromkeys(m for m in given if len(m) > 1))


class ToolCallParser:
    """Reads one choice. `call_id` makes the id of call `index` where the model writes none.

    `schemas` are those of the functions' arguments, by name: what a value is that is written bare.
    """

    def __init__(
        self, form: ToolFormat, *, call_id: Callable[[int], str], schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._form = form
        self._call_id = call_id
        self._schemas = schemas or {}
        self._reader: ParameterReader | None = None
        self._calls = 0
        self._buffer = ""  # text not yet understood
        self._claimed = ""  # text before it that is part of a call if one follows, and content otherwise
        self._in_section = False
        self._value = JsonValue(())
        self._pieces: list[str] = []  # of a call or arguments that can be passed on only once they are whole
        self._state = self._content

    def push(self, text: str) -> list[TextEvent]:
        """What became certain with the next piece of text."""
        self._buffer += text
        out: list[TextEvent] = []
        while self._state(out):
            pass
        return joined(out)

    def finish(self) -> list[TextEvent]:
        """What was held back, once no text follows; a call that was begun ends here."""
        rest, self._buffer = "".join((self._claimed, *self._pieces, self._buffer)), ""
        self._claimed, self._pieces = "", []
        if self._state == self._arguments:
            return joined([CallArguments(self._calls - 1, rest), CallEnd(self._calls - 1)])
        if self._state == self._parameters and self._reader is not None:
            return joined([CallArguments(self._calls - 1, self._reader.finish(rest)), CallEnd(self._calls - 1)])
        if self._state == self._closing:
            return [CallEnd(self._calls - 1)]
        if self._calls and not rest.strip(self._form.between if self._state == self._section else None):
            return []
        return joined([Content(rest)])

    def _content(self, out: list[TextEvent]) -> bool:
        """Until a marker. White space waits too: before a call, or after the last one, it is no content."""
        text, form = self._buffer, self._form
        found = [(i, opener) for opener in form.openers if (i := text.find(opener)) >= 0]
        place = min(found)[0] if found else len(text) - held_back(text, form.openers)
        keep = max(len(text[:place].rstrip()), place - MAX_BLANK)
        out.append(Content(text[:keep]))
        if not found:
            self._buffer = text[keep:]
            return False
        opener = min(found)[1]
        self._claimed, self._buffer = text[keep:place] + opener, text[place + len(opener) :]
        # A call that is written bare may end as one within a section all the same, where the section is the call's own.
        self._in_section = bool(form.section_end) and (opener != form.call_begin or form.parameters is not None)
        self._state = self._head if opener == form.call_begin else self._section
        return True

    def _section(self, out: list[TextEvent]) -> bool:
        """Before a call of a section, or behind its last one."""
        form = self._form
        blank = len(self._buffer) - len(self._buffer.lstrip(form.between))
        self._claim(min(blank, MAX_HEAD - len(self._claimed)))
        text = self._buffer
        if text.startswith(form.call_begin):
            self._claim(len(form.call_begin))
            self._state = self._head
            return True
        first = self._claimed.lstrip().startswith(form.section_begin)
        if not first and text.startswith(form.section_end):
            self._claimed, self._buffer = "", text[len(form.section_end) :]
            self._state = self._content
            return True
        if not first and text.startswith(form.section_begin):
            self._claim(len(form.section_begin))
            return True
        later = () if first else (form.section_begin, form.section_end)
        if any(marker.startswith(text) for marker in (form.call_begin, *later)):
            return False
        return self._give_up(out)

    def _head(self, out: list[TextEvent]) -> bool:
        """Behind a call's first marker."""
        text, form = self._buffer, self._form
        match = form.head.match(text[:MAX_HEAD])
        if match:
            self._begin(out, match["name"], match.groupdict().get("id"))
            self._buffer = text[match.end() :]
            stops = (form.call_end, form.section_end, form.call_begin)
            if form.parameters is not None and not self._buffer.startswith("{"):
                schema = self._schemas.get(match["name"], {})
                self._reader = ParameterReader(form.parameters, stops=(*stops, form.section_begin), schema=schema)
                self._state = self._parameters
                return True
            self._value = JsonValue(stops)
            self._state = self._arguments
            return True
        if form.whole and _may_be_object(form, text[:MAX_HEAD]):
            if len(text) < MAX_HEAD and not _has_object(form, text):
                return False
            self._value = JsonValue((form.call_end,))
            self._state = self._whole_call
            return True
        return self._give_up(out) if form.whole or len(text) >= MAX_HEAD or form.call_end in text else False

    def _whole_call(self, out: list[TextEvent]) -> bool:
        """A call whose keys come in an unusual order, so that it is known only once it is whole."""
        own = self._form.call_begin if len(self._form.call_begin) == 1 else ""  # the object's brace is the marker
        fresh = self._value.fresh
        end, ended = self._value.scan((own if fresh else "") + self._buffer)
        end -= len(own) if fresh else 0
        self._pieces.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if ended is None:
            return False
        text, self._pieces = "".join(self._pieces), []
        call = read_call(own + text)
        if call is None:
            self._buffer = text + self._buffer
            return self._give_up(out)
        name, arguments = call
        self._begin(out, name, None)
        out.append(CallArguments(self._calls - 1, arguments))
        self._buffer = "}" * len(own) + self._buffer  # where that brace is the last marker, it is still to be read
        self._state = self._closing
        return True

    def _parameters(self, out: list[TextEvent]) -> bool:
        """Within arguments that are written one by one."""
        assert self._reader is not None, "a head was read before"
        text, self._buffer, ended = self._reader.read(self._buffer)
        out.append(CallArguments(self._calls - 1, text))
        if ended:
            self._state = self._closing
        return ended

    def _arguments(self, out: list[TextEvent]) -> bool:
        """Within the arguments: an object that streams, or a JSON string with the object inside."""
        quoted = bool(self._pieces) or (self._value.fresh and self._buffer.startswith('"'))
        end, ended = self._value.scan(self._buffer)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if not quoted:
            out.append(CallArguments(self._calls - 1, text))
        else:
            self._pieces.append(text)
            if ended is not None:
                out.append(CallArguments(self._calls - 1, unquoted("".join(self._pieces))))
                self._pieces = []
        if ended is None:
            return False
        self._state = self._closing
        return True

    def _closing(self, out: list[TextEvent]) -> bool:
        """Behind the arguments: the call's last marker, which models forget at times."""
        form = self._form
        text = self._buffer.lstrip(form.closing)
        self._buffer = text
        if not text.startswith(form.call_end) and form.call_end.startswith(text):
            return False
        if text.startswith(form.call_end):
            self._buffer = text[len(form.call_end) :]
        out.append(CallEnd(self._calls - 1))
        self._state = self._section if self._in_section else self._content
        return True

    def _begin(self, out: list[TextEvent], name: str, call_id: str | None) -> None:
        out.append(CallBegin(self._calls, call_id or self._call_id(self._calls), name))
        self._calls += 1
        self._claimed = ""

    def _claim(self, size: int) -> None:
        self._claimed, self._buffer = self._claimed + self._buffer[:size], self._buffer[size:]

    def _give_up(self, out: list[TextEvent]) -> bool:
        """It was no call: what had been claimed for one is content, and what follows is read anew."""
        out.append(Content(self._claimed))
        self._claimed = ""
        self._state = self._content
        return True


def _may_be_object(form: ToolFormat, text: str) -> bool:
    """Whether the text behind a call's first marker, so far, may be that of a JSON object."""
    start = text.lstrip()
    return len(form.call_begin) == 1 or start.startswith("{") or not start


def _has_object(form: ToolFormat, text: str) -> bool:
    """Whether that text holds an object that has ended."""
    own = form.call_begin if len(form.call_begin) == 1 else ""
    return JsonValue((form.call_end,)).scan(own + text)[1] is not None
