"""Shared memory files and socket folders of a rank, and the removal of those that killed ranks have left.

While its maker lives, a file is under an exclusive flock. The kernel releases the lock when the maker ends. That works
also between containers that share a file system, where process numbers mean nothing. A file is locked before others see
it: its name begins with a dot until then. So a process that gets the lock of a file may remove it.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_DIRECTORY = "/dev/shm"
# A rank's memory in SHARED_DIRECTORY, and a folder of sockets of a rank or of routers.
SLAB, FOLDER = "moeyard-slab-", "moeyard-sockets-"
_NAMES = re.compile(rf"\.?({SLAB}|{FOLDER})[0-9a-f]+")
# A name keeps its dot for no longer than a system call.
_DOTTED_SECONDS = 60.0


def make_file(directory: str) -> tuple[str, int]:
    """Make a file of mode 0600 with an unpredictable name. Return its path, and the descriptor that holds its lock."""
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
    """A new folder of mode 0700 for sockets, until `remove`. Its path is short, as paths of sockets must be."""

    def __init__(self) -> None:
        dotted = Path(tempfile.gettempdir()) / f".{FOLDER}{secrets.token_hex(8)}"
        dotted.mkdir(mode=0o700)
        self._fd = os.open(dotted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = str(_show(dotted, self._fd))

    def remove(self) -> None:
        """Remove the folder and its contents. Safe to call twice."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


class SharedFile:
    """Memory that other processes of this user and host can map by `path`, until `unlink`."""

    __slots__ = ("memory", "path")

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory

    @staticmethod
    def create(size: int) -> "SharedFile":
        """Reserve `size` bytes under an unpredictable name, mode 0600. Raises OSError naming the free space.

        The pages are reserved now: a file of holes would kill the process with SIGBUS when the file system is full.
        The mapping holds the lock of the name, as it keeps a descriptor of its own.
        """
        path, fd = make_file(SHARED_DIRECTORY)
        try:
            os.posix_fallocate(fd, 0, size)
            return SharedFile(path, mmap.mmap(fd, size))
        except OSError as error:
            os.unlink(path)
            if error.errno != errno.ENOSPC:
                raise
            stat = os.statvfs(SHARED_DIRECTORY)
            free = stat.f_bavail * stat.f_frsize
            raise OSError(
                errno.ENOSPC,
                f"no room for {size >> 10} KiB in {SHARED_DIRECTORY} ({free >> 10} KiB free): enlarge it "
                "(containers: shm_size), lower the tokens per step, or exchange over TCP",
            ) from error
        finally:
            os.close(fd)

    @staticmethod
    def open(path: str, size: int) -> "SharedFile":
        """Map a file that a peer created. Raises OSError if it has another user or another size."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            if stat.st_uid != os.getuid() or stat.st_size != size:
                raise OSError(errno.EPERM, f"{path}: {stat.st_size} bytes of user {stat.st_uid}, expected {size} bytes")
            return SharedFile(path, mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the name; the memory lives until the last process unmaps it. Safe to call twice."""
        Path(self.path).unlink(missing_ok=True)


def _show(dotted: Path, fd: int) -> Path:
    """Lock the file of `fd`, remove the dot of its name, and return its path."""
    with contextlib.suppress(OSError):  # boundary: a file system without locks gives `sweep` none either
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return dotted.rename(dotted.with_name(dotted.name.removeprefix(".")))


def sweep() -> list[Path]:
    """Remove the files that ended processes of this user have left on this host, and return their paths."""
    swept = [
        path
        for directory in map(Path, (SHARED_DIRECTORY, tempfile.gettempdir()))
        for path in (sorted(directory.iterdir()) if directory.is_dir() else ())
        if _NAMES.fullmatch(path.name) and _take(path)
    ]
    if swept:
        log.warning("removed %d files and folders of killed ranks, such as %s", len(swept), swept[0])
    return swept


def _take(path: Path) -> bool:
    """Remove a path that no process holds; return whether it was removed."""
    with contextlib.suppress(OSError):  # boundary: its maker holds it, or it has just been removed
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
