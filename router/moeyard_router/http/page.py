"""The page at / and /dashboard: files of this package, which ask nobody but this server.

The files hold no secret and are free to all. The page asks /v1/fleet/live and other /v1 routes like any client, with
the key that its reader types in where this server wants one.
"""

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = "/static/{name}"
_FOLDER = Path(__file__).with_name("static")
_INDEX = "index.html"
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".txt": "text/plain; charset=utf-8",
    }
)
# No script, style or connection but from here, no frame around it, no form that leaves it.
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # kept, but asked for again: a new version of the server has new files
        "vary": "accept-encoding",
    }
)


class _File:
    """One file, read and packed once."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.packed = gzip.compress(self.body, mtime=0)
        self.headers = {
            **_HEADERS,
            "content-type": _KINDS[path.suffix],
            "etag": f'"{hashlib.sha256(self.body).hexdigest()[:16]}"',
        }

    def answer(self, request: Request) -> Response:
        """200, or 304 to whoever has it already."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.body, headers=self.headers)


def page_routes() -> list[Route]:
    """The page and its files, which are read now."""
    files = {path.name: _File(path) for path in _FOLDER.iterdir() if path.suffix in _KINDS}

    async def index(request: Request) -> Response:
        return files[_INDEX].answer(request)

    async def static(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404, "no such file")
        return file.answer(request)

    return [Route("/", index), Route("/dashboard", index), Route(STATIC, static)]
