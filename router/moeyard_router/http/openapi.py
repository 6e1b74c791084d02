"""/openapi.json and /docs: every route with its requests, answers and statuses.

The models that validate requests also describe them. `narrow` adds the checks that are code, because programs would
otherwise generate requests that get a 400. documents/replies.json describes the answers; tests check it.
"""

import base64
import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from moeyard_router.api.anthropic import CountTokensRequest, MessagesRequest
from moeyard_router.api.responses import ResponsesRequest
from moeyard_router.api.schema import (
    MAX_STOP_STRINGS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from moeyard_router.api.sglang import SglangRequest
from moeyard_router.api.token_ids import GenerateRequest
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ANTHROPIC_PATH

REF = "#/components/schemas/"
_ROLES = ("system", "developer", "user", "tool")


def narrow(schemas: dict[str, Any], *, vocab_size: int) -> None:
    """Add the checks that are code to the `schemas` of the models, in place."""
    schemas.setdefault("TextPart", _closed({"type": {"const": "text"}, "text": {"type": "string"}}))
    for (model, field), shape in _fields(vocab_size).items():
        schemas[model]["properties"][field] = shape
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [name], "properties": {name: shape}, "title": f"Tokenize{name.title()}"}
        for name, shape in (("prompt", {"type": "string"}), ("messages", {"type": "array", "items": {}}))
    ]
    schemas["ChatMessage"] = _by_role(schemas, schemas["ChatMessage"])
    schemas["ResponsePart"] = _by_kind(schemas["ResponsePart"])


def _fields(vocab_size: int) -> dict[tuple[str, str], dict[str, Any]]:
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
        ("TokenSampling", "stop"): stop,
        ("TokenSampling", "trace_decode_token_ids"): {"anyOf": [ids, null]},
        ("GenerateRequest", "token_ids"): ids,
        ("SglangSampling", "stop"): stop,
        ("SglangRequest", "text"): {"anyOf": [text, texts, null]},
        ("SglangRequest", "input_ids"): {"anyOf": [ids, _list_of(ids), null]},
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
    """Return a message as one of two: the assistant's, or another role's with content and no calls or refusal."""
    fields, null = message["properties"], {"type": "null"}
    content = {"anyOf": [shape for shape in fields["content"]["anyOf"] if shape != null]}
    assistant = fields | {"role": {"const": "assistant"}}
    other = fields | {"tool_calls": null, "refusal": null, "role": {"enum": list(_ROLES)}, "content": content}
    schemas["AssistantMessage"] = message | {"properties": assistant, "title": "AssistantMessage"}
    schemas["OtherMessage"] = message | {
        "properties": other,
        "required": ["role", "content"],
        "title": "OtherMessage",
    }
    return {"anyOf": [{"$ref": f"{REF}OtherMessage"}, {"$ref": f"{REF}AssistantMessage"}]}


