"""The checks of every request (origin, API key, content type), its id, its metrics and its access log line.

One ASGI wrapper: it reads the headers once, and only the first message of each answer.
"""

import logging
import re
import secrets
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeyard_router.api.endpoints import note_refusal, send_error
from moeyard_router.api.request_scope import SCOPE_KEY, RequestRecord, current_request
from moeyard_router.config import AccessConfig, RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.fleet.records import Refusals
from moeyard_router.http.credentials import KeyRing
from moeyard_router.http.live import STATIC
from moeyard_router.http.origins import Headers, Origins, preflight_headers
from moeyard_router.http.trainers import PATHS as TRAINERS
from moeyard_router.metrics import RouterMetrics

if TYPE_CHECKING:
    from moeyard_router.api.spans import Traces

access_log = logging.getLogger("moeyard.access")

MODELS = "/v1/models"
# Probes carry no key and no meaningful Host header.
PROBES = frozenset(("/livez", "/readyz", "/health", "/health_generate", "/ping"))
METRICS = frozenset(("/metrics", "/metrics/targets"))
# Browsers load these pages and /static/ without a key. They contain only this program's text; the data that they fetch
# needs a key.
PAGES = frozenset(("/", "/dashboard", "/docs", "/openapi.json"))
_STATIC_FILES = STATIC.partition("{")[0]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@=+/-]{1,128}")
_NOT_IN_ADDRESS = re.compile(r"[^0-9A-Za-z.:%_-]")  # X-Forwarded-For of a proxy may contain anything
_MAX_PATH = 100  # bytes of the path in the access log
_NOT_JSON = "the Content-Type of a POST must be application/json (curl: -H 'Content-Type: application/json')"
_CODED = "a request with Content-Encoding '{:.40}' is not served; send the body without compression"
_CLIENT_LEFT = 499  # nginx's status for a client that closed its connection before the answer


