"""Chat messages: the models of what clients send, and their translation to a chat template's variables."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from moeyard_router.api.fields import Strict, refuse
from moeyard_router.api.tools import check_depth
from moeyard_router.errors import bad_request
from moeyard_router.text import exact_json
from moeyard_router.text.template import TemplateTraits

INVALID_JSON = "INVALID_JSON"  # key of arguments that are no JSON object, where an API or template needs one
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # including a truncated string
_ESCAPES = MappingProxyType({code: f"\\u{code:04x}" for code in range(32)})


class TextPart(Strict):
    """A text part of a message's content, with the type names of both APIs. Images and audio are not served."""

    harmless = frozenset(("annotations", "cache_control", "id", "provider_specific_fields"))

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> "TextPart":
        if self.shown is None:
            refuse("refusal" if self.type == "refusal" else "text", None, "is required")
        return self

    @property
    def shown(self) -> str | None:
        """The part's text or refusal."""
        return self.refusal if self.type == "refusal" else self.text


class FunctionCall(Strict):
    """A function's name and arguments: JSON text, as in OpenAI's API, or the object."""

    harmless = frozenset(("parsed_arguments",))  # added by the `parse` helper of OpenAI's client

    name: str
    arguments: Annotated[str | dict[str, Any] | None, BeforeValidator(check_depth)] = None


class ToolCall(Strict):
    """A tool call by the assistant, which the client sends back."""

    inner = ("function",)
    harmless = frozenset(("cache_control", "extra_content", "index", "provider_specific_fields"))

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One message. `content` is a string or a list of strings and text parts, and only the assistant's may be absent.

    `reasoning_content` is the name of `reasoning` in DeepSeek's API and older vLLM.
    """

    inner = ("parts", "tool_calls")
    harmless = frozenset(
        (
            *("annotations", "cache_control", "created_at", "id", "metadata", "model", "parsed"),
            *("provider_specific_fields", "reasoning_details", "thinking_blocks", "timestamp", "usage", "weight"),
        )
    )
    unserved = MappingProxyType(
        {
            "audio": (),
            "function_call": (),
            "images": ([],),
            "partial": (False,),  # Kimi's and Mistral's names of continue_final_message
            "prefix": (False,),
            "type": ("message",),
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    parts: Any = Field(default=None, alias="content")
    refusal: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("parts", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return _PARTS.validate_python([{"type": "text", "text": p} if isinstance(p, str) else p for p in value])
        raise PydanticCustomError("content", "expected a string or a list of text parts")

    @model_validator(mode="after")
    def _by_role(self) -> "ChatMessage":
        if self.role != "assistant":
            if self.parts is None:
                refuse("content", None, "is required")
            for name in ("tool_calls", "refusal"):
                if getattr(self, name):
                    refuse(name, getattr(self, name), f"only the assistant has {name}, not the role '{self.role}'")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts of all parts, then the refusal."""
        texts = [self.parts] if isinstance(self.parts, str) else [part.shown for part in self.parts or ()]
        return [*filter(None, texts), self.refusal] if self.refusal else texts

    @property
    def content(self) -> str | None:
        """All texts joined by newlines, as in vLLM; None without texts."""
        texts = self.texts
        return "\n".join(texts) if texts else None

    @property
    def num_chars(self) -> int:
        """The approximate characters that a template writes for the message."""
        calls = sum(len(c.function.name) + len(str(c.function.arguments)) for c in self.tool_calls or ())
        return len(self.content or "") + len(self.reasoning or self.reasoning_content or "") + calls


_PARTS = TypeAdapter(list[TextPart])