def _by_kind(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the Responses API as one of two: text, or a refusal, each in the field of its name."""
    kinds = []
    for names, field in ((["text", "input_text", "output_text"], "text"), (["refusal"], "refusal")):
        properties = part["properties"] | {"type": {"enum": names}, field: {"type": "string"}}
        title = f"{field.title()}ResponsePart"
        kinds.append({**part, "properties": properties, "required": ["type", field], "title": title})
    return {"anyOf": kinds}


def _chunk(whole: dict[str, Any], part: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a chunk of the stream of an answer: `part` replaces the text or message of each choice."""
    fields = whole["properties"]
    choice = fields["choices"]["items"]
    shared = {name: shape for name, shape in choice["properties"].items() if name != "message"} | part
    shared["finish_reason"] = {"enum": [*choice["properties"]["finish_reason"]["enum"], None]}
    required = ["index", *part, "logprobs", "finish_reason"]
    choices = {"type": "array", "items": {**choice, "properties": shared, "required": required}}
    usage = {"anyOf": [{"$ref": f"{REF}Usage"}, {"type": "null"}]}
    properties = fields | {"object": {"const": kind}, "choices": choices, "usage": usage}
    return {**whole, "properties": properties, "required": [name for name in whole["required"] if name != "usage"]}


def _chunks(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of the chunks of chats and completions."""
    message = schemas["ChatCompletion"]["properties"]["choices"]["items"]["properties"]["message"]
    named = {"type": "object", "properties": {name: {"type": "string"} for name in ("name", "arguments")}}
    call = {"index": {"type": "integer"}, "id": {"type": "string"}, "type": {"const": "function"}, "function": named}
    calls = {"type": "array", "items": {"type": "object", "properties": call, "required": ["index", "function"]}}
    delta = {**message, "properties": message["properties"] | {"tool_calls": calls}, "required": []}
    return {
        "ChatCompletionChunk": _chunk(schemas["ChatCompletion"], {"delta": delta}, "chat.completion.chunk"),
        "CompletionChunk": _chunk(schemas["Completion"], {"text": {"type": "string"}}, "text_completion"),
    }


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_FILES = Path(__file__).parent / "documents"
_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        400: "The request is invalid, or not possible with this model and its limits.",
        401: "The API key is missing or unknown.",
        403: "The web page's origin is not allowed, or (on loopback, without keys) the Host is another server's.",
        404: "There is no such model or page.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        415: "The Content-Type is not application/json, or the body is compressed.",
        429: "The server is full; retry after the seconds in Retry-After.",
        500: "An error in this server or a worker; see the server's log.",
        503: "The fleet is not ready, has failed or is shutting down.",
    }
)
_GUARDED = (401, 403)
_BODY = (400, *_GUARDED, 404, 408, 413, 415)
_GENERATE = (*_BODY, 429, 500, 503)
_JSON, _TEXT, _HTML, _EVENTS = "application/json", "text/plain", "text/html", "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route. `reply` names a schema of documents/replies.json (None: text), `errors` are statuses."""

    path: str
    text: str
    method: str = "get"
    body: type[BaseModel] | None = None
    reply: str | None = None
    content: str = _JSON
    streams: bool = False
    errors: tuple[int, ...] = _GUARDED
    needs_key: bool = True


# POST routes: path, summary, request, answer, whether it generates.
_POSTS: tuple[tuple[str, str, type[BaseModel], str, bool], ...] = (
    ("/v1/chat/completions", "Answer a chat, whole or as a stream.", ChatRequest, "ChatCompletion", True),
    ("/v1/completions", "Continue texts or token ids, whole or as a stream.", CompletionRequest, "Completion", True),
    ("/inference/v1/generate", "Continue token ids with token ids.", GenerateRequest, "Generated", True),
    ("/generate", "SGLang's API: continue token ids or texts.", SglangRequest, "SglangGenerated", True),
    ("/v1/responses", "OpenAI's Responses API, whole or as a stream.", ResponsesRequest, "Response", True),
    ("/v1/messages", "Anthropic's Messages API, whole or as a stream.", MessagesRequest, "Message", True),
    ("/v1/messages/count_tokens", "Count the tokens of such a prompt.", CountTokensRequest, "TokenCount", False),
    ("/tokenize", "The token ids of a prompt or a chat.", TokenizeRequest, "Tokens", False),
    ("/detokenize", "The text of token ids.", DetokenizeRequest, "Text", False),
)
# The schema of a stream's chunks, by path.
_CHUNKS: Mapping[str, str] = MappingProxyType(
    {"/v1/chat/completions": "ChatCompletionChunk", "/v1/completions": "CompletionChunk"}
)
_STATES = (
    ("/livez", "get", "200 while the router runs and the fleet may recover."),
    ("/readyz", "get", "200 if a request would run now."),
    ("/health", "get", "/readyz under vLLM's name."),
    ("/health_generate", "get", "/readyz under SGLang's name."),
    ("/ping", "get", "/readyz under SageMaker's name."),
    ("/ping", "post", "/readyz under SageMaker's name."),
)
OPERATIONS = (
    *(
        Operation(
            path=path,
            text=text,
            method="post",
            body=body,
            reply=reply,
            streams=streams,
            errors=_GENERATE if streams else _BODY,
        )
        for path, text, body, reply, streams in _POSTS
    ),
    Operation(path="/v1/models", text="The served model.", reply="ModelList"),
    Operation(path="/v1/models/{id}", text="A model by its name.", reply="Model", errors=(*_GUARDED, 404)),
    Operation(path="/v1/fleet", text="State and latest snapshot of every rank.", reply="Fleet"),
    Operation(path="/v1/fleet/live", text="Data of the dashboard: fleet, totals, requests, refusals.", reply="Live"),
    Operation(path="/v1/fleet/experts", text="Rows that each expert computed, per rank.", reply="Experts"),
    Operation(path="/v1/fleet/incidents", text="The latest losses, and how the fleet recovered.", reply="Incidents"),
    Operation(path="/v1/fleet/config", text="The settings in use, and the source of each value.", reply="Config"),
    *(
        Operation(path=path, text="SGLang's facts of the model.", reply="EngineModel")
        for path in ("/model_info", "/get_model_info")
    ),
    *(
        Operation(path=path, text="SGLang's facts of the server.", reply="EngineServer")
        for path in ("/server_info", "/get_server_info")
    ),
    Operation(path="/v1/loads", text="Sequences of each rank, in SGLang's form.", reply="EngineLoads"),
    Operation(path="/version", text="The version of this program.", reply="Version"),
    *(
        Operation(path=path, text=text, method=method, reply="State", errors=(503,), needs_key=False)
        for path, method, text in _STATES
    ),
    Operation(path="/metrics", text="The router's metrics for Prometheus.", content=_TEXT),
    Operation(path="/metrics/targets", text="The workers' metrics, for Prometheus' discovery.", reply="MetricsTargets"),
    Operation(path="/openapi.json", text="This description.", errors=(403,), needs_key=False),
    Operation(path="/docs", text="This description as a page.", content=_HTML, errors=(403,), needs_key=False),
    Operation(path="/", text="The dashboard.", content=_HTML, errors=(403,), needs_key=False),
    Operation(path="/dashboard", text="The dashboard.", content=_HTML, errors=(403,), needs_key=False),
    Operation(path="/static/{name}", text="A file of it.", content=_HTML, errors=(403, 404), needs_key=False),
)


def describe(config: RouterConfig) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a router. With API keys it has the routes that need them."""
    models = [op.body for op in OPERATIONS if op.body is not None]
    _, generated = models_json_schema([(m, "validation") for m in models], ref_template=f"{REF}{{model}}")
    schemas = generated["$defs"] | json.loads((_FILES / "replies.json").read_text(encoding="utf-8"))
    schemas = copy.deepcopy(schemas | _chunks(schemas))
    narrow(schemas, vocab_size=config.vocab_size)
    keys = config.access.asks_for_key
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        is_metrics = op.path.startswith("/metrics") and not config.access.protect_metrics
        guarded = keys and op.needs_key and not is_metrics
        paths.setdefault(op.path, {})[op.method] = _operation(op, guarded=guarded)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "moeyard", "version": config.version, "description": f"Serves {config.model_name}."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return document


def _operation(op: Operation, *, guarded: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if op.content == _JSON else {"type": "string"}
    content = {op.content: {"schema": {"$ref": REF + op.reply} if op.reply else schema}}
    if op.streams:
        event: dict[str, Any] = {"event": {"type": "string"}, "data": {"type": "string"}}
        note = "The data of each event is JSON in the form of the API; docs/api.md lists the events."
        if op.path in _CHUNKS:
            note = "The data of each event is a chunk, and of the last one [DONE]."
            event["data"] |= {"contentMediaType": _JSON, "contentSchema": {"$ref": REF + _CHUNKS[op.path]}}
        content[_EVENTS] = {
            "schema": {"type": "object", "description": note, "properties": event, "required": ["data"]}
        }
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in op.errors:
        if status == 401 and not guarded:
            continue
        # A probe's 503 has the same body as its 200: the state.
        name = op.reply if not op.needs_key and op.reply else _error(op.path, status)
        responses[str(status)] = {
            "description": _STATUSES[status],
            "content": {_JSON: {"schema": {"$ref": f"{REF}{name}"}}},
        }
    described: dict[str, Any] = {
        "operationId": f"{op.method}_{op.path.strip('/').replace('/', '_').replace('.', '_')}",
        "summary": op.text,
        "responses": responses,
    }
    if (place := re.search(r"\{(\w+)\}", op.path)) is not None:
        described["parameters"] = [
            {"name": place[1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if op.body is not None:
        body = {"schema": {"$ref": REF + op.body.__name__}}
        described["requestBody"] = {"required": True, "content": {_JSON: body}}
    if guarded:
        described["security"] = [{"bearer": []}, {"x_api_key": []}]
    return described


def _error(path: str, status: int) -> str:
    """Return the schema of a path's errors. The connection sends 408, in OpenAI's shape for every path."""
    return "AnthropicError" if path.startswith(ANTHROPIC_PATH) and status != 408 else "Error"


class Documents:
    """The two pages, made once. They contain nothing secret and load nothing from other servers."""

    def __init__(self, config: RouterConfig) -> None:
        self._openapi = orjson.dumps(describe(config))
        text = (_FILES / "docs.html").read_text(encoding="utf-8")
        script = text.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self._page = text.encode()
        self._headers = {
            "content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type=_JSON)

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type=_HTML, headers=self._headers)
