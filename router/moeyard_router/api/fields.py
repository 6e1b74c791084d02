"""Request fields that are not served: dropped where they cannot change the answer, refused by name where they can.

The names are those of OpenAI, vLLM, SGLang and of clients' extensions. docs/api.md has the whole table, with the served
fields. Any other field is an error that names it. Any field may be null, which is the same as leaving it out.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

# Fields that cannot change an answer's text: identities, storage, speed hints, settings of media that no request has,
# and fields for other servers. The header `x-moeyard-ignored` names them.
IGNORED = frozenset(
    (
        *("cache_control", "media_io_kwargs", "metadata", "mm_processor_kwargs", "prediction", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "provider_specific_fields", "request_id", "return_mm_kwargs"),
        *("return_token_offsets", "rid", "safety_identifier", "service_tier", "session_id", "store"),
        *("stream_interval", "truncation_side"),
        # Conversation ids, and fields that chat applications and their proxies add.
        *("chat_id", "client_metadata", "conversation_id", "message_id", "parent_id", "thread_id", "trace_id"),
        *("background_tasks", "features", "filter_ids", "model_item", "tool_ids", "tool_servers", "user_id"),
        *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id", "proxy_server_request"),
        *("allowed_openai_params", "custom_llm_provider", "drop_params", "num_retries", "tags", "timeout", "variables"),
        # OpenRouter's choice of a provider.
        *("models", "provider", "route", "transforms"),
        # Ollama, llama.cpp, LM Studio, SGLang: memory, caches, progress. Samplers in Ollama's `options` are not read.
        *("keep_alive", "num_ctx", "options"),
        *("cache_prompt", "id_slot", "n_keep", "return_progress", "slot_id", "timings_per_token"),
        *("data_parallel_rank", "draft_model", "routed_dp_rank", "ttl"),
        # DashScope, SiliconFlow, GLM: stream chunking, images, and thinking budgets, which are not enforced.
        *("incremental_output", "thinking_budget", "tool_stream", "vl_high_resolution_images"),
    )
)
# Fields for features that this server does not have, each with the values that do not ask for the feature. `echo` is of
# chats, `functions` and `tools` are of completions.
NOT_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # `best_of` may equal `n`: see _is_neutral. Completions and chats serve `cache_salt`.
        **dict.fromkeys(("allowed_token_ids", "audio", "best_of", "cache_salt", "chat_template"), ()),
        **dict.fromkeys(("guided_decoding_backend", "logprob_token_ids", "prompt_embeds", "prompt_logprobs"), ()),
        **dict.fromkeys(("repetition_detection", "structural_tag", "web_search_options"), ()),
        **dict.fromkeys(("echo", "enable_search", "return_hidden_states", "return_prompt_text"), (False,)),
        **dict.fromkeys(("return_routed_experts", "return_tokens_as_token_ids"), (False,)),
        **dict.fromkeys(("use_beam_search", "watermarking"), (False,)),
        **dict.fromkeys(("do_sample", "include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
        "spaces_between_special_tokens": (True,),
        **dict.fromkeys(("bad_words", "documents", "functions", "logits_processors", "plugins", "tools"), ([],)),
        **dict.fromkeys(("ec_transfer_params", "kv_transfer_params", "vllm_xargs"), ({},)),
        **dict.fromkeys(("dry_multiplier", "top_a", "xtc_probability"), (0, 0.0)),
        **dict.fromkeys(("mirostat", "routed_experts_prompt_start"), (0,)),
        **dict.fromkeys(("length_penalty", "typical_p"), (1, 1.0)),
        # A prompt longer than the model takes is a 400 that says so.
        **dict.fromkeys(("thinking_token_budget", "truncate_prompt_tokens"), (-1,)),
        **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
        "modalities": (["text"],),
        "reasoning_format": ("auto", "deepseek", "parsed"),
        "suffix": ("",),
        "verbosity": ("medium",),
    }
)
# Fields of NOT_SERVED that the header names even if they ask for nothing.
_NAMED = frozenset(("modalities",))


class Strict(BaseModel):
    """An object of a request. Nulls count as absent. `dropped` names the fields that `_sift` removed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    inner: ClassVar[tuple[str, ...]] = ()  # fields that hold `Strict` objects, which may ignore fields too
    # Names that `_sift` need not look at. Most objects have no others.
    plain: ClassVar[frozenset[str]] = frozenset()

    dropped: SkipJsonSchema[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        names = (field.alias or name for name, field in cls.model_fields.items())
        cls.plain = frozenset(names) - cls.harmless - {"dropped"}

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, data: Any) -> Any:
        """Drop nulls, harmless fields and unserved fields that ask for nothing. A harmless field with a type stays."""
        if not isinstance(data, dict) or (data.keys() <= cls.plain and None not in data.values()):
            return data
        served = cls.plain | cls.model_fields.keys()
        remaining: dict[str, Any] = {}
        ignored = []
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.harmless or (name == "parallel_tool_calls" and name not in served and not data.get("tools")):
                ignored.append(name)
                if name not in served:
                    continue
            elif name in cls.unserved and name not in served:
                if not _is_neutral(name, data, cls.unserved[name]):
                    refuse(name, value, "is not served here; leave it out")
                if name in _NAMED:
                    ignored.append(name)
                continue
            remaining[name] = value
        if "dropped" in remaining:
            raise ValidationError.from_exception_data(
                "request", [InitErrorDetails(type="extra_forbidden", loc=("dropped",), input=remaining["dropped"])]
            )
        return {**remaining, "dropped": tuple(ignored)}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the given fields without effect; those of inner objects are paths."""
        names = list(self.dropped)
        for field in self.inner:
            name, value = type(self).model_fields[field].alias or field, getattr(self, field)
            objects = value if isinstance(value, list) else [value]
            names += [f"{name}.{each}" for item in objects if isinstance(item, Strict) for each in item.ignored]
        return tuple(dict.fromkeys(names))


def refuse(name: str, value: Any, message: str) -> NoReturn:
    """Raise the `ValidationError` of a field of the object under validation. `message` follows the field's name."""
    error = InitErrorDetails(type=PydanticCustomError("refused", message), loc=(name,), input=value)  # type: ignore[arg-type]
    raise ValidationError.from_exception_data("request", [error])


def _is_neutral(name: str, data: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
    """Return whether a field's value gives the same answer as leaving it out."""
    value = data[name]
    if name == "best_of":
        n = data.get("n")
        return type(value) is int and value == (1 if n is None else n)
    return any(type(value) is type(each) and value == each for each in values)
