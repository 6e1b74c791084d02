"""The formats of one model's answers: named by the operator, or derived from its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass

from moeyard_router.text.chat import Codec
from moeyard_router.text.reasoning import END_THINK, REASONING_FORMATS, THINK, ReasoningFormat
from moeyard_router.text.tool_formats import TOOL_FORMATS, ToolFormat, reasoning_format_of, tool_format_of

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """The formats of a model's answers beyond plain text.

    tools, reasoning: None for a model without such a format, or with an unknown one.
    auto_tools: whether tool calls are parsed if `tool_choice` is "auto".
    shown: bytes by token id that include the markers of `tools` and `reasoning`. `shown_reasoning`: without those of
        `tools`.
    token_ids: the markers that are single tokens.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    auto_tools: bool
    shown: list[bytes]
    shown_reasoning: list[bytes]
    token_ids: Mapping[str, int]

    def visible(self, tools: ToolFormat | None) -> list[bytes]:
        """Return bytes by token id that include the markers of reasoning and of `tools`."""
        return self.shown if tools is not None and tools is self.tools else self.shown_reasoning

    def describe(self) -> str:
        tools = self.tools.name if self.tools else NONE
        return f"tool calls: {tools}, reasoning: {self.reasoning.name if self.reasoning else NONE}"


def answer_formats(
    codec: Codec, *, tools: str = AUTO, reasoning: str = AUTO, auto: bool | None = None
) -> AnswerFormats:
    """Return a model's formats by the names of parsers. "auto" derives a format from the chat template.

    Raises `ValueError` for an unknown name, and if `auto` requires a format of tool calls and none is known.
    """
    # The template for chats with tools comes first, because it shows the format of calls.
    found = dict.fromkeys((codec.tool_template, codec.template))
    template = "\n".join(each.source for each in found if each is not None)
    for what, name, known in (("tool", tools, TOOL_PARSERS), ("reasoning", reasoning, REASONING_PARSERS)):
        if name not in known:
            raise ValueError(f"{what} parser {name!r} is not one of {', '.join(known)}")
    calls = tool_format_of(template) if tools == AUTO else TOOL_FORMATS.get(tools)
    thoughts = reasoning_format_of(template) if reasoning == AUTO else REASONING_FORMATS.get(reasoning)
    if auto and calls is None:
        raise ValueError(
            "enable_auto_tool_choice: the chat template shows no known format of tool calls; name one "
            f"with --tool-call-parser: {', '.join(TOOL_FORMATS)}"
        )
    of_reasoning = (THINK, END_THINK) if thoughts is not None else ()
    both = (*of_reasoning, *(calls.markers if calls is not None else ()))
    return AnswerFormats(
        tools=calls,
        reasoning=thoughts,
        auto_tools=calls is not None and auto is not False,
        shown=codec.token_bytes.table_with(both),
        shown_reasoning=codec.token_bytes.table_with(of_reasoning),
        token_ids=codec.token_bytes.added(both),
    )
