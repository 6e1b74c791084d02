"""stdout and stderr of a server whose disk fills up: what cannot be written is lost, and serving goes on."""

import errno
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

# A full disk, a quota, `ulimit -f`, a disk that breaks. A pipe whose reader has left is another matter.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def outlive_full_disk() -> None:
    """From now on a line on stdout or stderr that finds no room ends nothing: Python's own would raise OSError."""
    sys.stdout, sys.stderr = (cast(TextIO, _Lossy(stream)) for stream in (sys.stdout, sys.stderr))


class _Lossy:
    """A text stream that loses what finds no room."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's; the length of a text that is lost."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _check(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As the stream's."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """As the stream's."""
        try:
            self._stream.flush()
        except OSError as error:
            _check(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check(error: OSError) -> None:
    if error.errno not in _FULL:
        raise error
