"""Counts and logs the connections and messages that router and workers refuse, with limits on the log.

A stranger may send any amount of data. A log line quotes at most `MAX_QUOTE` characters. After `LINES` lines in
`SECONDS`, refusals are only counted, and the next line says how many were omitted.
"""

import logging
import threading
import time
from collections.abc import Callable

MAX_QUOTE = 200
LINES, SECONDS = 5, 10.0


def cut(text: object, limit: int = MAX_QUOTE) -> str:
    """Return `text`, or its beginning and its length."""
    whole = str(text)
    return whole if len(whole) <= limit else f"{whole[:limit]}... ({len(whole)} characters)"


class Refusals:
    """Counts refusals by reason (`counts`), and logs them. `add` may be called from any thread."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._since, self._num_lines, self._num_omitted = clock(), 0, 0

    def add(self, reason: str, text: object) -> None:
        """Count one more refusal for `reason`, a label of a metric, and log `text` unless the log is full."""
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1
            now = self._clock()
            if now - self._since >= SECONDS:
                self._since, self._num_lines = now, 0
            self._num_lines += 1
            if self._num_lines > LINES:
                self._num_omitted += 1
                return
            omitted, self._num_omitted = self._num_omitted, 0
        more = f" ({omitted} more like it were not written)" if omitted else ""
        self._log.warning("refused (%s): %s%s", reason, cut(text), more)
