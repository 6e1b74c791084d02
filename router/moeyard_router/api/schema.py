"""Request bodies of completions, chat completions, /tokenize and /detokenize: strict types and explicit ranges.

Names, defaults and ranges are OpenAI's, and vLLM's for extensions. A null field takes its default. Unknown fields are
errors unless they cannot change the answer (fields.py).
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.fields import IGNORED, NOT_SERVED, Strict
from moeyard_router.api.messages import ChatMessage
from moeyard_router.api.structured import StructuredFields
from moeyard_router.api.thinking import THINKING_FIELDS, THINKING_OBJECTS, ThinkingFields
from moeyard_router.api.tools import Tool, ToolUse, check_tool_choice, check_tools, tool_use
from moeyard_router.api.validation import validate
from moeyard_worker.protocol import MAX_LOGPROBS, KvCompression

# More than any prompt has, and within the wire format.
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class KvCompressionField(Strict):
    """`method` "none" keeps the whole prompt whatever the server's default is; "snapkv" keeps `budget` tokens of it."""

    method: Literal["snapkv", "none"]
    budget: _Count | None = None
    window: _Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> "KvCompressionField":
        if self.method == "none":
            return self
        if self.budget is None:
            raise PydanticCustomError("budget", "method snapkv needs a budget, in tokens of the prompt")
        window = self.compression().window
        if window > self.budget:
            raise PydanticCustomError(
                "window",
                "the window of {window} tokens is always kept, and the budget is {budget}",
                {"window": window, "budget": self.budget},
            )
        return self

    def compression(self) -> KvCompression:
        """Return the worker's parameters of a method other than "none"."""
        assert self.budget is not None, "the validator checks it"
        if self.window is None:
            return KvCompression(method=self.method, budget=self.budget)
        return KvCompression(method=self.method, budget=self.budget, window=self.window)


def compression_of(field: KvCompressionField | None, default: KvCompression | None) -> KvCompression | None:
    """Return a request's KV compression, else the server's default."""
    if field is None:
        return default
    return None if field.method == "none" else field.compression()


MAX_STOP_STRINGS = 16
_UINT63 = 2**63 - 1

CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]  # the limits are vLLM's
Seed = Annotated[int, Field(ge=-_UINT63 - 1, le=_UINT63)]
Count = Annotated[int, Field(ge=1)]
# How the log-probabilities of a given output are computed: by the formula of decoding, so that they equal sampling's.
Score = Literal["as_decoded"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    """`include_usage`: a last chunk with the token counts. `continuous_usage_stats`: counts in every chunk (vLLM)."""

    harmless = frozenset(("include_obfuscation",))  # OpenAI's padding of events against eavesdroppers

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(Strict):
    """OpenRouter's name of `include_usage`. Answers that are not streamed always have token counts."""

    include: bool | None = None


class ShapeFields(BaseModel):
    """The fields that change the distribution of the next token."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    kv_compression: KvCompressionField | None = None


class DistributionFields(ShapeFields):
    """The fields that change the distribution of the next token, and its seed."""

    seed: Seed | None = None


class SamplingFields(DistributionFields):
    """The fields that all APIs for text share."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None


class OutputFields(BaseModel):
    """The fields that say how many outputs there are, where they end, and what is scored."""

    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Any = ()  # validated to a tuple without duplicates
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None

    @field_validator("stop", mode="after")
    @classmethod
    def _stop(cls, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise PydanticCustomError("stop", "expected a string or a list of strings")
        if len(stops) > MAX_STOP_STRINGS:
            raise PydanticCustomError(
                "stop",
                "{count} stop strings, at most {limit} are allowed",
                {"count": len(stops), "limit": MAX_STOP_STRINGS},
            )
        if "" in stops:
            raise PydanticCustomError("stop", "a stop string must not be empty")
        return tuple(dict.fromkeys(stops))


class _Generation(StructuredFields, OutputFields, SamplingFields, Strict):
    harmless = IGNORED
    unserved = NOT_SERVED
    inner: ClassVar[tuple[str, ...]] = ("stream_options",)

    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: CacheSalt | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _streamed_or_not(self) -> "_Generation":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options are allowed only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs are not available with stream=true")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of the given fields without effect, for example `stream_options.include_obfuscation`."""
        usage = ("usage",) if self.usage is not None and not self.stream else ()
        return (*super().ignored, *usage)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        options, usage = self.stream_options, self.usage
        return bool(options is not None and options.include_usage) or bool(usage is not None and usage.include)


class CompletionRequest(_Generation):
    """Body of POST /v1/completions. `max_tokens` may be 0 for `echo`, `prompt_logprobs` or warming the prefix cache.

    score: the prompt's ids from `output_start` on are an output. Their log-probabilities have the bits of sampling.
    """

    harmless = IGNORED | THINKING_FIELDS | {"chat_template_args"}
    # The default of `max_tokens`, which is OpenAI's and vLLM's. None stands for all room.
    default_tokens: ClassVar[int | None] = 16

    prompt: Any  # validated to a list of prompts, each a text or token ids
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    score: Score | None = None
    output_start: Count | None = None

    @model_validator(mode="after")
    def _scores_an_output(self) -> "CompletionRequest":
        if (self.score is None) != (self.output_start is None):
            raise PydanticCustomError("output_start", "score and output_start need each other")
        if self.score is not None and self.prompt_logprobs is None:
            raise PydanticCustomError("score", "score needs prompt_logprobs")
        return self

    @field_validator("prompt", mode="after")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if value in ("", []) or (isinstance(value, list) and any(v in ("", []) for v in value)):
            raise PydanticCustomError("prompt", "a prompt must not be empty")
        if isinstance(value, str) or _all(value, int):
            return [value]
        if _all(value, str) or (isinstance(value, list) and all(_all(ids, int) for ids in value)):
            return value
        raise PydanticCustomError(
            "prompt", "expected a string, a list of token ids, a list of strings or a list of lists of token ids"
        )


def _all(value: Any, kind: type) -> bool:
    """Return whether `value` is a non-empty list of elements of exactly type `kind` (a bool is no int)."""
    return isinstance(value, list) and bool(value) and all(type(v) is kind for v in value)


class ChatRequest(ThinkingFields, _Generation):
    """Body of POST /v1/chat/completions. `max_completion_tokens` is OpenAI's newer name of `max_tokens`."""

    inner = ("stream_options", *THINKING_OBJECTS)

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], BeforeValidator(check_tools)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice)] = None
    parallel_tool_calls: bool | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields without effect, `parallel_tool_calls` among them if there are no tools."""
        idle = ("parallel_tool_calls",) if self.parallel_tool_calls is not None and not self.tools else ()
        return (*super().ignored, *idle)

    @property
    def tool_use(self) -> ToolUse:
        """The tools and tool choice. Raises `ApiError` 400 if the three fields contradict each other."""
        return tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @model_validator(mode="after")
    def _combinations(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs are allowed only with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "max_completion_tokens", "max_tokens and max_completion_tokens are both given and differ"
            )
        return self


class TokenizeRequest(ThinkingFields, Strict):
    """Body of POST /tokenize: a prompt, which gets special tokens by default, or the fields of a chat's prompt."""

    harmless = IGNORED
    inner = THINKING_OBJECTS

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], BeforeValidator(check_tools)] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the chat whose prompt is counted. Raises `ApiError` 400 for an invalid chat."""
        names = {"messages", "add_special_tokens", "add_generation_prompt", "continue_final_message"}
        chat = {name: getattr(self, name) for name in names | ThinkingFields.model_fields.keys()}
        tools = None if self.tools is None else [tool.given for tool in self.tools]
        return validate({**chat, "tools": tools}, ChatRequest)


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
