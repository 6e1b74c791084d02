"""The request bodies of /v1/messages, Anthropic's Messages API, and of its count_tokens, and what they are as chats."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from moeyard_router.api.anthropic_blocks import (
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from moeyard_router.api.compression import KvCompressionField
from moeyard_router.api.fields import IGNORED, Strict, refuse
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.messages import INVALID_JSON
from moeyard_router.api.schema import Count
from moeyard_router.api.thinking import Thinking, ThinkingFields
from moeyard_router.api.tools import check_tools
from moeyard_router.api.translation import Translation, below, given, one_of, text_parts

_PASSED = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "kv_compression", "stream"),
    *ThinkingFields.model_fields,
)
_NAMES = MappingProxyType(
    {
        r"messages\.reasoning_content": "messages.content.thinking",
        r"(tools\.\d+)\.function\.parameters(.*)": r"\1.input_schema\2",
        r"(tools\.\d+)\.function\.(.*)": r"\1.\2",
        r"tool_choice.*": "tool_choice",
        r"response_format.*": "output_config.format",
        r"reasoning_effort": "output_config.effort",
        r"stop": "stop_sequences",
    }
)


class ClientTool(Strict):
    """A tool of the client's. A deferred one is shown to the model once a tool's result has referred to it."""

    harmless: ClassVar[frozenset[str]] = frozenset(("cache_control", "eager_input_streaming"))
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"allowed_callers": (["direct"],), "input_examples": ([],)}
    )

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


_Tools = Annotated[
    list[Annotated[ClientTool, one_of(MappingProxyType({"custom": ClientTool}), "custom")]],
    BeforeValidator(check_tools),
]


class ToolUseChoice(Strict):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ToolUseChoice":
        if (self.type == "tool") != (self.name is not None):
            refuse("name", self.name, "is for type tool, which needs it")
        return self


class JsonFormat(Strict):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """How much the model thinks, and the form of the answer. Task budgets are not enforced."""

    harmless: ClassVar[frozenset[str]] = frozenset(("task_budget",))

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(ThinkingFields, Strict):
    """Body of POST /v1/messages/count_tokens."""

    harmless: ClassVar[frozenset[str]] = IGNORED | {
        *("diagnostics", "inference_geo", "speed", "usage", "user_profile_id", "workspace_id"),
    }
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "container": (),
            "context_management": (
                {},
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            ),
            "mcp_servers": ([],),
        }
    )

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Texts | None = None
    tools: _Tools | None = None
    tool_choice: ToolUseChoice | None = None
    output_config: OutputConfig | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """As of any object, with the names below it."""
        names = [*below("system", self.system), *below("messages", self.messages), *below("tools", self.tools)]
        if self.output_config is not None:
            names += [f"output_config.{name}" for name in self.output_config.ignored]
        return tuple(dict.fromkeys((*self.dropped, *names)))


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    kv_compression: KvCompressionField | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


async def message_job(intake: Intake, body: bytes) -> Job:
    """The job of a request for a message; raises `ApiError` naming the first field at fault."""
    request = await intake.parse(body, MessagesRequest)
    return await translated(request).job(intake)


async def counting_job(intake: Intake, body: bytes) -> Job:
    """A job with the prompt of such a request, tools included, to be counted; raises `ApiError` as `message_job`."""
    request = await intake.parse(body, CountTokensRequest)
    return await translated(request).job(intake)


def translated(request: CountTokensRequest) -> Translation:
    """A request as a chat. One that ends with the assistant's words has them continued."""
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if request.system is not None:
        messages.append({"role": "system", "content": text_parts(request.system, _text)})
        origins.append("system")
    for index, message in enumerate(request.messages):
        made = _assistant(message) if message.role == "assistant" else _others(message)
        messages += made
        origins += [f"messages.{index}"] * len(made)
    chat: dict[str, Any] = given(**{name: getattr(request, name, None) for name in _PASSED})
    chat["messages"] = messages
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        chat["continue_final_message"] = True
    thinking, config, choice = request.thinking, request.output_config, request.tool_choice
    omitted = isinstance(thinking, Thinking) and thinking.display == "omitted"
    if omitted or False in request.switches.values():
        chat["include_reasoning"] = False
    if config is not None:
        chat |= given(reasoning_effort=config.effort)
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    shown = _shown_tools(request)
    if shown:
        tools = [
            given(name=t.name, description=t.description, parameters=t.input_schema, strict=t.strict)
            for t in shown.values()
        ]
        chat["tools"] = [{"type": "function", "function": function} for function in tools]
    if choice is not None:
        words: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        chat["tool_choice"] = words.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
        if choice.disable_parallel_tool_use and request.tools:
            chat["parallel_tool_calls"] = False
    if isinstance(request, MessagesRequest):
        user = (request.metadata or {}).get("user_id")
        chat |= given(stop=request.stop_sequences or None, user=user if isinstance(user, str) else None)
    places = tuple(f"tools.{index}" for index in shown)
    return Translation(chat=chat, origins=tuple(origins), tool_origins=places, names=_NAMES, ignored=request.ignored)


def _shown_tools(request: CountTokensRequest) -> dict[int, ClientTool]:
    """Tools that the model is shown, by their places: all but the deferred ones that nothing has referred to so far."""
    used = set() if request.tool_choice is None else {request.tool_choice.name}
    for message in request.messages:
        for block in message.blocks:
            if isinstance(block, ToolUseBlock):
                used.add(block.name)
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                used |= {part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock)}
    tools = dict(enumerate(request.tools or ()))
    shown = {index: tool for index, tool in tools.items() if not tool.defer_loading or tool.name in used}
    return shown or tools


def _assistant(message: Turn) -> list[dict[str, Any]]:
    """What the assistant thought, said and called, as one message."""
    texts = [b for b in message.blocks if isinstance(b, TextBlock)]
    thoughts = [b.thinking for b in message.blocks if isinstance(b, ThinkingBlock)]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": _arguments(b)}}
        for b in message.blocks
        if isinstance(b, ToolUseBlock)
    ]
    made: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        made["content"] = text_parts(texts, _text)
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [made]


def _arguments(block: ToolUseBlock) -> str | dict[str, Any]:
    """The input of a call; the text that the model wrote where an answer had no object for it."""
    text = block.input.get(INVALID_JSON)
    return text if isinstance(text, str) and len(block.input) == 1 else block.input


def _others(message: Turn) -> list[dict[str, Any]]:
    """A turn of the user or the system; every result of a tool is a message of its own."""
    made: list[dict[str, Any]] = []
    texts: list[TextBlock] = []

    def flush() -> None:
        if texts:
            made.append({"role": message.role, "content": text_parts(list(texts), _text)})
            texts.clear()

    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            flush()
            content = text_parts(block.content, _text)
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock):
            texts.append(block)
    flush()
    return made or [{"role": message.role, "content": ""}]


def _text(block: TextBlock | ToolReferenceBlock) -> str:
    return block.text
