"""The API of trainers on the API's own port: requests pass to the launcher's control socket, and its answers back.

Clients of other servers send pauses and updates to the URL that they generate with. The gate has checked a control key.
"""

import asyncio
from pathlib import Path
from types import MappingProxyType

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moeyard_router.api.endpoints import read_parts, send_error
from moeyard_router.api.generation import ClientGone
from moeyard_router.api.request_scope import SCOPE_KEY, RequestRecord
from moeyard_router.errors import ApiError

# The launcher's paths, with their methods (deploy/moeyard/fleet/weights_api.py).
PATHS = MappingProxyType(
    {
        **dict.fromkeys(("/update_weights_from_disk", "/pause_generation", "/continue_generation"), ("POST",)),
        **dict.fromkeys(("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update"), ("POST",)),
        **dict.fromkeys(("/update_weights", "/finish_weight_update", "/weight_checker", "/weights_checker"), ("POST",)),
        **dict.fromkeys(("/abort_request", "/abort_requests", "/reset_prefix_cache"), ("POST",)),
        "/flush_cache": ("GET", "POST"),
        **dict.fromkeys(("/sleep", "/wake_up"), ("POST",)),
        **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), ("POST",)),
        "/is_sleeping": ("GET",),
        **dict.fromkeys(("/is_paused", "/weight_info", "/get_weight_version", "/get_world_size"), ("GET",)),
    }
)
# The most bytes of a request's body, here and at the control socket.
MAX_BODY = 1024 * 1024


def trainer_routes(control: Path | None) -> list[Route]:
    """Return the routes that pass requests to this control socket, none without one."""
    if control is None:
        return []

    endpoint = _ControlEndpoint(control)
    return [Route(path, endpoint, methods=list(methods)) for path, methods in PATHS.items()]


class _ControlEndpoint:
    """ASGI app that passes a request to the control socket."""

    def __init__(self, control: Path) -> None:
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode("ascii", "replace")
        line = f"{scope['method']} {scope['path']}{f'?{query}' if query else ''}"
        try:
            parts = await read_parts(scope, receive, MAX_BODY, lambda _: None)
            answer = await _passed(self._control, line, b"".join(parts))
        except ClientGone:
            record: RequestRecord = scope[SCOPE_KEY]
            record.client_left = True
        except ApiError as error:
            await send_error(send, error, scope["path"])
        else:
            await answer(scope, receive, send)


async def _passed(control: Path, line: str, body: bytes) -> Response:
    """Return the answer of the control socket. It may take as long as an update does.

    Raises `ApiError` 503 without one.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(control))
    except OSError as error:
        raise ApiError(503, f"the launcher does not listen at {control}: {error.strerror}") from error
    try:
        head = f"{line} HTTP/1.1\r\nHost: control\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode("ascii", "replace") + body)
        answer = await reader.read()
    finally:
        writer.close()
    head_bytes, _, data = answer.partition(b"\r\n\r\n")
    status = head_bytes.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        raise ApiError(503, "the launcher has ended")
    return Response(data, status_code=int(status[0]), media_type="application/json")
