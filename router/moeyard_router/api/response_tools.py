"""Tools of the Responses API, and the functions that the model is offered in their place.

Chat templates know functions only. A custom tool, whose input is free text, becomes a function with one text parameter.
The tools of a namespace become functions whose names begin with it. Tools that run on OpenAI's servers are left out.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict

from moeyard_router.api.fields import Strict
from moeyard_router.api.translation import chosen, given, one_of
from moeyard_router.text import exact_json

_HOSTED = re.compile(r"web_search(_\w+)?|image_generation|tool_search")
_UNSERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"allowed_callers": (["direct"],), "async": (False,)})
_MAX_NAME = 64  # characters of a function's name
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class FunctionTool(Strict):
    """A function that the model may call. All tools are shown at once, deferred ones too."""

    harmless = frozenset(("defer_loading", "output_schema"))
    unserved = _UNSERVED

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Strict):
    """A tool whose input is text. The model reads what its format says; nothing holds it to that."""

    harmless = frozenset(("defer_loading",))
    unserved = _UNSERVED

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class HostedTool(Strict):
    """A tool that runs on OpenAI's servers. No model here can call it, so it is left out and named."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def ignored(self) -> tuple[str, ...]:
        return (self.type,)


class NamespaceTool(Strict):
    inner = ("tools",)

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, one_of(FunctionTool, CustomTool)]]


_KINDS: Mapping[str, type[Strict]] = MappingProxyType(
    {"function": FunctionTool, "custom": CustomTool, "namespace": NamespaceTool}
)


def _by_type(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    hosted = isinstance(kind, str) and _HOSTED.fullmatch(kind)
    return HostedTool.model_validate(value) if hosted else chosen(value, _KINDS)


ResponseTool = Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, BeforeValidator(_by_type)]


class ChosenTool(Strict):
    """The one tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One tool in the client's terms: number `index` of the tools, and of its namespace if it is in one."""

    name: str
    namespace: str | None
    index: tuple[int, ...]
    tool: Mapping[str, Any]
    preface: str = ""

    @property
    def custom(self) -> bool:
        """Whether the input is free text."""
        return bool(self.tool["type"] == "custom")

    @property
    def address(self) -> tuple[str | None, str]:
        return self.namespace, self.name

    def function(self, name: str) -> dict[str, Any]:
        """The function of this name that the model is offered in its place."""
        description = self.preface + (self.tool.get("description") or "")
        if not self.custom:
            known = given(parameters=self.tool.get("parameters"), strict=self.tool.get("strict"))
            return {"name": name, **given(description=description or None), **known}
        form = self.tool.get("format") or {}
        if form.get("type") == "grammar":
            description += f"\n\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The input of the tool, as plain text."}},
            "required": ["input"],
            "additionalProperties": False,
        }
        return {"name": name, "description": description.lstrip(), "parameters": parameters}


def plain_tools(tools: Sequence[Strict]) -> list[dict[str, Any]]:
    """Those that run at the client, as it wrote them; an answer repeats them."""
    plain: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            head = given(type=tool.type, name=tool.name, description=tool.description)
            plain.append({**head, "tools": plain_tools(tool.tools)})
        elif isinstance(tool, FunctionTool):
            plain.append(tool.model_dump(exclude={"dropped"}))
        elif isinstance(tool, CustomTool):
            plain.append(given(**tool.model_dump(exclude={"dropped"})))
    return plain


def offers_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Offer]:
    """What the model is offered for `plain_tools`, by the names under which it calls them."""
    offers: dict[str, Offer] = {}
    for offer in _each(tools):
        first = name = offer.name if offer.namespace is None else flat_name(offer.namespace, offer.name)
        for number in itertools.count(2):
            if name not in offers or offers[name].address == offer.address:
                break
            name = f"{first[: _MAX_NAME - 4]}_{number}"
        offers[name] = offer
    return offers


def _each(tools: Sequence[Mapping[str, Any]]) -> Iterator[Offer]:
    for index, tool in enumerate(tools):
        name = tool["name"]
        if tool["type"] != "namespace":
            yield Offer(name=name, namespace=None, index=(index,), tool=tool)
            continue
        about = f"Tools of {name}: {tool['description']}\n\n" if tool.get("description") else ""
        for number, member in enumerate(tool["tools"]):
            yield Offer(
                name=member["name"], namespace=name, index=(index, number), tool=member, preface="" if number else about
            )


def flat_name(namespace: str, name: str) -> str:
    """The name of a function that stands for a tool of a namespace; a long one ends with a digest."""
    joined = _NOT_IN_NAMES.sub("_", f"{namespace}{'' if namespace.endswith('__') else '__'}{name}")
    if len(joined) <= _MAX_NAME:
        return joined
    return f"{joined[: _MAX_NAME - 9]}_{hashlib.blake2b(joined.encode(), digest_size=4).hexdigest()}"


def custom_arguments(text: str) -> str:
    """The input of a custom tool as arguments of the function that stands for it."""
    return exact_json.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from arguments: `input`, else the object's only text, else all that was written."""
    try:
        values = exact_json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        found = values.get("input", next(iter(values.values())) if len(values) == 1 else None)
        if isinstance(found, str):
            return found
    return arguments
