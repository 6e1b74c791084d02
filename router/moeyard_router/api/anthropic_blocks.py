"""Turns of Anthropic's Messages API and their blocks: text, thoughts, calls and what they returned."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import TypeAdapter, model_validator

from moeyard_router.api.fields import Strict, refuse
from moeyard_router.api.translation import below, one_of, text_or


class TextBlock(Strict):
    """Text."""

    harmless: ClassVar[frozenset[str]] = frozenset(("cache_control", "citations"))

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """What the assistant thought. Nobody checks the signature, which answers of this server leave empty."""

    harmless: ClassVar[frozenset[str]] = frozenset(("signature",))

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """Another server's thoughts as ciphertext; they are left out."""

    harmless: ClassVar[frozenset[str]] = frozenset(("data",))

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    """A call of a tool by the assistant."""

    harmless: ClassVar[frozenset[str]] = frozenset(("cache_control", "caller"))
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"toolset_name": ()})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_TEXTS = TypeAdapter(list[Annotated[TextBlock, one_of(MappingProxyType({"text": TextBlock}))]])
Texts = Annotated[str | list[TextBlock], text_or(_TEXTS)]


class ToolReferenceBlock(Strict):
    """The name of a deferred tool that a search of the client's has found: the model is shown the tool from then on."""

    harmless: ClassVar[frozenset[str]] = frozenset(("cache_control",))

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The words for a template."""
        return f"Found the tool {self.tool_name}."


_RESULTS = TypeAdapter(
    list[
        Annotated[
            TextBlock | ToolReferenceBlock,
            one_of(MappingProxyType({"text": TextBlock, "tool_reference": ToolReferenceBlock})),
        ]
    ]
)


class ToolResultBlock(Strict):
    """What the tool returned. Templates have no word for `is_error`: the content says what went wrong."""

    harmless: ClassVar[frozenset[str]] = frozenset(("cache_control", "is_error"))
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"toolset_name": ()})

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock | ToolReferenceBlock] | None, text_or(_RESULTS)] = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: Mapping[str, type[Strict]] = MappingProxyType(
    {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
    }
)
_CONTENT = TypeAdapter(list[Annotated[Block, one_of(_BLOCKS)]])
_ASSISTANTS = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)


class Turn(Strict):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], text_or(_CONTENT)]

    @model_validator(mode="after")
    def _by_role(self) -> "Turn":
        for block in self.blocks:
            wrong = self.role != "user" if isinstance(block, ToolResultBlock) else self.role != "assistant"
            if wrong and isinstance(block, (ToolResultBlock, *_ASSISTANTS)):
                refuse("content", None, f"of the role '{self.role}' has a block of type {block.type}")
        return self

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def ignored(self) -> tuple[str, ...]:
        """As of any object, with the names below it."""
        names = below("content", self.content)
        for block in self.blocks:
            if isinstance(block, ToolResultBlock):
                names += below("content.content", block.content)
            elif isinstance(block, RedactedThinkingBlock):
                names.append("content.redacted_thinking")
        return (*self.dropped, *names)
