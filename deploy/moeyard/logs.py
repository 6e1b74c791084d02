"""Log lines on stderr, as text or JSON, written by a thread of their own.

Whoever serves must not wait for a terminal or a pipe that nobody reads: lines are queued, and what does not fit, or
comes faster than `LINES_PER_SECOND`, is left out and counted. Lines never hold prompts or keys; of an exception they
hold its type and where it came from, and its words (which may quote a request) only at level debug.
"""

import contextlib
import errno
import json
import logging
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from moeyard_worker.options import option

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
# An access-log line costs some 50 us of CPU (2026-11-22, on cores that others used): 2.5 % of one at the most.
LINES_PER_SECOND = 500
QUEUE_LINES = 4096
OURS = ("moeyard", "moeyard_router", "moeyard_worker")
# Control characters, C1 and Unicode's line breaks: nothing that a client sends can end a line or move a cursor.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# A full disk, a quota, `ulimit -f`, a disk that breaks. A pipe whose reader has left is another matter.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`level` of our own lines (others' begin at warning), and how lines are spelled."""

    level: str = option("info", "of router and workers", flag="--log-level", choices=LEVELS, group="keys, TLS and logs")
    format: str = option("text", "of log lines", flag="--log-format", choices=FORMATS)


def start(
    config: LogConfig, *, context: Callable[[], Mapping[str, str | int]] = dict, stream: TextIO | None = None
) -> None:
    """Send every log record of this process to stderr (or `stream`) from now on.

    `context` is asked with every record for fields that it carries, in the thread and task that logs.
    """
    level = logging.getLevelNamesMapping()[config.level.upper()]
    handler = _QueuedLines(_Formatter(config), context, stream or sys.stderr)
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _QueuedLines)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(max(level, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(level)


class _Formatter(logging.Formatter):
    """One line per record: time in UTC, level, logger, message, fields. Text has a traceback in lines below."""

    def __init__(self, config: LogConfig) -> None:
        super().__init__()
        self._json = config.format == "json"
        self._words = config.level == "debug"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields: dict[str, str | int | float] = getattr(record, "fields", {})
        context: Mapping[str, str | int] = getattr(record, "context", {})
        message, trace = record.getMessage(), self._trace(record)
        if self._json:
            line = {"time": when, "level": record.levelname.lower(), "logger": record.name}
            more = {"traceback": trace} if trace else {}
            # An access line's message says the fields once more.
            said = {} if fields else {"message": message}
            return json.dumps({**line, **said, **context, **fields, **more})
        if not fields:
            message = " ".join([message, *(f"{name}={value}" for name, value in context.items())])
        lines = [f"{when} {record.levelname:<7} {record.name} {message.strip()}", *trace.splitlines()]
        return "\n    ".join(_CONTROL.sub(_escape, line) for line in lines)

    def _trace(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        kind, error, tb = record.exc_info
        if self._words:
            return "".join(traceback.format_exception(kind, error, tb)).rstrip()
        return "".join([*traceback.format_tb(tb), kind.__name__])


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class _QueuedLines(logging.Handler):
    """Formats where the record is made, writes in a thread."""

    def __init__(
        self, formatter: logging.Formatter, context: Callable[[], Mapping[str, str | int]], stream: TextIO
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._context = context
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._second, self._count, self._left_out = 0, 0, 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        try:
            if int(record.created) != self._second:
                self._second, self._count = int(record.created), 0
                if self._left_out:
                    self._put(_left_out(self._left_out))
                    self._left_out = 0
            self._count += 1
            if self._count > LINES_PER_SECOND and record.levelno < logging.ERROR:
                self._left_out += 1
                return
            record.context = self._context()
            self._put(record)
        except Exception:  # boundary: a line that cannot be written must not end what it is about
            self.handleError(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                pass
            finally:
                self._lines.task_done()

    def flush(self) -> None:
        """Wait until what is queued is written, for a second at most."""
        until = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def close(self) -> None:
        """Write what is queued and end the thread, unless nobody reads."""
        self.flush()
        with contextlib.suppress(queue.Full):  # boundary: nobody reads, so the thread ends with the process
            self._lines.put_nowait(None)
        super().close()


def _left_out(count: int) -> logging.LogRecord:
    text = "%d lines left out: more than %d a second, or nobody read them"
    return logging.LogRecord("moeyard.logs", logging.WARNING, __file__, 0, text, (count, LINES_PER_SECOND), None)


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
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _check(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check(error: OSError) -> None:
    if error.errno not in _FULL:
        raise error
