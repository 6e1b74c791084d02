"""The one error type that clients see, in OpenAI's shape or, below /v1/messages, in Anthropic's."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

# vLLM derives `type` from the status too. Clients look at the status and the message.
_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_denied_error",
        404: "not_found_error",
        405: "method_not_allowed_error",
        408: "request_timeout_error",
        409: "conflict_error",
        413: "request_too_large_error",
        415: "unsupported_media_type_error",
        429: "rate_limit_error",
        431: "request_too_large_error",
        500: "internal_server_error",
        503: "service_unavailable_error",
    }
)
# Anthropic's types where they differ from the table above.
_ANTHROPIC_TYPES = MappingProxyType(
    {403: "permission_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
)
ANTHROPIC_PATH = "/v1/messages"
# APIs of OpenAI, vLLM and SGLang for models that do not generate text, without the prefix /v1.
_OTHER_KINDS = MappingProxyType(
    {
        **dict.fromkeys(
            ("/embeddings", "/embed", "/api/embed", "/api/embeddings", "/encode", "/pooling"), "embeddings"
        ),
        **dict.fromkeys(("/rerank", "/v2/rerank", "/score"), "scores of documents"),
        **dict.fromkeys(("/classify", "/moderations"), "classes"),
        **dict.fromkeys(("/images/generations", "/images/edits", "/images/variations"), "images"),
        **dict.fromkeys(("/audio/transcriptions", "/audio/translations", "/audio/speech"), "audio"),
    }
)


@dataclass(eq=False)
class ApiError(Exception):
    """An error answer: HTTP status, message, and the request field at fault (`param`).

    `retry_after` (seconds) becomes the Retry-After header. `reason` is the label of the rejections metric.
    """

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    reason: str = "bad_request"
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return OpenAI's body, `{"error": {"message", "type", "param", "code"}}`. `code` is the status, as in vLLM."""
        kind = _TYPES.get(self.status, "error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's body, `{"type": "error", "error": {"type", "message"}}`."""
        kind = _ANTHROPIC_TYPES.get(self.status) or _TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the body in the shape that clients of `path` expect."""
        return self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """Return a 404 that lists the served names."""
    message = f"the model '{name:.200}' does not exist; this server has {', '.join(map(repr, served))}"
    return ApiError(404, message, param="model", reason="unknown_model")


def no_route(method: str, path: str, status: int, detail: str) -> ApiError:
    """Return the error for an unknown path or method. The 404 of an API for other kinds of models says why."""
    kind = _OTHER_KINDS.get(path.removeprefix("/v1").rstrip("/")) if status == 404 else None
    why = detail if kind is None else f"the model of this server has no {kind}; it generates text"
    return ApiError(status, f"{method} {path}: {why}")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return a 400 that names the field at fault."""
    return ApiError(400, message, param=param)
