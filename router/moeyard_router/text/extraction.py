"""Splits an answer's text into reasoning, content and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moeyard_router.text.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextEvent, joined
from moeyard_router.text.reasoning import END_THINK, ReasoningFormat, ReasoningParser
from moeyard_router.text.tool_calls import ToolCallParser
from moeyard_router.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """How to split the choices of one request.

    visible: bytes by token id that include the markers' special tokens.
    inside: whether the prompt ends within the block of `reasoning`.
    schemas: the schemas of the functions' arguments, by name.
    id_seed: letters and digits for ids of calls, different for each request.
    named: the function whose arguments are the whole content.
    one_call: whether to drop calls after the first of a choice. `hide_reasoning`: whether to drop reasoning.
    calls_end_reasoning: whether a call within the block ends it, in families that write such calls.
    ends_as_tool_calls: whether a complete output with calls has the finish reason "tool_calls".
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
        """Return the id of call `index` of a choice, for families whose models write no ids."""
        length = self.tools.id_length if self.tools else None
        number = f"{choice:02x}{index:02x}"
        return "call_" + self.id_seed + number if length is None else self.id_seed[: length - len(number)] + number


class _NamedCall:
    """Reads content as the arguments of one call, as vLLM does if `tool_choice` names a function."""

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
    """Splits one choice. The cuts between pieces do not change its joined events. `called`: whether a call began."""

    def __init__(self, extraction: Extraction, choice: int) -> None:
        self.called = False
        self._extraction = extraction
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolCallParser | _NamedCall | None = None
        self._unclosed = False  # a call began within the block, and the block's end marker may still follow
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
        """Whether the text is inside the block of reasoning."""
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