class Arguments(dict[str, Any]):
    """Arguments of a tool call for templates: an object that also behaves as its JSON text.

    transformers and vLLM pass an object. Some templates (DeepSeek's) concatenate the arguments with text, the form of
    OpenAI's API.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def template_messages(
    messages: Sequence[ChatMessage], traits: TemplateTraits, *, continued: bool = False
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the template's messages, and the names of fields without effect.

    `developer` becomes `system` if the template lacks the role. System and developer messages are merged into a leading
    one if the template needs that, except a last message that is `continued`. Raises `ApiError` 400 for messages or
    calls of tools that the template cannot show.
    """
    ignored: list[str] = []
    given = []
    for index, message in enumerate(messages):
        if message.role == "tool" and not traits.knows("tool"):
            where = f"messages.{index}.role"
            raise bad_request(f"'{where}': the chat template of this model has no role 'tool'", where)
        if message.tool_calls and not traits.knows("tool_calls"):
            where = f"messages.{index}.tool_calls"
            raise bad_request(f"'{where}': the chat template of this model shows no calls of tools", where)
        ignored += message.ignored
        given.append(_template_message(message, traits, ignored))
    given = _joined_systems(given[:-1], traits) + given[-1:] if continued else _joined_systems(given, traits)
    return given, tuple(f"messages.{name}" for name in dict.fromkeys(ignored))


def _joined_systems(given: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Merge system and developer messages into a leading one if the template refuses or omits later ones."""
    systems = [(i, message) for i, message in enumerate(given) if message["role"] in ("system", "developer")]
    if not systems:
        return given
    first = systems[0][1]
    # Messages before the first turn follow each other, so their number equals their index.
    beyond = {(first["role"], message["role"], number != i) for number, (i, message) in enumerate(systems) if i}
    if beyond.isdisjoint(traits.alone_first):
        return given
    text = "\n\n".join(filter(None, (_text_of(message["content"]) for _, message in systems)))
    merged = {**first, "content": _content([text], traits, first["role"], is_list=False)}
    return [merged, *(message for message in given if message["role"] not in ("system", "developer"))]


def _text_of(content: str | list[dict[str, str]] | None) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _content(texts: Sequence[str], traits: TemplateTraits, role: str, *, is_list: bool) -> str | list[dict[str, str]]:
    """Return texts in the form that the template reads: parts if it iterates over parts, else one text."""
    if role in traits.only_parts or (is_list and role in traits.part_roles):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _template_message(message: ChatMessage, traits: TemplateTraits, ignored: list[str]) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not traits.knows("developer") else message.role
    content: Any = _content(message.texts, traits, role, is_list=isinstance(message.parts, list))
    if not message.texts:
        # Templates that concatenate texts, or would print "None", get an empty text.
        content = None if message.tool_calls and traits.null_content else ""
    out: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        out["name"] = message.name
        ignored += [] if traits.knows("name") else ["name"]
    thoughts = message.reasoning if message.reasoning is not None else message.reasoning_content
    if thoughts is not None:
        # Templates read either name and clients send either, so set both, as vLLM does.
        out |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if not (traits.knows("reasoning_content") or traits.knows("reasoning")):
            ignored += [name for name in ("reasoning", "reasoning_content") if getattr(message, name) is not None]
    if message.tool_calls:
        out["tool_calls"] = [_template_call(call, traits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def _template_call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, traits)}
    head = {} if call.id is None else {"id": call.id}
    return {**head, "type": call.type, "function": function}


def _arguments(given: str | dict[str, Any] | None, traits: TemplateTraits) -> Arguments | str:
    """Return arguments as an object if they are one. Else return the text, or an object if the template needs one."""
    if isinstance(given, dict):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    text = given or "{}"
    try:
        values = check_depth(exact_json.loads(text))
    except (ValueError, PydanticCustomError):
        values = None
    if isinstance(values, dict):
        return Arguments(values, text)
    return Arguments(_object_in(text), text) if traits.object_arguments else text


def _object_in(text: str) -> dict[str, Any]:
    """Return the object that a text begins. Any other text becomes the value of INVALID_JSON."""
    # Models write unescaped line breaks into strings, which JSON forbids.
    escaped = _STRING.sub(lambda found: found[0].translate(_ESCAPES), text)
    try:
        values = check_depth(from_json(escaped, allow_partial="trailing-strings"))
    except (ValueError, PydanticCustomError):
        values = text
    if values is None:
        return {}
    return values if isinstance(values, dict) else {INVALID_JSON: text}
