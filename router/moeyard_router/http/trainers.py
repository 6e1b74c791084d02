"""The API of trainers on the API's own port: requests pass to the launcher's control socket, and its answers back.

Clients of other servers send pauses and updates to the URL that they generate with. The gate has checked a control key.
"""

import asyncio
from pathlib import Path
from types import MappingProxyType

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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

    async def endpoint(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _failed(413, f"the request body is larger than {MAX_BODY} bytes")
        return await _passed(control, f"{request.method} {request.url.path}{query}", body)

    return [Route(path, endpoint, methods=list(methods)) for path, methods in PATHS.items()]


async def _passed(control: Path, line: str, body: bytes) -> Response:
    """Return the answer of the control socket. It may take as long as an update does."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(control))
    except OSError as error:
        return _failed(503, f"the launcher does not listen at {control}: {error.strerror}")
    try:
        head = f"{line} HTTP/1.1\r\nHost: control\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode("ascii", "replace") + body)
        answer = await reader.read()
    finally:
        writer.close()
    head_bytes, _, data = answer.partition(b"\r\n\r\n")
    status = head_bytes.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        return _failed(503, "the launcher has ended")
    return Response(data, status_code=int(status[0]), media_type="application/json")


def _failed(status: int, message: str) -> Response:
    body = orjson.dumps(ApiError(status, message).body())
    return Response(body, status_code=status, media_type="application/json")
