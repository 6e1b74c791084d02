"""What becomes of fields that are not served: dropped where they can change nothing, refused by name where they can.

The names are those of OpenAI's requests, of vLLM's and SGLang's, and of what clients add to them. docs/api.md has the
whole table, beside the fields that are served. A field that stands in no table here and in no model is unknown, and an
error that names it; any field may be null, which is the same as leaving it out.
"""

from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

# The text of the answer is the same with and without them: identities, storage, hints for speed, settings of media that
# no request here has, and what clients send for servers of other kinds. The reply names them in `x-moeyard-ignored`.
IGNORED = frozenset(
    (
        *("cache_control", "media_io_kwargs", "metadata", "mm_processor_kwargs", "prediction", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "provider_specific_fields", "request_id", "return_mm_kwargs"),
        *("return_token_offsets", "rid", "safety_identifier", "service_tier", "session_id", "store"),
        *("stream_interval", "truncation_side"),
        # Identities of a conversation, and what a chat application or its proxy keeps beside it.
        *("chat_id", "client_metadata", "conversation_id", "message_id", "parent_id", "thread_id", "trace_id"),
        *(
            "background_tasks",
            "features",
            "filter_ids",
            "model_item",
            "tool_ids",
            "tool_servers",
            "user_id",
            "variables",
        ),
        *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id", "proxy_server_request"),
        *("allowed_openai_params", "custom_llm_provider", "drop_params", "num_retries", "tags", "timeout"),
        # OpenRouter's choice of a provider.
        *("models", "provider", "route", "transforms"),
        # Ollama, llama.cpp, LM Studio, SGLang: memory, caches, progress. Samplers in Ollama's `options` are not read.
        *("keep_alive", "num_ctx", "options"),
        *("cache_prompt", "id_slot", "n_keep", "return_progress", "slot_id", "timings_per_token"),
        *("data_parallel_rank", "draft_model", "routed_dp_rank", "ttl"),
        # DashScope, SiliconFlow, GLM: how a stream is cut, images, and budgets of thinking, which are not enforced.
        *("incremental_output", "thinking_budget", "tool_stream", "vl_high_resolution_images"),
    )
)
# Fields that ask for something that this server does not do, with the values at which they ask for nothing.
NOT_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": (),
        "audio": (),
        "bad_words": ([],),
        "best_of": (),  # also as many as `n`: see _asks_nothing
        "cache_salt": (),  # whoever asks for it must not share a prefix without it
        "chat_template": (),
        "do_sample": (True,),
        "documents": ([],),
        "dry_multiplier": (0, 0.0),
        "ec_transfer_params": ({},),
        "echo": (False,),  # of chats; completions have it
        "enable_search": (False,),
        "function_call": ("none", "auto"),  # of `functions`, and there are none
        "functions": ([],),
        "guided_decoding_backend": (),
        "include_reasoning": (True,),
        "kv_transfer_params": ({},),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "mirostat": (0,),
        "modalities": (["text"],),
        "plugins": ([],),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "reasoning_format": ("auto", "deepseek", "parsed"),
        "repetition_detection": (),
        "return_hidden_states": (False,),
        "return_prompt_text": (False,),
        "return_tokens_as_token_ids": (False,),
        "routed_experts_prompt_start": (0,),
        "separate_reasoning": (True,),
        "spaces_between_special_tokens": (True,),
        "stream_reasoning": (True,),
        "structural_tag": (),
        "suffix": ("",),
        "thinking_token_budget": (-1,),
        "tool_choice": ("none", "auto"),  # of `tools`, and there are none
        "tools": ([],),
        "top_a": (0, 0.0),
        "truncate_prompt_tokens": (-1,),  # as many as the model takes: a longer prompt is a 400 that says so
        "typical_p": (1, 1.0),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "vllm_xargs": ({},),
        "watermarking": (False,),
        "web_search_options": (),
        "xtc_probability": (0, 0.0),
    }
)
# Of those, the ones that are named in the header although they asked for nothing else than what happens.
_NAMED = frozenset(("modalities",))


class Strict(BaseModel):
    """An object of a request. A null counts as absent; `dropped` names what `sift` took out, no client may send it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    inner: ClassVar[tuple[str, ...]] = ()  # fields whose objects tell what they ignore
    # Names about which there is nothing to decide; most objects have no other.
    plain: ClassVar[frozenset[str]] = frozenset()

    dropped: SkipJsonSchema[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        names = (field.alias or name for name, field in cls.model_fields.items())
        cls.plain = frozenset(names) - cls.harmless - {"dropped"}

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, data: Any) -> Any:
        if not isinstance(data, dict) or (data.keys() <= cls.plain and None not in data.values()):
            return data
        kept, dropped = sift(
            data, served=cls.plain | cls.model_fields.keys(), harmless=cls.harmless, unserved=cls.unserved
        )
        if "dropped" in kept:
            raise ValidationError.from_exception_data(
                "request", [InitErrorDetails(type="extra_forbidden", loc=("dropped",), input=kept["dropped"])]
            )
        return {**kept, "dropped": dropped}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that were given and have no effect, those of inner objects as paths."""
        names = list(self.dropped)
        for field in self.inner:
            name, value = type(self).model_fields[field].alias or field, getattr(self, field)
            objects = value if isinstance(value, list) else [value]
            names += [f"{name}.{each}" for item in objects if isinstance(item, Strict) for each in item.ignored]
        return tuple(dict.fromkeys(names))


def sift(
    data: Mapping[str, Any],
    *,
    served: Container[str],
    harmless: frozenset[str],
    unserved: Mapping[str, tuple[Any, ...]],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return `data` without nulls and fields that ask for nothing, and the names of ignored fields.

    A harmless field that is `served` too stays. Raises `ValidationError` at an `unserved` field that asks for
    something.
    """
    kept: dict[str, Any] = {}
    ignored = []
    for name, value in data.items():
        if value is None:
            continue
        if name in harmless or (name == "parallel_tool_calls" and name not in served and not data.get("tools")):
            ignored.append(name)
            if name not in served:
                continue
        elif name in unserved and name not in served:
            if not _asks_nothing(name, data, unserved[name]):
                refuse(name, value, "is not served here; leave it out")
            if name in _NAMED:
                ignored.append(name)
            continue
        kept[name] = value
    return kept, tuple(ignored)


def refuse(name: str, value: Any, message: str) -> NoReturn:
    """Raise the `ValidationError` of one field of the object under validation; `message` goes on after its name."""
    error = InitErrorDetails(type=PydanticCustomError("refused", message), loc=(name,), input=value)  # type: ignore[arg-type]
    raise ValidationError.from_exception_data("request", [error])


def _asks_nothing(name: str, data: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
    """Whether a field has a value under which the answer is the same as without it."""
    value = data[name]
    if name == "best_of":
        n = data.get("n")
        return type(value) is int and value == (1 if n is None else n)
    return any(type(value) is type(each) and value == each for each in values)
