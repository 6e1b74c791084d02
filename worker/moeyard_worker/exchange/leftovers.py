"""Names of files and folders that outlive whoever is killed, and how the next one tells them from those in use.

While its maker lives a name is under an exclusive flock, which the kernel lifts when the maker ends, however it ends,
and which counts between containers that share a file system, where process numbers mean nothing. A name is under its
lock before others see it: it is made under one that begins with a dot, and renamed. So whoever gets the lock of a
name may take it away.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_DIRECTORY = "/dev/shm"
# The first is a rank's memory in SHARED_DIRECTORY, the second a folder of sockets, of a rank or of routers.
SLAB, FOLDER = "moeyard-slab-", "moeyard-sockets-"
_NAMES = re.compile(rf"\.?({SLAB}|{FOLDER})[0-9a-f]+")
# Under a dotted name nobody stays longer than a system call takes.
_DOTTED_SECONDS = 60.0


def make_file(directory: str) -> tuple[str, int]:
    """(path, descriptor) of a new file of mode 0600 with an unpredictable name; held while the descriptor is open."""
    name = f"{SLAB}{secrets.token_hex(16)}"
    dotted = Path(directory) / f".{name}"
    fd = os.open(dotted, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return str(_show(dotted, fd)), fd
    except BaseException:
        os.close(fd)
        dotted.unlink(missing_ok=True)
        raise


class Folder:
    """A new folder of mode 0700 for sockets, until `remove`; its path is short, as theirs have to be."""

    def __init__(self) -> None:
        dotted = Path(tempfile.gettempdir()) / f".{FOLDER}{secrets.token_hex(8)}"
        dotted.mkdir(mode=0o700)
        self._fd = os.open(dotted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = str(_show(dotted, self._fd))

    def remove(self) -> None:
        """Take it away with all that is in it. Safe to call twice."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _show(dotted: Path, fd: int) -> Path:
    """Hold what `fd` is open at, and give it its name."""
    with contextlib.suppress(OSError):  # boundary: a file system without locks gives none to those who sweep either
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return dotted.rename(dotted.with_name(dotted.name.removeprefix(".")))


def sweep() -> list[Path]:
    """Take away what ended processes of this user have left on this host; returns it."""
    swept = [
        path
        for directory in map(Path, (SHARED_DIRECTORY, tempfile.gettempdir()))
        for path in (sorted(directory.iterdir()) if directory.is_dir() else ())
        if _NAMES.fullmatch(path.name) and _take(path)
    ]
    if swept:
        log.warning("took away %d files and folders of killed ranks, %s first", len(swept), swept[0])
    return swept


def _take(path: Path) -> bool:
    """Remove what nobody holds; whether that was so."""
    with contextlib.suppress(OSError):  # boundary: its maker holds it, or it has just vanished
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            if stat.st_uid != os.getuid() or (path.name[0] == "." and time.time() - stat.st_ctime < _DOTTED_SECONDS):
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(fd)
        return True
    return False
