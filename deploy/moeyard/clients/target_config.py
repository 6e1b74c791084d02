"""The server that `moeyard bench` and `moeyard chat` talk to, by the flags and the environment."""

import argparse
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moeyard_router.config import KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server. `host` has no brackets; `prefix` is what stands before /v1, "" as a rule."""

    scheme: str
    host: str
    port: int
    prefix: str
    api_key: str | None

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """host:port as in a URL and in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Its address, without /v1."""
        return f"{self.scheme}://{self.authority}{self.prefix}"

    def path(self, endpoint: str) -> str:
        """Path of an endpoint such as "models" or "chat/completions"."""
        return f"{self.prefix}/v1/{endpoint}"

    def headers(self) -> dict[str, str]:
        """Headers of every request: its body's type, and the key if there is one."""
        found = {"Content-Type": "application/json"}
        return found if self.api_key is None else {**found, "Authorization": f"Bearer {self.api_key}"}


def parse_target(url: str, key: str | None = None) -> Target:
    """The server at `url`: a scheme may be left out, a trailing /v1 is allowed. `key` None: from the environment.

    Raises ValueError for what is no address of a server.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(f"{url!r} is no address of a server; expected one like {DEFAULT_URL}")
    return Target(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=key or os.environ.get(KEY_VARIABLE) or None,
    )


def add_target_arguments(parser: argparse.ArgumentParser, *, url: str = "url") -> None:
    """URL (or the flag `url`), --model and --api-key."""
    optional: dict[str, Any] = {} if url.startswith("-") else {"nargs": "?"}
    parser.add_argument(
        url, **optional, default=DEFAULT_URL, metavar="URL", help="address of the server (default %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first of /v1/models)")
    parser.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token (default: ${KEY_VARIABLE})")
