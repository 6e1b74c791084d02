"""Tools of the Responses API, and their translation to functions, the only tools of chat templates.

A custom tool, whose input is free text, becomes a function with one text parameter. The tools of a namespace become
functions whose names begin with it. Tools that run on OpenAI's servers are left out.
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
    """A function. Deferred functions are shown at once too."""

    harmless = frozenset(("defer_loading", "output_schema"))
    unserved = _UNSERVED

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Strict):
    """A tool whose input is text. The model sees its format, but nothing enforces it."""

    harmless = frozenset(("defer_loading",))
    unserved = _UNSERVED

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class HostedTool(Strict):
    """A tool that runs on OpenAI's servers. It is left out and named as ignored."""

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
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One tool as the client wrote it. `index` is its place in the tools, and in its namespace if it has one."""

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
        """Namespace and name."""
        return self.namespace, self.name

    def function(self, name: str) -> dict[str, Any]:
        """Return the function that the model sees, under this name."""
        description = self.preface + (self.tool.get("description") or "")
        if not self.custom:
            given_fields = given(parameters=self.tool.get("parameters"), strict=self.tool.get("strict"))
            return {"name": name, **given(description=description or None), **given_fields}
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
    """Return the tools that run at the client, as it wrote them. The answer repeats them."""
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
    """Return the tools of `plain_tools` by the function names under which the model calls them."""
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
    """Return the function name of a tool in a namespace. A long name ends with a digest."""
    joined = _NOT_IN_NAMES.sub("_", f"{namespace}{'' if namespace.endswith('__') else '__'}{name}")
    if len(joined) <= _MAX_NAME:
        return joined
    return f"{joined[: _MAX_NAME - 9]}_{hashlib.blake2b(joined.encode(), digest_size=4).hexdigest()}"


def custom_arguments(text: str) -> str:
    """Return a custom tool's input as the arguments of its function."""
    return exact_json.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from arguments: `input`, else the object's only text, else all the text."""
    try:
        values = exact_json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        found = values.get("input", next(iter(values.values())) if len(values) == 1 else None)
        if isinstance(found, str):
            return found
    return arguments
