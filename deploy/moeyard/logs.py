"""Log lines on stderr, as text or JSON, written by a separate thread.

Serving must not block on a terminal or pipe that is not read. Lines are queued. Lines beyond the queue's size or
`LINES_PER_SECOND` are dropped and counted. Lines never hold prompts or keys. An exception is logged with its type and
traceback; its message may quote a request, so it appears only at level debug.
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
# An access-log line costs about 50 us of CPU (2026-11-22, on shared cores), so at most 2.5 % of one core.
LINES_PER_SECOND = 500
QUEUE_LINES = 4096
OURS = ("moeyard", "moeyard_router", "moeyard_worker")
# Escape control characters, C1 and Unicode line breaks, so that client text cannot end a line or move a cursor.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# A full disk, a quota, `ulimit -f` and a broken disk. A pipe without a reader is not among these.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`level` of moeyard's lines (other libraries log from warning), and the format."""

    level: str = option("info", "of router and workers", flag="--log-level", choices=LEVELS, group="keys, TLS and logs")
    format: str = option("text", "of log lines", flag="--log-format", choices=FORMATS)


def start(
    config: LogConfig, *, context: Callable[[], Mapping[str, str | int]] = dict, stream: TextIO | None = None
) -> None:
    """Send every log record of this process to stderr (or `stream`) from now on.

    `context` returns extra fields for each record. It runs in the thread and task that logs.
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
    """One line per record: UTC time, level, logger, message, fields. In text format traceback lines follow."""

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
            # The message of an access line repeats the fields.
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
    """Formats in the caller's thread, writes in a separate one."""

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
        """Queue a record. Logging calls this under the handler's lock."""
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
        except Exception:  # boundary: a failed log line must not end the caller
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
            except (OSError, ValueError):  # the reader has left, or the stream is closed
                pass
            finally:
                self._lines.task_done()

    def flush(self) -> None:
        """Wait up to a second for queued lines to be written."""
        until = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)

    def close(self) -> None:
        """Write queued lines and end the thread, unless the stream is blocked."""
        self.flush()
        with contextlib.suppress(queue.Full):  # boundary: the stream is blocked; the thread ends with the process
            self._lines.put_nowait(None)
        super().close()


def _left_out(count: int) -> logging.LogRecord:
    text = "%d lines left out: more than %d a second, or nobody read them"
    return logging.LogRecord("moeyard.logs", logging.WARNING, __file__, 0, text, (count, LINES_PER_SECOND), None)


def outlive_full_disk() -> None:
    """Drop output on stdout and stderr that does not fit on a full disk, instead of raising OSError."""
    sys.stdout, sys.stderr = (cast(TextIO, _Lossy(stream)) for stream in (sys.stdout, sys.stderr))


class _Lossy:
    """A text stream that drops output when the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream, and return the full length also for dropped text."""
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
