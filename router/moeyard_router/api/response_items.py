"""Items of the Responses API: turns, calls, what they returned, and thoughts, as clients send and echo them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import TypeAdapter

from moeyard_router.api.fields import Strict
from moeyard_router.api.messages import TextPart
from moeyard_router.api.response_tools import HostedTool
from moeyard_router.api.translation import one_of, text_or

_ECHOED = frozenset(("id", "status"))  # of items that come back as they were answered


class ResponsePart(TextPart):
    """Text of an item, also as it was answered."""

    harmless: ClassVar[frozenset[str]] = TextPart.harmless | {"logprobs", "parsed", "prompt_cache_breakpoint"}


_PARTS = TypeAdapter(list[ResponsePart])
Parts = Annotated[str | list[ResponsePart], text_or(_PARTS)]


class MessageItem(Strict):
    """A turn."""

    harmless: ClassVar[frozenset[str]] = _ECHOED | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class CallItem(Strict):
    """A call of a function by the assistant; `arguments` is JSON as text."""

    harmless: ClassVar[frozenset[str]] = _ECHOED | {"caller", "parsed_arguments"}
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"async": (False,)})

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Strict):
    """A call of a custom tool by the assistant; `input` is text."""

    harmless: ClassVar[frozenset[str]] = _ECHOED | {"caller"}
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"async": (False,)})

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(Strict):
    """What a function or a custom tool returned."""

    harmless: ClassVar[frozenset[str]] = _ECHOED | {"caller", "name", "namespace"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class HostedItem(HostedTool):
    """A call, or its result, of a tool of OpenAI's servers. No template can show it, so it is left out and named."""

    type: Literal["image_generation_call", "tool_search_call", "tool_search_output", "web_search_call"]


class ReasoningText(Strict):
    """A piece of what the assistant thought, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """What the assistant thought before what follows: its content, else its summary. Ciphertext is another server's."""

    harmless: ClassVar[frozenset[str]] = _ECHOED | {"encrypted_content"}

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        """The thought."""
        return "\n".join(part.text for part in self.content or self.summary or ())


_ITEMS: Mapping[str, type[Strict]] = MappingProxyType(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
        "custom_tool_call": CustomCallItem,
        "custom_tool_call_output": CallOutputItem,
        "reasoning": ReasoningItem,
        **dict.fromkeys(get_args(HostedItem.model_fields["type"].annotation), HostedItem),
    }
)
Item = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | HostedItem
INPUT = TypeAdapter(list[Annotated[Item, one_of(_ITEMS, "message")]])
