"""API keys: read from a file, kept as digests, compared without telling anything by the time it takes."""

import hashlib
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

from moeyard_router.config import DoorConfig
from moeyard_router.http.files import FileStamp, stamp

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 1024 * 1024  # some 50,000 keys with names
MAX_KEY_BYTES = 512  # of a presented key; hashing a longer one would be work done for a stranger
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # visible ASCII: what a header can carry
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")
_HASHED = "sha256:"


class KeyRing:
    """The keys that open the door, each with a name.

    A key file has one key per line, `KEY` or `NAME:KEY`; in the place of a key may stand `sha256:` and the 64 hex
    digits of its SHA-256, so that no plain key lies on the disk. Blank lines and lines that begin with # are skipped. A
    key without a name is called `key-` and the first 8 digits of its digest.

    Raises `ValueError` naming the file and line at fault, never the key.
    """

    def __init__(self, door: DoorConfig) -> None:
        # What is looked up is a digest under a secret of this process: whoever guesses keys cannot know it, so the time
        # that a lookup among any number of keys takes says nothing about how near the guess was.
        self._secret = secrets.token_bytes(32)
        self._file = door.api_key_file
        self._fixed = [_entry(key, f"API key {i + 1} of the environment") for i, key in enumerate(door.api_keys)]
        self._lock = threading.Lock()
        self._signature: FileStamp | None = None
        self._names: dict[bytes, str] | None = None
        if door.asks_for_key:
            self._signature = self._sign()
            self._names = self._read()

    @property
    def asks(self) -> bool:
        """Whether a key is needed at all."""
        return self._names is not None

    def name_of(self, key: bytes) -> str | None:
        """The name of a key, None if it opens nothing."""
        if self._names is None or len(key) > MAX_KEY_BYTES:
            return None
        return self._names.get(self._seal(hashlib.sha256(key).digest()))

    def refresh(self) -> None:
        """Read the file again if it has changed. Safe from any thread.

        A file that cannot be used leaves the keys as they are and is logged, once for every change of it.
        """
        if self._file is None:
            return
        with self._lock:
            signature = self._sign()
            if signature == self._signature:
                return
            self._signature = signature
            try:
                names = self._read()
            except ValueError as error:
                log.error("%s; the API keys stay as they were", error)
                return
            self._names = names
            log.warning("%s: read again, %d API keys", self._file, len(names))

    def _sign(self) -> FileStamp | None:
        return None if self._file is None else stamp(self._file)

    def _read(self) -> dict[bytes, str]:
        entries = [*self._fixed, *([] if self._file is None else _read_file(self._file))]
        names: dict[bytes, str] = {}
        for name, digest, where in entries:
            sealed = self._seal(digest)
            if sealed in names:
                raise ValueError(f"{where}: the same key stands there already, as '{names[sealed]}'")
            names[sealed] = name
        return names

    def _seal(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _read_file(path: Path) -> list[tuple[str, bytes, str]]:
    """(name, SHA-256, place) of every key in a file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8") from None
    entries = list(_entries(path, text.splitlines()))
    if not entries:
        raise ValueError(f"{path}: no API key in it; give one per line")
    return entries


def _entries(path: Path, lines: Iterable[str]) -> Iterable[tuple[str, bytes, str]]:
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield _entry(line, f"{path}, line {number}")


def _entry(text: str, where: str) -> tuple[str, bytes, str]:
    """Read `KEY`, `NAME:KEY`, `sha256:HEX` or `NAME:sha256:HEX`. The first colon ends a name."""
    name, key = "", text
    if ":" in text and not text.startswith(_HASHED):
        name, _, key = text.partition(":")
        name, key = name.strip(), key.strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: a key's name is 1 to 64 letters, digits and . _ @ - before a colon")
    if key.startswith(_HASHED):
        if not _DIGEST.fullmatch(key[len(_HASHED) :]):
            raise ValueError(f"{where}: after sha256: come 64 hex digits")
        digest = bytes.fromhex(key[len(_HASHED) :])
    elif not _KEY.fullmatch(key) or len(key) > MAX_KEY_BYTES:
        raise ValueError(f"{where}: a key is 1 to {MAX_KEY_BYTES} visible ASCII characters without spaces")
    else:
        digest = hashlib.sha256(key.encode()).digest()
    return name or f"key-{digest.hex()[:8]}", digest, where
