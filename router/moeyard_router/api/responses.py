"""The request body of /v1/responses, OpenAI's Responses API, and what it is as a chat.

Nothing is kept between requests: what refers to an earlier one (`previous_response_id`, `conversation`, items by
reference) is refused by name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.compression import KvCompressionField
from moeyard_router.api.fields import IGNORED, NOT_SERVED, Strict
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.response_items import (
    INPUT,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    HostedItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsePart,
)
from moeyard_router.api.response_tools import (
    ChosenTool,
    HostedTool,
    Offer,
    ResponseTool,
    custom_arguments,
    flat_name,
    offers_of,
    plain_tools,
)
from moeyard_router.api.schema import Count, Penalty, Seed
from moeyard_router.api.thinking import ThinkingFields
from moeyard_router.api.tools import check_depth, check_tools
from moeyard_router.api.translation import Translation, below, given, text_or, text_parts
from moeyard_router.errors import bad_request

_PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("kv_compression", "parallel_tool_calls", "stream", "user", "model"),
    *ThinkingFields.model_fields,
)
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
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    # The answer repeats it, and what writes JSON has its own limit.
    schema_: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """`text` of a request."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ResponseStreamOptions(Strict):
    """OpenAI pads its events, so that their lengths tell a listener less. The last event has token counts anyway."""

    harmless: ClassVar[frozenset[str]] = frozenset(("include_obfuscation", "include_usage"))


class ResponsesRequest(ThinkingFields, Strict):
    """Body of POST /v1/responses."""

    harmless: ClassVar[frozenset[str]] = IGNORED | {
        *("include", "max_tool_calls", "prompt_cache_options", "truncation", "usage"),
    }
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
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

    model: str | None = None
    input: Annotated[str | list[Item], text_or(INPUT)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    kv_compression: KvCompressionField | None = None
    tools: Annotated[list[ResponseTool], BeforeValidator(check_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

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
        # What else may be asked for is of tools that are not served, or ciphertext.
        if value and "message.output_text.logprobs" in value:
            raise PydanticCustomError("include", "log-probabilities are given by chat completions only")
        return value

    @property
    def ignored(self) -> tuple[str, ...]:
        """As of any object, with the names below it."""
        nested = {"stream_options": self.stream_options, "text": self.text}
        names = [f"{name}.{each}" for name, part in nested.items() if part is not None for each in part.ignored]
        items = [] if isinstance(self.input, str) else self.input
        for item in items:
            parts = item.content if isinstance(item, MessageItem) else getattr(item, "output", None)
            names += below("input.content" if isinstance(item, MessageItem) else "input.output", parts)
        names += [*below("input", items), *below("tools", self.tools)]
        return tuple(dict.fromkeys((*self.dropped, *names)))


async def response_job(intake: Intake, body: bytes) -> Job:
    """The job of a request body; raises `ApiError` naming the first field at fault."""
    request = await intake.parse(body, ResponsesRequest)
    return await translated(request).job(intake)


def translated(request: ResponsesRequest) -> Translation:
    """A request as a chat."""
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
        chat=chat, origins=tuple(origins), tool_origins=_places(request, offers), names=_NAMES,
        ignored=request.ignored, asked=_asked(request, tools),
    )  # fmt: skip


def _places(request: ResponsesRequest, offers: Mapping[str, Offer]) -> tuple[str, ...]:
    """Where the client has each tool that the model is offered."""
    own = [index for index, tool in enumerate(request.tools or ()) if not isinstance(tool, HostedTool)]
    indices = ((own[offer.index[0]], *offer.index[1:]) for offer in offers.values())
    return tuple(".".join(f"tools.{index}" for index in place) for place in indices)


def _asked(request: ResponsesRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What the answer repeats of the request."""
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
    """The messages of a chat, and where each came from. What the assistant thinks, says and calls in a row is one.

    `names` has the function that stands for each tool, by namespace and name.
    """
    messages: list[dict[str, Any]] = []
    origins: list[str] = []

    def add(origin: str, **message: Any) -> dict[str, Any]:
        messages.append(message)
        origins.append(origin)
        return message

    def turn(origin: str, *taken: str) -> dict[str, Any]:
        """The assistant's message that is being put together, unless it has one of these already."""
        last = messages[-1] if messages else {"role": ""}
        open_turn = last["role"] == "assistant" and not any(name in last for name in taken)
        return last if open_turn else add(origin, role="assistant")

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
            if name is None:  # not a tool of this request any more
                name = item.name if item.namespace is None else flat_name(item.namespace, item.name)
            arguments = item.arguments if isinstance(item, CallItem) else custom_arguments(item.input)
            function = {"name": name, "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn(origin).setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            add(origin, role="tool", tool_call_id=item.call_id, content=_text(item.output))
        elif isinstance(item, HostedItem):
            continue
        elif item.role == "assistant":
            turn(origin, "content", "tool_calls")["content"] = _text(item.content)
        else:
            add(origin, role=item.role, content=_text(item.content))
    return messages, origins


def _text(parts: "str | list[ResponsePart]") -> "str | list[dict[str, Any]]":
    return text_parts(parts, lambda part: part.shown)
