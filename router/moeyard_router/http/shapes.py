"""What the models of requests check by code and not by types, in the words of JSON schema, for /openapi.json.

A description that is wider than what is let in is not false, but programs that make requests of it, and people who read
it, get a 400 for what it allows.
"""

from typing import Any

from moeyard_router.api.schema import MAX_STOP_STRINGS

REF = "#/components/schemas/"
_ROLES = ("system", "developer", "user", "tool")


def narrow(schemas: dict[str, Any], *, vocab_size: int) -> None:
    """Put into `schemas`, generated from the models, what these check besides; more schemas may appear."""
    schemas.setdefault("TextPart", _closed({"type": {"const": "text"}, "text": {"type": "string"}}))
    for (model, field), shape in _fields(vocab_size).items():
        schemas[model]["properties"][field] = shape
    either = [_given("prompt", {"type": "string"}), _given("messages", {"type": "array"})]
    schemas["TokenizeRequest"]["oneOf"] = either
    schemas["ChatMessage"] = _by_role(schemas, schemas["ChatMessage"])
    schemas["ResponsePart"] = _by_kind(schemas["ResponsePart"])


def _fields(vocab_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    """(model, field) and what is let in."""
    null, text = {"type": "null"}, {"type": "string", "minLength": 1}
    tool_name = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
    arguments = {"type": "object", "properties": {"type": {"const": "object"}}, "additionalProperties": True}
    ids = _list_of({"type": "integer", "minimum": 0, "maximum": vocab_size - 1})
    texts = _list_of(text)
    stop = {"anyOf": [text, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": text}, null]}
    named = _closed({"type": {"const": "function"}, "function": _closed({"name": {"type": "string"}})})
    kinds = ("MessageItem", "CallItem", "CustomCallItem", "CallOutputItem", "ReasoningItem", "HostedItem")
    items = [{"$ref": f"{REF}{name}"} for name in kinds]
    return {
        ("CompletionRequest", "prompt"): {"anyOf": [text, ids, texts, _list_of(ids)]},
        ("ChatMessage", "content"): {"anyOf": [{"type": "string"}, _list_of({"$ref": f"{REF}TextPart"}), null]},
        ("ChatRequest", "tool_choice"): {"anyOf": [{"enum": ["none", "auto", "required"]}, named, null]},
        ("CompletionRequest", "stop"): stop,
        ("ChatRequest", "stop"): stop,
        ("MessagesRequest", "stop_sequences"): {"anyOf": [stop["anyOf"][1], null]},
        ("ResponsesRequest", "input"): {"anyOf": [text, _list_of({"anyOf": items})]},
        ("DetokenizeRequest", "tokens"): {"type": "array", "items": ids["items"]},
        ("Function", "name"): tool_name,
        ("FunctionTool", "name"): tool_name,
        ("ClientTool", "name"): tool_name,
        ("CustomTool", "name"): tool_name,
        ("Function", "parameters"): {"anyOf": [arguments, null]},
        ("FunctionTool", "parameters"): {"anyOf": [arguments, null]},
        ("ClientTool", "input_schema"): arguments,
    }


def _by_role(schemas: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """A message as one of two: the assistant's, or another's, who has content and neither calls nor refusals."""
    own, other, null = message["properties"], dict(message["properties"]), {"type": "null"}
    for name in ("tool_calls", "refusal"):
        other[name] = null
    content = {"anyOf": [shape for shape in own["content"]["anyOf"] if shape != null]}
    schemas["AssistantMessage"] = {
        **message,
        "properties": own | {"role": {"const": "assistant"}},
        "title": "AssistantMessage",
    }
    schemas["OtherMessage"] = {
        **message,
        "properties": other | {"role": {"enum": list(_ROLES)}, "content": content},
        "required": ["role", "content"],
        "title": "OtherMessage",
    }
    return {"anyOf": [{"$ref": f"{REF}OtherMessage"}, {"$ref": f"{REF}AssistantMessage"}]}


def _by_kind(part: dict[str, Any]) -> dict[str, Any]:
    """A part of the Responses API as one of two: text, or a refusal, each under its own name."""
    kinds = []
    for names, field in ((["text", "input_text", "output_text"], "text"), (["refusal"], "refusal")):
        properties = part["properties"] | {"type": {"enum": names}, field: {"type": "string"}}
        kinds.append({**part, "properties": properties, "required": ["type", field]})
    return {"anyOf": kinds}


def _given(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    return {"required": [name], "properties": {name: shape}}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
