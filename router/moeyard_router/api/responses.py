"""OpenAI's Responses API: the body of /v1/responses, its translation to a chat, and the answers.

The server stores no responses. Fields that refer to earlier ones (`previous_response_id`, `conversation`, items by
reference) are refused by name.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.blocks import AnswerBlock, BlockWriter
from moeyard_router.api.choice import Choice
from moeyard_router.api.fields import IGNORED, NOT_SERVED, Strict
from moeyard_router.api.intake import Job
from moeyard_router.api.messages import TextPart
from moeyard_router.api.replies import Served
from moeyard_router.api.response_tools import (
    ChosenTool,
    HostedTool,
    Offer,
    ResponseTool,
    custom_arguments,
    custom_input,
    flat_name,
    offers_of,
    plain_tools,
)
from moeyard_router.api.schema import Count, SamplingFields
from moeyard_router.api.thinking import ThinkingFields
from moeyard_router.api.tools import check_depth, check_tools
from moeyard_router.api.translation import Translation, given, one_of, text_or, text_parts
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text.detokenizer import TokenBytes

_ECHOED = frozenset(("id", "status"))  # of items of an answer that the client sends back


class ResponsePart(TextPart):
    """Text of an item, possibly of an earlier answer."""

    harmless = TextPart.harmless | {"logprobs", "parsed", "prompt_cache_breakpoint"}


Parts = Annotated[str | list[ResponsePart], text_or(ResponsePart)]


class MessageItem(Strict):
    inner = ("content",)
    harmless = _ECHOED | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class _Call(Strict):
    harmless = _ECHOED | {"caller"}
    unserved = MappingProxyType({"async": (False,)})

    call_id: str
    name: str
    namespace: str | None = None


class CallItem(_Call):
    """A call of a function by the assistant; `arguments` is JSON as text."""

    harmless = _Call.harmless | {"parsed_arguments"}

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(_Call):
    """A call of a custom tool by the assistant; `input` is text."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(Strict):
    inner = ("output",)
    harmless = _ECHOED | {"caller", "name", "namespace"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class HostedItem(HostedTool):
    """A call or result of a tool on OpenAI's servers. No template can show it, so it is left out and named."""

    type: Literal["image_generation_call", "tool_search_call", "tool_search_output", "web_search_call"]


class ReasoningText(Strict):
    """A piece of reasoning or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning before the next item: its content, else its summary. Encrypted content of other servers is ignored."""

    harmless = _ECHOED | {"encrypted_content"}

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        """All pieces."""
        return "\n".join(part.text for part in self.content or self.summary or ())


Item = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | HostedItem


_shown = attrgetter("shown")
_PASSED = (*SamplingFields.model_fields, *ThinkingFields.model_fields, "parallel_tool_calls")
_NAMES = MappingProxyType(
    {
        r"max_tokens": "max_output_tokens",
        r"messages": "input",
        r"messages\.reasoning_content": "input.reasoning",
        r"messages\.(.*)": r"input.\1",
        r"(tools\..*)\.function\.(.*)": r"\1.\2",
        r"tool_choice.*": "tool_choice",
        r"response_format\.json_schema\.(.*)": r"text.format.\1",
        r"response_format.*": "text.format",
    }
)


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    # The answer repeats the schema, and the JSON encoder has a depth limit.
    schema_: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    unserved = MappingProxyType({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ResponseStreamOptions(Strict):
    """Options without effect. The last event always has token counts."""

    harmless = frozenset(("include_obfuscation", "include_usage"))


class ResponsesRequest(ThinkingFields, SamplingFields, Strict):
    """Body of POST /v1/responses."""

    inner = ("stream_options", "text", "input", "tools")
    harmless = IGNORED | {*("include", "max_tool_calls", "prompt_cache_options", "truncation", "usage")}
    unserved = MappingProxyType(
        {
            **NOT_SERVED,
            "background": (False,),
            "context_management": ([],),
            "conversation": (),
            "moderation": (),
            "previous_response_id": (),
            "prompt": (),
            "top_logprobs": (0,),
        }
    )

    input: Annotated[str | list[Item], text_or(one_of(*get_args(Item), default="message"))]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponseTool], BeforeValidator(check_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("input", mode="after")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise PydanticCustomError("input", "must not be empty")
        return value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value is None or value in ("none", "auto", "required"):
            return value
        if isinstance(value, dict) and value.get("type") in ("function", "custom"):
            return ChosenTool.model_validate(value)
        raise PydanticCustomError(
            "tool_choice", 'expected "none", "auto", "required" or an object {"type": "function", "name": ...}'
        )

    @field_validator("include", mode="after")
    @classmethod
    def _include(cls, value: list[str] | None) -> list[str] | None:
        # Other values concern tools that are not served, or encrypted content.
        if value and "message.output_text.logprobs" in value:
            raise PydanticCustomError("include", "log-probabilities are given by chat completions only")
        return value


def translated(request: ResponsesRequest) -> Translation:
    """Translate a request to a chat."""
    tools = plain_tools(request.tools or ())
    offers = offers_of(tools)
    names = {offer.address: name for name, offer in offers.items()}
    messages, origins = _messages(request, names)
    chat: dict[str, Any] = given(**{name: getattr(request, name) for name in _PASSED})
    chat |= given(max_tokens=request.max_output_tokens)
    chat["messages"] = messages
    form, choice = None if request.text is None else request.text.format, request.tool_choice
    if form is not None:
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise bad_request("'text.format.schema' is required by type json_schema", "text.format.schema")
            schema = given(name=form.name, description=form.description, schema=form.schema_, strict=form.strict)
            chat["response_format"]["json_schema"] = schema
    if offers:
        chat["tools"] = [{"type": "function", "function": offer.function(name)} for name, offer in offers.items()]
    if isinstance(choice, ChosenTool):
        name = names.get((choice.namespace, choice.name), choice.name)
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif choice is not None:
        chat["tool_choice"] = choice
    return Translation(
        body=chat,
        origins=origins,
        tool_origins=_places(request, offers),
        names=_NAMES,
        ignored=request.ignored,
        repeated=_repeated(request, tools),
    )


def _places(request: ResponsesRequest, offers: Mapping[str, Offer]) -> tuple[str, ...]:
    """Return the client's place of each tool that the model sees."""
    plain = [index for index, tool in enumerate(request.tools or ()) if not isinstance(tool, HostedTool)]
    indices = ((plain[offer.index[0]], *offer.index[1:]) for offer in offers.values())
    return tuple(".".join(f"tools.{index}" for index in place) for place in indices)


def _repeated(request: ResponsesRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    form, choice = None if request.text is None else request.text.format, request.tool_choice
    shown = {"type": "text"} if form is None else given(**form.model_dump(exclude={"dropped"}, by_alias=True))
    chosen = given(**choice.model_dump(exclude={"dropped"})) if isinstance(choice, ChosenTool) else choice or "auto"
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": next(iter(request.efforts.values()), None), "summary": None},
        "text": {"format": shown},
        "tool_choice": chosen,
        "tools": tools,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _messages(
    request: ResponsesRequest, names: Mapping[tuple[str | None, str], str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat's messages and their origins. `names` maps (namespace, name) of a tool to its function."""
    messages: list[dict[str, Any]] = []
    origins: list[str] = []

    def add(origin: str, **message: Any) -> dict[str, Any]:
        messages.append(message)
        origins.append(origin)
        return message

    def turn(origin: str, *absent: str) -> dict[str, Any]:
        """Return the assistant's message to extend: the last one if it lacks the fields `absent`, else a new one."""
        last = messages[-1] if messages else {"role": ""}
        extends = last["role"] == "assistant" and not any(name in last for name in absent)
        return last if extends else add(origin, role="assistant")

    if request.instructions is not None:
        add("instructions", role="system", content=request.instructions)
    if isinstance(request.input, str):
        add("input", role="user", content=request.input)
        return messages, origins
    for index, item in enumerate(request.input):
        origin = f"input.{index}"
        if isinstance(item, ReasoningItem):
            if item.text:
                turn(origin, "reasoning_content", "content", "tool_calls")["reasoning_content"] = item.text
        elif isinstance(item, CallItem | CustomCallItem):
            name = names.get((item.namespace, item.name))
            if name is None:  # no longer a tool of this request
                name = item.name if item.namespace is None else flat_name(item.namespace, item.name)
            arguments = item.arguments if isinstance(item, CallItem) else custom_arguments(item.input)
            function = {"name": name, "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn(origin).setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            add(origin, role="tool", tool_call_id=item.call_id, content=text_parts(item.output, _shown))
        elif isinstance(item, HostedItem):
            continue
        elif item.role == "assistant":
            turn(origin, "content", "tool_calls")["content"] = text_parts(item.content, _shown)
        else:
            add(origin, role=item.role, content=text_parts(item.content, _shown))
    return messages, origins


_CODES = MappingProxyType({400: "invalid_prompt", 429: "rate_limit_exceeded"})
_PREFIXES = MappingProxyType({"content": "msg", "reasoning": "rs", "call": "fc"})
# Prefixes of the names of a block's events.
_PIECES = MappingProxyType({"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"})


class ResponseWriter(BlockWriter):
    """Writes numbered events of items. An answer without blocks is a message with an empty text."""

    _sequence = 0
    _head = _middle = _tail = b""

    def __init__(self, job: Job, *, reply_id: str, served: Served, created: int, tokens: TokenBytes) -> None:
        super().__init__(job, reply_id=reply_id, served=served, created=created, tokens=tokens)
        self._offers = offers_of((job.repeated or {}).get("tools", ()))

    def begin(self, choices: Sequence[Choice]) -> bytes:
        response = self._response("in_progress", choices)
        return self.event("created", response=response) + self.event("in_progress", response=response)

    def opened(self, block: AnswerBlock) -> bytes:
        item = self._item(block, "in_progress")
        added = self.event("output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self.event("content_part.added", **self._place(block), part=_part(block))

    def added(self, block: AnswerBlock, text: str) -> bytes:
        """Return one token's event. Its fixed parts are made once per block. Custom input is sent whole at the end."""
        if self._is_custom(block):
            return b""
        if len(block.pieces) == 1:
            kind = f"response.{_PIECES[block.kind]}.delta"
            self._head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'.encode()
            self._middle = b"," + orjson.dumps(self._place(block))[1:-1] + b',"delta":'
            self._tail = b',"logprobs":[]}\n\n' if block.kind == "content" else b"}\n\n"
        number, self._sequence = self._sequence, self._sequence + 1
        return b"%b%d%b%b%b" % (self._head, number, self._middle, orjson.dumps(text), self._tail)

    def closed(self, block: AnswerBlock) -> bytes:
        place, item = self._place(block), self._item(block, _status(block))
        event, name = self.event, f"{_PIECES[block.kind]}.done"
        if self._is_custom(block):
            text = custom_input(block.text)
            out = event("custom_tool_call_input.delta", **place, delta=text) if text else b""
            out += event("custom_tool_call_input.done", **place, input=text)
        elif block.kind == "call":
            out = event(name, **place, name=item["name"], arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
            out = event(name, **place, text=block.text, **more)
            out += event("content_part.done", **place, part=_part(block))
        return out + event("output_item.done", output_index=block.index, item=item)

    def end(self, choices: Sequence[Choice]) -> bytes:
        missing = self._empty_message()
        status = "incomplete" if self.cut else "completed"
        return missing + self.event(status, response=self._response(status, choices))

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        return self.event("failed", response=self._response("failed", choices, error=error))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        self._empty_message()
        return self._response("incomplete" if self.cut else "completed", choices)

    def _empty_message(self) -> bytes:
        if self.blocks:
            return b""
        block = AnswerBlock(kind="content", index=0, cut=self.cut)
        self.blocks.append(block)
        return self.opened(block) + self.closed(block)

    def event(self, kind: str, **data: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return super().event(f"response.{kind}", sequence_number=number, **data)

    def _id(self, block: AnswerBlock) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.kind]
        return f"{prefix}_{self.reply_id.removeprefix('resp_')}{block.index:02x}"

    def _is_custom(self, block: AnswerBlock) -> bool:
        offer = self._offers.get(block.name) if block.kind == "call" else None
        return offer is not None and offer.custom

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        begins = status == "in_progress"
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            offer, written = self._offers.get(block.name), "" if begins else block.text
            called = {"call_id": block.id, "name": block.name if offer is None else offer.name}
            if offer is not None and offer.namespace is not None:
                called["namespace"] = offer.namespace
            if self._is_custom(block):
                return {**head, "type": "custom_tool_call", **called, "input": custom_input(written)}
            return {**head, "type": "function_call", **called, "arguments": written}
        content = [] if begins else [_part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, choices: Sequence[Choice], error: ApiError | None = None) -> dict[str, Any]:
        running = status == "in_progress"
        sampling = self.job.continuations[0].sampling
        code = None if error is None else _CODES.get(error.status, "server_error")
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": code, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self.served,
            "output": [] if running else [self._item(b, _status(b)) for b in self.blocks if b is not self.open_block],
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if running else self._usage(choices),
            **(self.job.repeated or {}),
        }

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the token counts. Cached tokens are 0 until the worker reports them, with the first token."""
        (choice,) = choices
        prompt, cached = len(self.job.prompts[0].token_ids), choice.cached_tokens or 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0, **self.job.kept_tokens},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + choice.num_tokens,
        }


def _status(block: AnswerBlock) -> str:
    return "incomplete" if block.cut else "completed"


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
