"""Tools of a chat request: their validation, and how answers that may call them are constrained and parsed."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from moeyard_router.api.structured import Constraint, check_constants
from moeyard_router.errors import bad_request
from moeyard_router.text import exact_json
from moeyard_router.text.answer_formats import AnswerFormats
from moeyard_router.text.answer_grammar import BLANKS_OF_ARGUMENTS, AllowedCalls, Thinking, answer_grammar, can_be_part
from moeyard_router.text.extraction import Extraction
from moeyard_router.text.reasoning import closes_block
from moeyard_router.text.template import TemplateTraits
from moeyard_router.text.tool_formats import JSON_CALLS, TOOL_FORMATS
from moeyard_worker.protocol import MAX_GRAMMAR_BYTES, Grammar

MAX_TOOLS = 128  # as OpenAI
MAX_DEPTH = 64  # nested objects and lists in a tool; schemas written by people have about a dozen
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Function(BaseModel):
    """One function. Other fields of its object are passed to the template, for the model to read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise PydanticCustomError("name", "expected 1 to 64 letters, digits, underscores and dashes")
        return value

    @field_validator("parameters")
    @classmethod
    def _parameters(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise PydanticCustomError("parameters", "expected a JSON schema of type 'object'")
        return value


class Tool(BaseModel):
    """One tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        made = handler(data)
        function = {key: value for key, value in data["function"].items() if value is not None}
        made._given = {key: value for key, value in data.items() if value is not None} | {"function": function}
        return made

    @property
    def given(self) -> dict[str, Any]:
        """The object for the template: the client's fields in their order, without nulls."""
        return self._given


def check_tools(value: Any) -> Any:
    """Raise `PydanticCustomError` for too many or too deep tools, before their validation."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "tools", "{count} tools, at most {limit} are allowed", {"count": len(value), "limit": MAX_TOOLS}
        )
    return check_depth(value, outer=2)  # the list and the tool's object


def check_depth(value: Any, *, outer: int = 0) -> Any:
    """Raise `PydanticCustomError` for JSON deeper than MAX_DEPTH levels, not counting `outer` levels around it."""
    layer, depth = [value], 0
    while layer:
        nested = [v for v in layer if isinstance(v, dict | list)]
        if nested and depth >= MAX_DEPTH + outer:
            raise PydanticCustomError("tools", "nested deeper than {limit} levels", {"limit": MAX_DEPTH})
        layer = [each for v in nested for each in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return value


def check_tool_choice(value: Any) -> Any:
    """Return the value if it is "none", "auto", "required" or names a function, else raise `PydanticCustomError`."""
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(), **more}, **others} if not more and not others:
            return value
    raise PydanticCustomError(
        "tool_choice",
        'expected "none", "auto", "required" or an object {"type": "function", "function": {"name": ...}}',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A request's tools and tool choice. `choice` is "none" without tools; only "named" has a `name`."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None
    one_call: bool = False

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template. None if no tool may be called, so that the model calls none."""
        return None if self.choice == "none" else [tool.given for tool in self.tools]

    @property
    def num_chars(self) -> int:
        """The approximate characters that a template writes for the tools."""
        return 0 if self.choice == "none" else len(exact_json.dumps(self.shown))

    def callable_functions(self, *, only_strict: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
        """Return name and schema of each callable function. `only_strict`: others accept any arguments."""
        found = [tool.function for tool in self.tools if self.name in (None, tool.function.name)]
        given = [(f.name, {} if only_strict and not f.strict else f.parameters or {}) for f in found]
        return [(name, {"type": "object", **schema}) for name, schema in given]


def tool_use(tools: list[Tool] | None, choice: str | dict[str, Any] | None, *, parallel: bool | None) -> ToolUse:
    """Combine the three fields of a request. Raises `ApiError` 400 if they contradict each other."""
    if not tools:
        if isinstance(choice, dict) or choice == "required":
            raise bad_request("'tool_choice' asks for a call, and there are no 'tools'", "tool_choice")
        return ToolUse()
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if all(tool.function.name != name for tool in tools):
            raise bad_request(f"'tool_choice': no function of 'tools' is named '{name:.64}'", "tool_choice")
        return ToolUse(tools=tuple(tools), choice="named", name=name, one_call=True)
    if choice == "none":
        return ToolUse(tools=tuple(tools))
    return ToolUse(
        tools=tuple(tools), choice="required" if choice == "required" else "auto", one_call=parallel is False
    )


def check_served(use: ToolUse, formats: AnswerFormats, traits: TemplateTraits) -> None:
    """Raise `ApiError` 400 if the template or parsers do not support these tools. Forced calls need neither."""
    if use.choice != "auto":
        return
    if "tools" not in traits.variables:
        raise bad_request("'tools': the chat template of this model takes no tools", "tools")
    if formats.tools is None:
        message = "the format of this model's tool calls is unknown; start the server with --tool-call-parser"
        raise bad_request(f"'tools': {message}: {', '.join(TOOL_FORMATS)}", "tools")
    if not formats.auto_tools:
        raise bad_request("'tool_choice': \"auto\" needs --enable-auto-tool-choice on this server", "tool_choice")


def answering(
    use: ToolUse,
    formats: AnswerFormats,
    *,
    shown: bool,
    prompt: str,
    begun: str | None,
    include_reasoning: bool,
    body: Constraint | None,
) -> tuple[Extraction | None, Constraint | None]:
    """Return how the answers to `prompt`, continued from `begun`, are parsed (None: all is content), and their grammar.

    Without a known format, or if the template shows no tools (`shown`), a required call is a JSON list, or the
    arguments of the named function (vLLM). `body` constrains content after the reasoning if no tool is called.
    Raises `ApiError` 400.
    """
    tools = None if use.choice == "none" else formats.tools
    named = None
    if use.choice in ("required", "named") and not (shown and tools is not None):
        named, tools = (use.name, None) if use.choice == "named" else (None, JSON_CALLS)
    # A grammar that the client wrote applies to the whole answer.
    reasoning = formats.reasoning if body is None or can_be_part(body.grammar) else None
    if tools is None and named is None and reasoning is None:
        return None, body
    if use.choice in ("required", "named"):
        body = _arguments_of(use) if named is not None else None  # no content is possible
    elif tools is not None and body is not None and not can_be_part(body.grammar):
        raise bad_request(f"'{body.fields[0]}': a grammar leaves no room for calls of 'tools'", body.fields[0])
    must = body is not None or use.choice != "auto"
    # The model may decide to call, but the arguments of strict functions must follow their schemas.
    forced = must or any(tool.function.strict for tool in use.tools)
    extraction = Extraction(
        visible=formats.visible(tools),
        reasoning=reasoning,
        inside=reasoning is not None and reasoning.inside_after(prompt, begun),
        tools=tools,
        named=named,
        schemas={} if tools is None else {t.function.name: t.function.parameters or {} for t in use.tools},
        one_call=use.one_call,
        hide_reasoning=not include_reasoning,
        # A grammar of calls treats everything in the block as reasoning.
        calls_end_reasoning=not forced,
        ends_as_tool_calls=use.choice != "named",
        id_seed=secrets.token_hex(8),
    )
    thinking: Thinking = "inside" if extraction.inside else "none"
    if reasoning is not None and thinking == "none" and begun is None and not closes_block(prompt):
        thinking = "possible"
    calls = None
    if tools is not None and forced:
        functions = use.callable_functions(only_strict=not must)
        check_constants([schema for _, schema in functions], "tools")
        calls = AllowedCalls(form=tools, functions=functions, one_call=use.one_call, among_text=not must)
    part = None if body is None else body.grammar
    grammar = answer_grammar(thinking=thinking, calls=calls, body=part, token_ids=formats.token_ids)
    if grammar is None:
        return extraction, None
    fields = (() if calls is None else ("tools",)) + (() if body is None else body.fields)
    constraint = Constraint(grammar, tuple(dict.fromkeys(fields)))
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"the form of this answer makes a grammar of {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
        raise bad_request(f"'{constraint.fields[0]}': {message}", constraint.fields[0])
    return extraction, constraint


def _arguments_of(use: ToolUse) -> Constraint:
    """Return the constraint to the arguments of the only callable function, as a JSON text."""
    ((_, schema),) = use.callable_functions()
    check_constants(schema, "tools")
    written = {"x-guidance": {"whitespace_pattern": BLANKS_OF_ARGUMENTS}, **schema}
    return Constraint(Grammar(kind="json_schema", text=exact_json.dumps(written).decode()), ("tools",))
