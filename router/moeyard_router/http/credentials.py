"""API keys and the TLS certificate: checked at start, and reloaded when their files change."""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from moeyard_router.config import AccessConfig

log = logging.getLogger(__name__)

_CHECK_SECONDS = 2.0


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return values that change when a file is written, replaced or made readable; zeros if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ctime_ns, stat.st_ino, stat.st_size


class WatchedFiles:
    """Files that may change while the router runs. `load` reads them and returns a text for the log.

    `load` raises `ValueError` for unusable files, or for files that do not match yet. The error is logged once per
    change with the text `fallback`, and the earlier contents remain in use.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], str], *, fallback: str) -> None:
        self._files = files
        self._load = load
        self._fallback = fallback
        self._lock = threading.Lock()
        self._stamps = [_stamp(path) for path in files]

    def refresh(self) -> None:
        """Reload the files if they have changed. Any thread may call this."""
        with self._lock:
            stamps = [_stamp(path) for path in self._files]
            if stamps == self._stamps:
                return
            self._stamps = stamps
            try:
                log.warning("%s: read again%s", self._files[0], self._load())
            except ValueError as error:
                log.error("%s; %s", error, self._fallback)


async def keep_fresh(refresh: Sequence[Callable[[], None]]) -> None:
    """Call each of `refresh` every 2 s, in a thread because the files may be on a network file system."""
    while refresh:
        await asyncio.sleep(_CHECK_SECONDS)
        for each in refresh:
            await asyncio.to_thread(each)


_MAX_FILE_BYTES = 4 * 1024 * 1024  # about 50,000 keys with names
_MAX_KEY_BYTES = 512  # longer keys of clients are not hashed, which would cost time before authentication
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # visible ASCII: what a header can carry
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")
_HASHED = "sha256:"


class KeyRing:
    """The API keys, each with a name.

    A key file has a line `KEY` or `NAME:KEY` per key; `sha256:` and 64 hex digits may stand for a key. Blank lines and
    lines that begin with # are skipped. Raises `ValueError` naming file and line, never the key.
    """

    def __init__(self, access: AccessConfig) -> None:
        # Lookups use a digest keyed by a secret of this process. An attacker cannot predict it, so the time of a lookup
        # does not reveal how close a guess was.
        self._secret = secrets.token_bytes(32)
        self._file = access.api_key_file
        self._fixed = [_entry(key, f"API key {i + 1} of the environment") for i, key in enumerate(access.api_keys)]
        self._names: dict[bytes, str] | None = None
        files = () if self._file is None else (self._file,)
        self.refresh = WatchedFiles(files, self._load, fallback="the previous API keys remain valid").refresh
        if access.asks_for_key:
            self._load()

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key."""
        return self._names is not None

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, None for an unknown key."""
        if self._names is None or len(key) > _MAX_KEY_BYTES:
            return None
        return self._names.get(self._seal(hashlib.sha256(key).digest()))

    def _load(self) -> str:
        entries = [*self._fixed, *([] if self._file is None else _read_file(self._file))]
        names: dict[bytes, str] = {}
        for name, digest, where in entries:
            sealed = self._seal(digest)
            if sealed in names:
                raise ValueError(f"{where}: the key is a duplicate of '{names[sealed]}'")
            names[sealed] = name
        self._names = names
        return f", {len(names)} API keys"

    def _seal(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _read_file(path: Path) -> list[tuple[str, bytes, str]]:
    """Return (name, SHA-256, place) of every key in a file."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    entries = [_entry(line, f"{path}, line {number}") for number, line in lines if line and not line.startswith("#")]
    if not entries:
        raise ValueError(f"{path}: no API key in it; give one per line")
    return entries


def _entry(text: str, where: str) -> tuple[str, bytes, str]:
    """Parse `KEY`, `NAME:KEY`, `sha256:HEX` or `NAME:sha256:HEX`. The first colon ends a name."""
    name, key = "", text
    if ":" in text and not text.startswith(_HASHED):
        name, _, key = text.partition(":")
        name, key = name.strip(), key.strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: a key's name is 1 to 64 letters, digits and . _ @ - before a colon")
    if key.startswith(_HASHED):
        if not _DIGEST.fullmatch(key[len(_HASHED) :]):
            raise ValueError(f"{where}: expected 64 hex digits after sha256:")
        digest = bytes.fromhex(key[len(_HASHED) :])
    elif not _KEY.fullmatch(key) or len(key) > _MAX_KEY_BYTES:
        raise ValueError(f"{where}: a key is 1 to {_MAX_KEY_BYTES} visible ASCII characters without spaces")
    else:
        digest = hashlib.sha256(key.encode()).digest()
    return name or f"key-{digest.hex()[:8]}", digest, where


class Certificate:
    """TLS 1.2 or newer from PEM files, with HTTP/1.1 by ALPN. Raises `ValueError` naming the file at fault."""

    def __init__(self, access: AccessConfig) -> None:
        assert access.ssl_certfile is not None
        self._keyfile = access.ssl_keyfile
        self._ca_certs = access.ssl_ca_certs
        self._files = (access.ssl_certfile, *([] if access.ssl_keyfile is None else [access.ssl_keyfile]))
        watched = self._files if self._ca_certs is None else (*self._files, self._ca_certs)
        self.refresh = WatchedFiles(watched, self._load, fallback="the previous certificate remains in use").refresh
        self._newest = self.context = self._open()
        # OpenSSL loads certificate and key one after the other, and a handshake in between would fail. So contexts in
        # use are never reloaded; this callback gives every handshake the newest context.
        self.context.sni_callback = self._choose

    def _load(self) -> str:
        self._newest = self._open()
        return ""

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _open(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for path in self._files:  # OpenSSL does not name the file that it could not open
            try:
                path.open("rb").close()
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}") from error
        try:
            context.load_cert_chain(self._files[0], self._keyfile, password=_no_password)
        except OSError as error:
            raise ValueError(f"{' with key '.join(map(str, self._files))}: {_reason(error)}") from error
        if self._ca_certs is not None:
            try:
                context.load_verify_locations(cafile=self._ca_certs)
            except OSError as error:  # including ssl.SSLError
                raise ValueError(f"{self._ca_certs}: {_reason(error)}; PEM certificates are expected") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def open_certificate(access: AccessConfig) -> Certificate | None:
    """Return the TLS certificate, None for plain HTTP. Raises `ValueError` naming the file at fault."""
    if access.ssl_certfile is not None:
        return Certificate(access)
    if access.ssl_keyfile is not None or access.ssl_ca_certs is not None:
        raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
    return None


def _no_password() -> str:
    raise ValueError("the TLS key is encrypted; decrypt it first: openssl pkey -in KEY -out PLAIN_KEY")


def _reason(error: OSError) -> str:
    """Return a readable form of OpenSSL's internal error messages."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return f"no usable PEM file ({(error.reason or str(error)).replace('_', ' ').lower()})"
