"""Files of a checkpoint, which is untrusted: only regular files are opened, and only up to a size.

Opening a FIFO would wait for a writer, and reading a device may never end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from moeyard_worker.config.checkpoint_error import CheckpointError

# Largest JSON file to read. The largest in use are tokenizers of 35 MB and indices of 15 MB (2026-11).
MAX_JSON_BYTES = 256 << 20


def open_regular(path: Path) -> BinaryIO:
    """Open for reading, unbuffered. Raises CheckpointError for anything but a regular file, OSError as `open` does."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait. It has no effect on regular files.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _refusal(path, "a socket") from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise _refusal(path, kind)
    return os.fdopen(fd, "rb", buffering=0)


def _refusal(path: Path, kind: str) -> CheckpointError:
    return CheckpointError(f"{path}: is {kind}; the files of a checkpoint are regular files")


def read_text(path: Path) -> str:
    """Return a regular file's UTF-8 text, up to MAX_JSON_BYTES.

    Raises CheckpointError, OSError or UnicodeDecodeError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, at most {MAX_JSON_BYTES} are read")
        data = bytearray()
        while len(data) <= size and (block := file.read(size - len(data) + 1)):
            data += block
    return data.decode("utf-8")
