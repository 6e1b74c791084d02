"""An answer's text taken apart: what of it is reasoning, content and calls of tools."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moeyard_router.text.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextEvent, joined
from moeyard_router.text.reasoning import END_THINK, ReasoningFormat, ReasoningParser
from moeyard_router.text.tool_calls import ToolCallParser
from moeyard_router.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """How the choices of one request are taken apart.

    `visible`: bytes by token id, where the markers' own special tokens can be seen. `inside`: the prompt ends within
    the block of `reasoning`. `schemas`: of the functions' arguments, by name.
    `id_seed`: letters and digits that make ids of calls, one request's unlike another's.
    `named`: the function whose arguments all content is.
    `one_call`: calls after a choice's first are left out. `hide_reasoning`: so is what the model thinks.
    `calls_end_reasoning`: a call that begins within the block ends it, of families that write such.
    `ends_as_tool_calls`: whether an output with calls that ended by itself has the finish reason "tool_calls".
    """

    visible: list[bytes]
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    tools: ToolFormat | None = None
    named: str | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    one_call: bool = False
    hide_reasoning: bool = False
    calls_end_reasoning: bool = False
    ends_as_tool_calls: bool = True
    id_seed: str = ""

    def call_id(self, choice: int, index: int) -> str:
        """The id of call `index` of a choice, for families whose models write none."""
        length = self.tools.id_length if self.tools else None
        number = f"{choice:02x}{index:02x}"
        return "call_" + self.id_seed + number if length is None else self.id_seed[: length - len(number)] + number


class _NamedCall:
    """Reads content as the arguments of one call of a function, as vLLM does where `tool_choice` names it."""

    def __init__(self, name: str, call_id: str) -> None:
        self._begin = CallBegin(0, call_id, name)
        self._begun = False

    def push(self, text: str) -> list[TextEvent]:
        text = text if self._begun else text.lstrip()
        if not text:
            return []
        head: list[TextEvent] = [] if self._begun else [self._begin]
        self._begun = True
        return [*head, CallArguments(0, text)]

    def finish(self) -> list[TextEvent]:
        return [CallEnd(0)] if self._begun else []


class Extractor:
    """Takes one choice apart; its joined events do not depend on how the text was cut. `called`: a call has begun."""

    def __init__(self, extraction: Extraction, choice: int) -> None:
        self.called = False
        self._extraction = extraction
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolCallParser | _NamedCall | None = None
        self._unclosed = False  # a call began within the block; the block's end may follow all the same
        if extraction.reasoning is not None:
            unthought = extraction.tools.unthought if extraction.tools and extraction.calls_end_reasoning else ""
            ends = [unthought] if unthought else []
            self._reasoning = ReasoningParser(extraction.reasoning, inside=extraction.inside, more_ends=ends)
        if extraction.tools is not None:
            self._tools = ToolCallParser(
                extraction.tools, call_id=lambda index: extraction.call_id(choice, index), schemas=extraction.schemas
            )
        elif extraction.named is not None:
            self._tools = _NamedCall(extraction.named, extraction.call_id(choice, 0))

    @property
    def thinks(self) -> bool:
        """Whether the text has come into the block of reasoning, and not out of it."""
        return self._reasoning is not None and self._reasoning.in_block

    def push(self, text: str) -> list[TextEvent]:
        events: list[TextEvent] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._shown(self._with_calls(events))

    def finish(self) -> list[TextEvent]:
        events = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return self._shown(events)

    def _with_calls(self, events: list[TextEvent]) -> list[TextEvent]:
        if self._tools is None:
            return events
        early = self._reasoning is not None and self._reasoning.ended_early
        if early and not self._unclosed and isinstance(self._tools, ToolCallParser):
            self._unclosed = True
            self._tools.expect(END_THINK)
        out: list[TextEvent] = []
        for event in events:
            out += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return out

    def _shown(self, events: list[TextEvent]) -> list[TextEvent]:
        out: list[TextEvent] = []
        for event in events:
            self.called = self.called or isinstance(event, CallBegin)
            if isinstance(event, Reasoning) and self._extraction.hide_reasoning:
                continue
            later = isinstance(event, CallBegin | CallArguments | CallEnd) and event.index > 0
            if not (later and self._extraction.one_call):
                out.append(event)
        return joined(out)
