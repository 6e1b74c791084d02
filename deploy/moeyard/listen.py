"""The API's own socket, bound before anything is started, its addresses, and how many connections it can serve.

A process that has no file left for a connection resets it, and libuv reports nothing. So a router serves fewer
connections than it has files for, and answers those beyond.
"""

import contextlib
import errno
import ipaddress
import resource
import socket
from types import MappingProxyType

from moeyard_router.http.process import SharedAddress

# Documentation's own address (RFC 5737): a UDP socket "connected" there sends nothing, and knows where it would from.
SOMEWHERE = MappingProxyType({socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"})
# Files that a router keeps open beside its connections: 51 with two workers at rest, and some to refuse with.
FILES, FILES_PER_WORKER = 80, 8
# A container's hard limit may be a thousand times this. No server needs as many, and some libraries make tables of that
# size.
MOST_FILES = 1 << 20


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket for the API; raises ValueError that says which of --host and --port is wrong, and how.

    One that is `shared` does not listen: it keeps the port for several that do (`routers.py`). "::" takes IPv4 too, as
    an operator expects of "all addresses".
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise ValueError(
            f"--host {host!r} is unknown: {reason}; give an address of this machine, such as 127.0.0.1, or 0.0.0.0 "
            "for all"
        ) from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not _is_wildcard(str(address[0])))
        sock.bind(address)
        # Listening at once makes a second server on this port fail now and not when it gets its first request.
        sock.listen(1024)
        return reserved(sock) if shared else sock
    except OSError as error:
        sock.close()
        advice = {
            errno.EADDRINUSE: "stop what listens there, or choose another --port",
            errno.EACCES: "ports below 1024 want the rights for it; choose another --port",
            errno.EADDRNOTAVAIL: "it is no address of this machine; choose another --host, or 0.0.0.0 for all of them",
        }.get(error.errno or 0, "choose another --host or --port")
        where = base_url(host, port).removeprefix("http://")
        raise ValueError(f"cannot listen on {where}: {error.strerror or error}; {advice}") from error


def reserved(sock: socket.socket) -> socket.socket:
    """Replace a listening socket by one that shares its port and only reserves it.

    It reserves the port while a model loads. Ray's autoscaler, for example, listens on 44217, which may be our port.
    """
    address = SharedAddress.of(sock)
    sock.close()
    try:
        return address.bound(closing=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return address.bound()


def check_ports(host: str, *, num_workers: int) -> None:
    """Raise ValueError if `host` has too few free ephemeral ports for Ray and `num_workers` ranks.

    Ray 2.60 with two idle ranks uses 12 listening ports and 17 for connections. Without enough ports ray.init holds the
    GIL while it waits for daemons that cannot connect to each other.
    """
    need = 20 + 6 * num_workers
    with contextlib.ExitStack() as held:
        for found in range(need):
            sock = held.enter_context(socket.socket())
            try:
                sock.bind((host, 0))
            except OSError as error:
                raise ValueError(
                    f"only {found} ports are free on {host}, {num_workers} workers and Ray need {need} "
                    f"({error.strerror}); end what holds them, or widen net.ipv4.ip_local_port_range"
                ) from error


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Return scheme://host:port with an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reachable_url(host: str, port: int, scheme: str = "http") -> str:
    """Return a URL for clients on this machine. A wildcard address becomes loopback."""
    if _is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return base_url(host, port, scheme)


def outside_url(host: str, port: int, scheme: str = "http") -> str | None:
    """Return the URL for other machines of a wildcard listener, by the default route's address; else None."""
    if not _is_wildcard(host):
        return None
    for family in (socket.AF_INET, socket.AF_INET6) if ":" in host else (socket.AF_INET,):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((SOMEWHERE[family], 9))
                return base_url(probe.getsockname()[0], port, scheme)
        except OSError:
            continue  # no such route
    return None


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def file_limits() -> tuple[int, int]:
    """Return this process's soft limit of open files, and the limit that it can raise it to."""
    soft, hard = (MOST_FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, max(soft, min(hard, MOST_FILES))


def raise_file_limit() -> int:
    """Raise the limit of open files for this process and its children. Returns the new limit."""
    soft, most = file_limits()
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return most


def most_connections(files: int, num_workers: int) -> int:
    """Return the connections that one router in front of `num_workers` workers serves at once.

    `files` is its limit of open files. Raises ValueError if that leaves none.
    """
    connections = files - FILES - FILES_PER_WORKER * num_workers
    if connections < 1:
        raise ValueError(f"a limit of {files} open files leaves none for connections; raise it (ulimit -n)")
    return connections
