"""Which web pages may call this server from a browser, and whether a request was meant for it at all.

A browser sends any page's POST to any address that it can reach, this machine's loopback included; only reading the
answer needs permission. So a request that says it comes from a page of another origin is not run unless that origin is
allowed. A page can also have its own name resolved to this machine's address (DNS rebinding); then its origin and the
Host header agree. Names of this machine are therefore known here, and no other name counts as its own.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
# What a preflight may ask for: names of headers.
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")
_METHODS = (b"access-control-allow-methods", b"GET, POST")
_MAX_AGE = (b"access-control-max-age", b"600")
_EXPOSE = (b"access-control-expose-headers", b"*")
_VARY = (b"vary", b"Origin")

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The allowed origins, and the names of a server bound to `host` that asks for a key (`keys`) or does not."""

    def __init__(self, allowed: Iterable[str], *, host: str, keys: bool) -> None:
        self._allowed = frozenset(allowed)
        self._any = "*" in self._allowed
        names = {host.lower(), socket.gethostname().lower()}
        names |= {urlsplit(origin).hostname or "" for origin in self._allowed if origin != "*"}
        self._names = frozenset(names)
        # A page that has this server's key was not lured here, so behind a key any name may be a proxy's.
        self._any_name = keys
        self._check_host = is_loopback(host) and not keys and not self._any

    def is_ours(self, host: bytes) -> bool:
        """Whether a request with this Host header was meant for this server, as far as that matters (DNS rebinding)."""
        return not self._check_host or not host or self._is_own_name(host.decode("latin-1").lower())

    def permits(self, origin: bytes, host: bytes) -> bool:
        """Whether a page of this origin may call: one that is allowed, or one of this server's own."""
        text = origin.decode("latin-1").lower()
        if self._any or text in self._allowed:
            return True
        authority = host.decode("latin-1").lower()
        if not authority or text not in (f"http://{authority}", f"https://{authority}"):
            return False
        return self._any_name or self._is_own_name(authority)

    def headers(self, origin: bytes) -> Headers:
        return [(b"access-control-allow-origin", b"*" if self._any else origin), _EXPOSE, _VARY]

    def _is_own_name(self, authority: str) -> bool:
        try:
            name = urlsplit(f"//{authority}").hostname or ""
        except ValueError:
            return False
        # An address cannot be rebound: the browser was told to go to it.
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def preflight_headers(asked: bytes) -> Headers:
    """What lets a permitted page send the request it asks about; `asked` is its Access-Control-Request-Headers."""
    names = asked if _HEADER_NAMES.fullmatch(asked) else b"authorization, content-type"
    return [_METHODS, (b"access-control-allow-headers", names), _MAX_AGE]


def parse_origins(values: Iterable[str]) -> list[str]:
    """Return origins in lower case; a value is one, `*`, or a JSON list (vLLM). Raises `ValueError`."""
    origins: list[str] = []
    for value in values:
        items = [value]
        if value.startswith("["):
            try:
                items = json.loads(value)
            except ValueError:
                items = []
            if not isinstance(items, list) or not items or not all(isinstance(i, str) for i in items):
                raise ValueError(f"--allowed-origins: {value!r} is no JSON list of origins")
        for item in items:
            origin = item.lower().removesuffix("/")
            if origin != "*" and origin != "null" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--allowed-origins: {item!r} is no origin; an origin is https://HOST or https://HOST:PORT"
                )
            origins.append(origin)
    return origins


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
