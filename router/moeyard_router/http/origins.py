"""Origin and Host header checks: which web pages may call this server from a browser.

A browser sends any page's POST to any address that it can reach, loopback included; only reading the answer needs CORS
permission. So requests from pages of other origins are refused unless the origin is allowed. With DNS rebinding, a
page's own name resolves to this machine, and Origin and Host agree. So only this machine's names count as its own.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
# Header names that a preflight may request.
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")
_METHODS = (b"access-control-allow-methods", b"GET, POST")
_MAX_AGE = (b"access-control-max-age", b"600")
_EXPOSE = (b"access-control-expose-headers", b"*")
_VARY = (b"vary", b"Origin")

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The allowed origins, and the own names of a server bound to `host`."""

    def __init__(self, allowed: Iterable[str], *, host: str, needs_key: bool) -> None:
        self._allowed = frozenset(allowed)
        self._any = "*" in self._allowed
        names = {host.lower(), socket.gethostname().lower()}
        names |= {urlsplit(origin).hostname or "" for origin in self._allowed if origin != "*"}
        self._names = frozenset(names)
        # A malicious page does not have this server's key. So with a key any name may be that of a proxy.
        self._any_name = needs_key
        self._check_host = is_loopback(host) and not needs_key and not self._any

    def is_ours(self, host: bytes) -> bool:
        """Return whether a Host header names this server, or need not (see DNS rebinding above)."""
        return not self._check_host or not host or self._is_own_name(host.decode("latin-1").lower())

    def permits(self, origin: bytes, host: bytes) -> bool:
        """Return whether pages of this origin may call: allowed ones, and this server's own."""
        text = origin.decode("latin-1").lower()
        if self._any or text in self._allowed:
            return True
        authority = host.decode("latin-1").lower()
        if not authority or text not in (f"http://{authority}", f"https://{authority}"):
            return False
        return self._any_name or self._is_own_name(authority)

    def headers(self, origin: bytes) -> Headers:
        """Return the CORS headers of an answer."""
        return [(b"access-control-allow-origin", b"*" if self._any else origin), _EXPOSE, _VARY]

    def _is_own_name(self, authority: str) -> bool:
        try:
            name = urlsplit(f"//{authority}").hostname or ""
        except ValueError:
            return False
        # An IP address cannot be rebound, because the page's own URL has it.
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _address(name) is not None


def preflight_headers(requested: bytes) -> Headers:
    """Return the answer to a preflight. `requested` is its Access-Control-Request-Headers."""
    names = requested if _HEADER_NAMES.fullmatch(requested) else b"authorization, content-type"
    return [_METHODS, (b"access-control-allow-headers", names), _MAX_AGE]


def parse_origins(values: Iterable[str]) -> list[str]:
    """Return origins in lower case. A value is an origin, `*`, or a JSON list (vLLM). Raises `ValueError`."""
    origins: list[str] = []
    for value in values:
        items = [value]
        if value.startswith("["):
            try:
                items = json.loads(value)
            except ValueError:
                items = []
            if not isinstance(items, list) or not items or not all(isinstance(i, str) for i in items):
                raise ValueError(f"--allowed-origins: {value!r} is not a JSON list of origins")
        for item in items:
            origin = item.lower().removesuffix("/")
            if origin != "*" and origin != "null" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"--allowed-origins: {item!r}: expected https://HOST or https://HOST:PORT")
            origins.append(origin)
    return origins


def is_loopback(host: str) -> bool:
    """Return whether a server bound to `host` is reachable from this machine only."""
    address = _address(host)
    if address is not None:
        return address.is_loopback
    return host.lower() == "localhost" or host.lower().endswith(".localhost")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
