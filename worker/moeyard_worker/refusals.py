"""Counts and logs what router and workers refuse from outside, with limits on the log.

A stranger may send much rubbish. A log line quotes at most `MAX_QUOTE` characters. After `LINES` lines in `SECONDS`,
refusals are only counted, and the next line says how many were left out.
"""

import logging
import threading
import time
from collections.abc import Callable

MAX_QUOTE = 200
LINES, SECONDS = 5, 10.0


def cut(text: object, limit: int = MAX_QUOTE) -> str:
    """Return `text`, or its beginning and its length."""
    said = str(text)
    return said if len(said) <= limit else f"{said[:limit]}... ({len(said)} characters)"


class Refusals:
    """Counts refusals by reason (`counts`), and logs them. `add` may be called from any thread."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._since, self._said, self._left_out = clock(), 0, 0

    def add(self, reason: str, text: object) -> None:
        """Count one more refusal for `reason`, a label of a metric, and log `text` unless there were many lately."""
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1
            now = self._clock()
            if now - self._since >= SECONDS:
                self._since, self._said = now, 0
            self._said += 1
            if self._said > LINES:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more like it were not written)" if left_out else ""
        self._log.warning("refused (%s): %s%s", reason, cut(text), more)
