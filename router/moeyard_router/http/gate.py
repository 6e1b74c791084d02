"""What every request passes on its way in: its id, its origin, its key, its type; and the line written when it is over.

One plain ASGI wrapper: it looks at headers once, and of a stream's messages only at the first.
"""

import logging
import re
import secrets
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeyard_router.api.endpoints import send_error
from moeyard_router.api.request_scope import SCOPE_KEY, RequestRecord, current_request
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.http.credentials import KeyRing
from moeyard_router.http.origins import Headers, Origins, preflight_headers
from moeyard_router.metrics import RouterMetrics

access_log = logging.getLogger("moeyard.access")

# For probes, which carry no key and no Host that means something.
PROBES = frozenset(("/livez", "/readyz", "/health", "/ping"))
METRICS = frozenset(("/metrics", "/metrics/targets"))
# Pages that a browser loads without a key, and that hold nothing but this program's own text. What they fetch is asked
# for its key like everything else.
PAGES = frozenset(("/", "/dashboard", "/docs", "/openapi.json"))
STATIC = "/static/"  # and their files

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@=+/-]{1,128}")
_NOT_IN_ADDRESS = re.compile(r"[^0-9A-Za-z.:%_-]")  # a proxy's X-Forwarded-For may say anything
_LONGEST_PATH = 100  # characters of a path that is no route, in the access log
_NOT_JSON = "the Content-Type of a POST must be application/json (curl: -H 'Content-Type: application/json')"
_CLIENT_LEFT = 499  # nginx's status for a client that did not wait for its answer


class RequestGate:
    """Refuses requests by 401 (key), 403 (origin, or another server's name) and 415 (a POST that is not JSON)."""

    def __init__(
        self, app: ASGIApp, *, config: RouterConfig, keys: KeyRing, origins: Origins, metrics: RouterMetrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        self._metrics = metrics
        self._keyless = PROBES | PAGES | (frozenset() if config.door.protect_metrics else METRICS)
        self._log = config.door.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        record = scope[SCOPE_KEY] = RequestRecord(request_id=request_id, key_name=None, began=time.monotonic())
        current_request.set(request_id)
        added: Headers = [(b"x-request-id", request_id.encode())]
        status = _CLIENT_LEFT

        def sending(message: Message) -> Awaitable[None]:  # no coroutine of its own: a stream passes here per token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
                if scope["method"] == "POST" and not _is_json(headers.get(b"content-type", b"")):
                    raise ApiError(415, _NOT_JSON, reason="not_json")
            await self._app(scope, receive, sending)
        except ApiError as error:  # of the checks above; the app answers its own
            self._metrics.rejected(error.reason)
            await send_error(sending, error, scope["path"])
        finally:
            if self._log:
                self._write(scope, record, status)

    def _check_origin(self, headers: dict[bytes, bytes]) -> Headers:
        """What the page that calls needs in the answer, if it is one; raises `ApiError` 403 if it may not call."""
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if not self._origins.is_ours(host):
            name = host.decode("latin-1")
            message = (
                f"the Host header names '{name:.80}', and this server listens on loopback only, under no such name; "
                f"behind a proxy, start it with --allowed-origins https://{name:.80}, or with API keys"
            )
            raise ApiError(403, message, reason="foreign_host")
        if origin is None:
            return []
        if not self._origins.permits(origin, host):
            message = (
                f"requests of web pages from '{origin.decode('latin-1'):.80}' are not allowed here; "
                "the server's --allowed-origins names those that are"
            )
            raise ApiError(403, message, reason="foreign_origin")
        return self._origins.headers(origin)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        """Return the name of the bearer or `x-api-key` key, None where none is needed; raises `ApiError` 401."""
        if not self._keys.asks or path in self._keyless or path.startswith(STATIC):
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [bearer.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:
            keys.append(headers[b"x-api-key"])
        for key in keys:
            name = self._keys.name_of(key)
            if name is not None:
                return name
        if keys:
            raise ApiError(401, "this API key is not known here", reason="bad_key")
        raise ApiError(401, "an API key is needed: send it as 'Authorization: Bearer KEY'", reason="no_key")

    def _write(self, scope: Scope, record: RequestRecord, status: int) -> None:
        path = scope["path"]
        level = logging.DEBUG if status < 400 and (path in PROBES or path in METRICS) else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        now = time.monotonic()
        # As it came, percent signs and all: decoded it may hold anything, and the query is the client's business.
        raw = scope.get("raw_path") or path.encode()
        fields: dict[str, str | int | float] = {
            "client": _NOT_IN_ADDRESS.sub("?", (scope.get("client") or ("-",))[0])[:64],
            "method": scope["method"],
            "path": raw[:_LONGEST_PATH].decode("ascii", "backslashreplace"),
            "status": status,
            "ms": round((now - record.began) * 1e3, 1),
        }
        if record.first_token is not None:
            fields["ttft_ms"] = round((record.first_token - record.began) * 1e3, 1)
        known = {
            **{name: getattr(record, name) for name in ("prompt_tokens", "output_tokens", "failure")},
            "left": 1 if record.client_left else None,
            **{name: getattr(record, name) for name in ("cut", "request_id", "reply_id")},
            "key": record.key_name,
        }
        fields |= {name: value for name, value in known.items() if value is not None}
        access_log.log(level, "%s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})


def _is_preflight(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def _is_json(content_type: bytes) -> bool:
    """Whether a Content-Type is JSON's or absent.

    Browsers send forms and text/plain elsewhere without asking; a POST without a type is stopped by its Origin.
    """
    return content_type.partition(b";")[0].strip().lower() in (b"application/json", b"")
