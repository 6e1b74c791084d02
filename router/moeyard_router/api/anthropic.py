"""Anthropic's Messages API: bodies of /v1/messages and count_tokens, their translation to chats, and the answers."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from moeyard_router.api.blocks import AnswerBlock, BlockWriter
from moeyard_router.api.choice import Choice
from moeyard_router.api.fields import IGNORED, Strict, refuse
from moeyard_router.api.messages import INVALID_JSON
from moeyard_router.api.schema import Count, KvCompressionField
from moeyard_router.api.thinking import Thinking, ThinkingFields
from moeyard_router.api.tools import check_tools
from moeyard_router.api.translation import Translation, given, one_of, text_or, text_parts
from moeyard_router.errors import ApiError
from moeyard_router.text import exact_json


class TextBlock(Strict):
    harmless = frozenset(("cache_control", "citations"))

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """Reasoning of the assistant. The signature is not checked; answers of this server leave it empty."""

    harmless = frozenset(("signature",))

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning of another server, which is left out."""

    harmless = frozenset(("data",))

    type: Literal["redacted_thinking"]

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self.dropped, self.type)


class ToolUseBlock(Strict):
    harmless = frozenset(("cache_control", "caller"))
    unserved = MappingProxyType({"toolset_name": ()})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(Strict):
    """The name of a deferred tool that the client's tool search found. From then on the model sees the tool."""

    harmless = frozenset(("cache_control",))

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The text for the chat template."""
        return f"Found the tool {self.tool_name}."


_RESULT = text_or(one_of(TextBlock, ToolReferenceBlock))


class ToolResultBlock(Strict):
    """A tool's result. Templates cannot show `is_error`; the content describes the error."""

    inner = ("content",)
    harmless = frozenset(("cache_control", "is_error"))
    unserved = MappingProxyType({"toolset_name": ()})

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock | ToolReferenceBlock] | None, _RESULT] = None


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_ASSISTANTS = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)


class AnthropicMessage(Strict):
    inner = ("content",)

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[ContentBlock], text_or(one_of(*get_args(ContentBlock)))]

    @model_validator(mode="after")
    def _by_role(self) -> "AnthropicMessage":
        for block in self.blocks:
            wrong = self.role != "user" if isinstance(block, ToolResultBlock) else self.role != "assistant"
            if wrong and isinstance(block, (ToolResultBlock, *_ASSISTANTS)):
                refuse("content", None, f"of the role '{self.role}' has a block of type {block.type}")
        return self

    @property
    def blocks(self) -> list[ContentBlock]:
        """The content as a list."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


_text = attrgetter("text")
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
    """A tool of the client. The model sees a deferred tool once a tool result has referred to it."""

    harmless = frozenset(("cache_control", "eager_input_streaming"))
    unserved = MappingProxyType({"allowed_callers": (["direct"],), "input_examples": ([],)})

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


_Tools = Annotated[list[Annotated[ClientTool, one_of(ClientTool, default="custom")]], BeforeValidator(check_tools)]


class ToolUseChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ToolUseChoice":
        if (self.type == "tool") != (self.name is not None):
            refuse("name", self.name, "is for type tool, which needs it")
        return self


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Thinking effort and form of the answer. Task budgets are not enforced."""

    harmless = frozenset(("task_budget",))

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(ThinkingFields, Strict):
    """Body of POST /v1/messages/count_tokens."""

    inner = ("system", "messages", "tools", "output_config")
    harmless = IGNORED | {*("diagnostics", "inference_geo", "speed", "usage", "user_profile_id", "workspace_id")}
    unserved = MappingProxyType(
        {
            "container": (),
            "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
            "mcp_servers": ([],),
        }
    )

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Annotated[str | list[TextBlock], text_or(one_of(TextBlock))] | None = None
    tools: _Tools | None = None
    tool_choice: ToolUseChoice | None = None
    output_config: OutputConfig | None = None


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


def translated(request: CountTokensRequest) -> Translation:
    """Translate a request to a chat. A last message of the assistant is continued."""
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
        choices: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        chat["tool_choice"] = choices.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
        if choice.disable_parallel_tool_use and request.tools:
            chat["parallel_tool_calls"] = False
    if isinstance(request, MessagesRequest):
        user = (request.metadata or {}).get("user_id")
        chat |= given(stop=request.stop_sequences or None, user=user if isinstance(user, str) else None)
    places = tuple(f"tools.{index}" for index in shown)
    return Translation(body=chat, origins=origins, tool_origins=places, names=_NAMES, ignored=request.ignored)


def _shown_tools(request: CountTokensRequest) -> dict[int, ClientTool]:
    """Return the tools that the model sees, by index: all but deferred ones that nothing refers to."""
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


def _assistant(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Return the assistant's reasoning, text and calls as one message."""
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
    """Return a call's input, or the model's text if `_input` could not make an object of it."""
    text = block.input.get(INVALID_JSON)
    return text if isinstance(text, str) and len(block.input) == 1 else block.input


def _others(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Return the messages of the user or the system, and one message per tool result."""
    made: list[dict[str, Any]] = []
    for kind, blocks in groupby(message.blocks, type):
        if kind is TextBlock:
            made.append({"role": message.role, "content": text_parts(list(blocks), _text)})
            continue
        made += [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_parts(block.content, _text)}
            for block in blocks
            if isinstance(block, ToolResultBlock)
        ]
    return made or [{"role": message.role, "content": ""}]


_DELTAS = MappingProxyType(
    {
        "content": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }
)


class MessageWriter(BlockWriter):
    """Writes reasoning, text and calls as blocks of type thinking, text and tool_use."""

    def begin(self, choices: Sequence[Choice]) -> bytes:
        return self.event("message_start", message=self._message(choices, ended=False)) + self.event("ping")

    def opened(self, block: AnswerBlock) -> bytes:
        return self.event("content_block_start", index=block.index, content_block=_block(block, empty=True))

    def added(self, block: AnswerBlock, text: str) -> bytes:
        kind, field = _DELTAS[block.kind]
        return self.event("content_block_delta", index=block.index, delta={"type": kind, field: text})

    def closed(self, block: AnswerBlock) -> bytes:
        return self.event("content_block_stop", index=block.index)

    def end(self, choices: Sequence[Choice]) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self.stop_string}
        return self.event("message_delta", delta=delta, usage=self._usage(choices)) + self.event("message_stop")

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        return self.event("error", **error.anthropic_body())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._message(choices, ended=True)

    @property
    def _reason(self) -> str:
        if self.stop_string is not None:
            return "stop_sequence"
        if self.cut:
            return "max_tokens"
        return "tool_use" if any(block.kind == "call" for block in self.blocks) else "end_turn"

    def _message(self, choices: Sequence[Choice], *, ended: bool) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "type": "message",
            "role": "assistant",
            **self.served,
            "content": [_block(block) for block in self.blocks],
            "stop_reason": self._reason if ended else None,
            "stop_sequence": self.stop_string,
            "usage": self._usage(choices),
        }

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return the token counts. Cached tokens are 0, and part of the input, until the worker reports them."""
        (choice,) = choices
        prompt, cached = len(self.job.prompts[0].token_ids), choice.cached_tokens or 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.num_tokens,
            **self.job.kept_tokens,
        }


def _block(block: AnswerBlock, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == "content":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {} if empty else _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Other text is the value of INVALID_JSON, as Anthropic advises."""
    try:
        values = exact_json.loads(arguments)
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {INVALID_JSON: arguments}
