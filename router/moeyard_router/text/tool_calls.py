"""Finds tool calls in the text of an answer while it arrives.

Every family marks a call by strings before and after it, and most families use a second pair around all calls. One
state machine reads all families, each described by a `ToolFormat` (tool_formats.py). A call is reported once its head
is complete, and then its arguments as they arrive. Text that begins like a call and continues otherwise is content, to
the last character. So is a call in a fenced code block, which is an example. The cuts between pieces do not matter.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from moeyard_router.text.code_fence import CodeFence
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
from moeyard_router.text.json_value import ARGUMENTS, JsonValue, members_of, read_call, unquoted
from moeyard_router.text.parameters import ParameterReader
from moeyard_router.text.tool_formats import ToolFormat

MAX_HEAD = 1024  # characters between a call's first marker and its arguments; a longer head is no call
# The possibly incomplete beginning of other members after the arguments in a call's object.
_MEMBERS = re.compile(r'\s*(?:,\s*(?:"(?P<key>[^"\\]{0,64})(?:"\s*(?P<value>:.*)?)?)?)?', re.DOTALL)


class ToolCallParser:
    """Reads one choice. `call_id` makes ids if the model writes none. `schemas`: of the arguments, by function."""

    def __init__(
        self, form: ToolFormat, *, call_id: Callable[[int], str], schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._form = form
        self._openers = form.openers
        self._stops = (form.call_end, *form.section_ends, *form.openers)
        self._call_id = call_id
        self._schemas = schemas or {}
        self._schema: Mapping[str, Any] = {}  # of the last call
        self._reader: ParameterReader | None = None
        self._fence = CodeFence()
        self._strays: tuple[str, ...] = ()  # late end markers to leave out of the content
        self._final = False
        self._calls = 0
        self._buffer = ""  # text that is not parsed yet
        self._claimed = ""  # text before it that is part of a call if one follows, and content otherwise
        self._in_section = False
        self._value = JsonValue(())
        self._pieces: list[str] = []  # of a call or arguments that can be passed on only once they are complete
        self._state = self._content

    def push(self, text: str) -> list[TextEvent]:
        """Take the next piece of text. Return the events that are certain now."""
        self._buffer += text
        out: list[TextEvent] = []
        while self._state(out):
            pass
        return joined(out)

    def expect(self, *markers: str) -> None:
        """Leave the next occurrence of each of these markers out of the content."""
        self._strays = tuple(dict.fromkeys((*self._strays, *(m for m in markers if len(m) > 1))))

    def finish(self) -> list[TextEvent]:
        """Return the remaining events at the end of the text. An open call ends here."""
        self._final = True
        out = self.push("")
        end = CallEnd(self._calls - 1)
        if self._state == self._closing:
            return joined([*out, end, Content(self._claimed)])
        if self._state == self._members:
            match = _MEMBERS.fullmatch(self._buffer)
            lost = match is not None and self._is_argument(match["key"])
            return joined([*out, end, Content(self._buffer if lost else "")])
        rest, self._buffer = "".join((self._claimed, *self._pieces, self._buffer)), ""
        quoted = bool(self._pieces)
        self._claimed, self._pieces = "", []
        if self._state == self._arguments:
            return joined([*out, CallArguments(self._calls - 1, unquoted(rest) if quoted else rest), end])
        if self._state == self._parameters and self._reader is not None:
            return joined([*out, CallArguments(self._calls - 1, self._reader.finish(rest)), end])
        if self._calls and not rest.strip(self._form.between if self._state == self._section else None):
            return out
        return joined([*out, Content(rest)])

    def _content(self, out: list[TextEvent]) -> bool:
        """Read content up to a marker. White space is held back, because next to a call it is no content."""
        text = self._buffer
        markers = (*self._openers, *self._strays)
        found = [(i, marker) for marker in markers if (i := text.find(marker)) >= 0]
        place = min(found)[0] if found else len(text) - held_back(text, markers)
        keep = max(len(text[:place].rstrip()), place - MAX_BLANK)
        marker = min(found)[1] if found else ""
        behind = place + len(marker)
        if marker in self._strays:
            self._say(out, text[:place])
            self._buffer = text[behind:]
            self._do_not_expect(marker)
            return True
        if marker and self._fence.inside_after(text[:place]):
            self._say(out, text[:behind])
            self._buffer = text[behind:]
            return True
        self._say(out, text[:keep])
        if not marker:
            self._buffer = text[keep:]
            return False
        self._claimed, self._buffer = text[keep:behind], text[behind:]
        # A call without a section's first marker may still have its last one.
        self._in_section = bool(self._form.section_end)
        self._state = self._head if marker == self._form.call_begin else self._section
        return True

    def _section(self, out: list[TextEvent]) -> bool:
        """Read a section before a call, or after its last call."""
        form = self._form
        blank = len(self._buffer) - len(self._buffer.lstrip(form.between))
        self._claim(min(blank, MAX_HEAD - len(self._claimed)))
        text = self._buffer
        if text.startswith(form.call_begin):
            self._claim(len(form.call_begin))
            self._state = self._head
            return True
        first = self._claimed.lstrip().startswith(form.section_begins)
        for end in () if first else form.section_ends:
            if text.startswith(end):
                self._do_not_expect(*form.section_ends)
                self._claimed, self._buffer = "", text[len(end) :]
                self._state = self._content
                return True
        for begin in () if first else form.section_begins:
            if text.startswith(begin):
                self._claim(len(begin))
                return True
        later = () if first else (*form.section_begins, *form.section_ends)
        if any(marker.startswith(text) for marker in (form.call_begin, *later)):
            return False
        if not first:
            self.expect(*form.section_ends)
        return self._give_up(out)

    def _head(self, out: list[TextEvent]) -> bool:
        """Read the head of a call, after its first marker."""
        text, form = self._buffer, self._form
        match = form.head.match(text[:MAX_HEAD])
        if match:
            self._begin(out, match["name"], match.groupdict().get("id"))
            self._buffer = text[match.end() :]
            if form.parameters is not None and not self._buffer.startswith("{"):
                self._reader = ParameterReader(
                    form.parameters, call=(form.call_begin, form.call_end), stops=self._stops, schema=self._schema
                )
                self._state = self._parameters
                return True
            self._value = JsonValue(self._stops)
            self._state = self._arguments
            if not self._buffer.startswith(("{", '"')):
                out.append(CallArguments(self._calls - 1, "{}"))
                self._state = self._closing
            return True
        if form.whole and _may_be_object(form, text[:MAX_HEAD]):
            if len(text) < MAX_HEAD and not _has_object(form, text):
                return self._final and self._give_up(out)
            self._value = JsonValue((form.call_end,))
            self._state = self._whole_call
            return True
        certain = form.whole or len(text) >= MAX_HEAD or form.call_end in text or self._final
        return certain and self._give_up(out)

    def _whole_call(self, out: list[TextEvent]) -> bool:
        """Read a complete call whose keys have an unusual order."""
        own = self._form.call_begin if len(self._form.call_begin) == 1 else ""  # the marker is the object's brace
        fresh = self._value.fresh
        end, ended = self._value.scan((own if fresh else "") + self._buffer, final=self._final)
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
        self._begin(out, call.name, None)
        out.append(CallArguments(self._calls - 1, call.arguments))
        self._claimed = self._misplaced(call.others)
        self._buffer = "}" * len(own) + self._buffer  # the brace is also the last marker, which `_closing` reads
        self._state = self._closing
        return True

    def _parameters(self, out: list[TextEvent]) -> bool:
        """Read arguments that are written one by one."""
        assert self._reader is not None, "the head comes first"
        text, self._buffer, ended = self._reader.read(self._buffer, final=self._final)
        out.append(CallArguments(self._calls - 1, text))
        if ended:
            self._state = self._closing
        return ended

    def _arguments(self, out: list[TextEvent]) -> bool:
        """Read arguments: an object, which streams, or a JSON string that contains the object."""
        quoted = bool(self._pieces) or (self._value.fresh and self._buffer.startswith('"'))
        end, ended = self._value.scan(self._buffer, final=self._final)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if not quoted:
            out.append(CallArguments(self._calls - 1, text))
        else:
            self._pieces.append(text)
            if ended is not None:
                text = unquoted("".join(self._pieces))
                out.append(CallArguments(self._calls - 1, text if text.strip() else "{}"))
                self._pieces = []
        if ended is None:
            return False
        self._state = self._members if self._form.whole and ended else self._closing
        return True

    def _members(self, out: list[TextEvent]) -> bool:
        """Read other members, such as an id, after the arguments in a call's object."""
        text = self._buffer
        match = _MEMBERS.fullmatch(text)
        self._state = self._closing
        if match is None:
            return True
        members = JsonValue((self._form.call_end,), depth=1)
        end, ended = members.scan(text[:MAX_HEAD]) if match["value"] else (0, None)
        if ended is None and len(text) < MAX_HEAD:
            self._state = self._members
            return False
        size = end - 1 if ended else end  # without the object's brace, which models sometimes forget
        others = members_of("{" + text[:size].lstrip()[1:] + "}") if ended is not None else None
        if others is not None:
            self._claimed, self._buffer = self._misplaced(others), text[size:]
        return True

    def _closing(self, out: list[TextEvent]) -> bool:
        """Read the call's last marker, which models sometimes forget."""
        form = self._form
        text = self._buffer.lstrip(form.closing)
        self._buffer = text
        if not text.startswith(form.call_end) and form.call_end.startswith(text):
            return False
        out.append(CallEnd(self._calls - 1))
        self._say(out, self._claimed)
        self._claimed = ""
        self._state = self._section if self._in_section else self._content
        if text.startswith(form.call_end):
            self._buffer = text[len(form.call_end) :]
        elif form.whole and not self._in_section and text.startswith("{"):
            self._state = self._head  # another call between the same markers
        else:
            self.expect(form.call_end)
        return True

    def _begin(self, out: list[TextEvent], name: str, call_id: str | None) -> None:
        out.append(CallBegin(self._calls, call_id or self._call_id(self._calls), name))
        self._schema = self._schemas.get(name, {})
        self._fence.push("\n")  # text after the call begins a line
        self._do_not_expect(self._form.call_end)
        self._calls += 1
        self._claimed = ""

    def _misplaced(self, others: Mapping[str, str]) -> str:
        """Return the text of arguments among the other members of a call's object."""
        misplaced = {key: value for key, value in others.items() if self._is_argument(key) and value != "{}"}
        return ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in misplaced.items())

    def _is_argument(self, key: str | None) -> bool:
        """Return whether a member with this name in the last call's object holds arguments, or is an argument."""
        declared = self._schema.get("properties")
        return key in ARGUMENTS or (isinstance(declared, Mapping) and key in declared)

    def _say(self, out: list[TextEvent], text: str) -> None:
        self._fence.push(text)
        out.append(Content(text))

    def _do_not_expect(self, *markers: str) -> None:
        self._strays = tuple(stray for stray in self._strays if stray not in markers)

    def _claim(self, size: int) -> None:
        self._claimed, self._buffer = self._claimed + self._buffer[:size], self._buffer[size:]

    def _give_up(self, out: list[TextEvent]) -> bool:
        """Turn the claimed text into content, because it is not a call."""
        self._say(out, self._claimed)
        self._claimed = ""
        self._state = self._content
        return True


def _may_be_object(form: ToolFormat, text: str) -> bool:
    """Return whether the text after a call's first marker may be a JSON object."""
    start = text.lstrip()
    return len(form.call_begin) == 1 or start.startswith("{") or not start


def _has_object(form: ToolFormat, text: str) -> bool:
    own = form.call_begin if len(form.call_begin) == 1 else ""
    return JsonValue((form.call_end,)).scan(own + text)[1] is not None