class RequestGate:
    """Refuses requests by 401 (key), 403 (origin or Host header) and 415 (a POST that is not JSON, or compressed).

    Answers are counted by route (`paths`) and status. Unknown paths share the label "other".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: RouterConfig,
        keys: KeyRing,
        metrics: RouterMetrics,
        refusals: Refusals,
        paths: frozenset[str],
        traces: "Traces | None" = None,
    ) -> None:
        self._app = app
        self._traces = traces
        self._keys = keys
        self._origins = Origins(config.access.allowed_origins, host=config.host, needs_key=keys.needs_key)
        self._metrics = metrics
        self._refusals = refusals
        self._paths = paths
        self._keyless = PROBES | PAGES | (frozenset() if config.access.protect_metrics else METRICS)
        self._log = config.access.access_log
        # Keys of clients do not open the API of trainers.
        file = None if config.control is None else config.control[1]
        self._trainers = None if file is None else KeyRing(AccessConfig(api_key_file=file))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        record = scope[SCOPE_KEY] = RequestRecord(request_id=request_id, key_name=None, began=time.monotonic())
        current_request.set(request_id)
        added: Headers = [(b"x-request-id", request_id.encode())]
        if self._traces is not None and scope["method"] == "POST":
            record.trace = self._traces.begin(scope["path"], headers, record)
            if record.trace is not None:
                added.append((b"traceparent", record.trace.traceparent.encode()))
        status, route = _CLIENT_LEFT, self._route(scope["path"])

        def sending(message: Message) -> Awaitable[None]:  # not a coroutine, because it runs once per streamed token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.answered(route, status)
                message = {**message, "headers": [*message["headers"], *added]}
            return send(message)

        try:
            if scope["path"] not in PROBES:
                added += self._check_origin(headers)
                if _is_preflight(scope, headers):
                    added += preflight_headers(headers.get(b"access-control-request-headers", b""))
                    await sending({"type": "http.response.start", "status": 204, "headers": []})
                    await sending({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                record.key_name = self._check_key(scope["path"], headers)
                kind = headers.get(b"content-type", b"")
                if scope["method"] == "POST" and not (_is_json(kind) or _is_empty_posts(kind, scope["path"])):
                    raise ApiError(415, _NOT_JSON, reason="not_json")
                coding = headers.get(b"content-encoding", b"identity").strip().lower()
                if coding not in (b"identity", b""):
                    raise ApiError(415, _CODED.format(coding.decode("latin-1")), reason="not_json")
            await self._app(scope, receive, sending)
        except ApiError as error:  # raised by the checks above; the app answers its own errors
            self._metrics.rejected(error.reason)
            note_refusal(self._refusals, error, scope, route=route)
            await send_error(sending, error, scope["path"])
        finally:
            self._metrics.http_took(route, time.monotonic() - record.began)
            if record.trace is not None:
                record.trace.end(status, record)
            if self._log:
                self._write(scope, record, status)

    def _route(self, path: str) -> str:
        """Return the label of a path in metrics."""
        if path.startswith(f"{MODELS}/"):
            return f"{MODELS}/{{id}}"
        if path.startswith(_STATIC_FILES):
            return STATIC
        return path if path in self._paths else "other"

    def _check_origin(self, headers: dict[bytes, bytes]) -> Headers:
        """Return the CORS headers for a request of a web page. Raises `ApiError` 403 for a page that is not allowed."""
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if not self._origins.is_ours(host):
            name = host.decode("latin-1")
            message = (
                f"the Host header names '{name:.80}', but this server listens on loopback only and has no such name; "
                f"behind a proxy, start it with --allowed-origins https://{name:.80}, or with API keys"
            )
            raise ApiError(403, message, reason="foreign_host")
        if origin is None:
            return []
        if not self._origins.permits(origin, host):
            message = (
                f"requests of web pages from '{origin.decode('latin-1'):.80}' are not allowed here; "
                "the server's --allowed-origins lists the allowed origins"
            )
            raise ApiError(403, message, reason="foreign_origin")
        return self._origins.headers(origin)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        """Return the name of the bearer or `x-api-key` key, None if no key is needed. Raises `ApiError` 401."""
        known, what = self._keys, "an API key"
        if self._trainers is not None and path in TRAINERS:
            known, what = self._trainers, "a key of --control-key-file"
            known.refresh()
        if not known.needs_key or path in self._keyless or path.startswith(_STATIC_FILES):
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [bearer.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:
            keys.append(headers[b"x-api-key"])
        for key in keys:
            name = known.name_of(key)
            if name is not None:
                return name
        if keys:
            raise ApiError(401, f"{what} is needed, and this one is not known here", reason="bad_key")
        raise ApiError(401, f"{what} is needed: send it as 'Authorization: Bearer KEY'", reason="no_key")

    def _write(self, scope: Scope, record: RequestRecord, status: int) -> None:
        path = scope["path"]
        level = logging.DEBUG if status < 400 and (path in PROBES or path in METRICS) else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        now = time.monotonic()
        # The undecoded path, because a decoded one may contain anything. Without the query, which may hold secrets.
        raw = scope.get("raw_path") or path.encode()
        fields: dict[str, str | int | float] = {
            "client": _NOT_IN_ADDRESS.sub("?", (scope.get("client") or ("-",))[0])[:64],
            "method": scope["method"],
            "path": raw[:_MAX_PATH].decode("ascii", "backslashreplace"),
            "status": status,
            "ms": round((now - record.began) * 1e3, 1),
        }
        if record.first_token is not None:
            fields["ttft_ms"] = round((record.first_token - record.began) * 1e3, 1)
        known = {
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "failure": record.failure,
            "left": 1 if record.client_left else None,
            "cut": record.cut,
            "request_id": record.request_id,
            "reply_id": record.reply_id,
            "key": record.key_name,
            "trace_id": None if record.trace is None else record.trace.trace_id,
        }
        fields |= {name: value for name, value in known.items() if value is not None}
        access_log.log(level, "%s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})


def _is_preflight(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def _is_empty_posts(content_type: bytes, path: str) -> bool:
    """Return whether this is what aiohttp sends for a POST without a body. Web pages need a preflight for it."""
    return content_type == b"application/octet-stream" and path in TRAINERS


def _is_json(content_type: bytes) -> bool:
    """Return whether a Content-Type is JSON or absent.

    Browsers send forms and text/plain to other origins without a preflight. The Origin check covers an absent type.
    """
    return content_type.partition(b";")[0].strip().lower() in (b"application/json", b"")
