"""Progress of a start on stderr: stages as lines, bytes as a bar or, in a log, as a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from moeyard_worker.config.engine_config import format_size

# Interval of progress lines in a log.
INTERVAL_SECONDS = 5.0


class Progress:
    """Bytes of one activity; `show` may be called at any rate."""

    def __init__(
        self,
        doing: str,
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._doing = doing
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._interval = interval
        self._next = float("-inf")
        self._bar: tqdm[None] | None = None

    def show(self, done: int, total: int) -> None:
        if not self._out.isatty():
            if self._clock() >= self._next:
                self._next = self._clock() + self._interval
                whole = f"{format_size(total)} ({100 * done / max(total, 1):.0f} %)"
                print(f"{self._doing}: {format_size(done)} of {whole}", file=self._out, flush=True)
            return
        if self._bar is None:
            options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
            self._bar = tqdm(desc=self._doing, total=total, file=self._out, **options)
        self._bar.total = total  # ranks report their totals one by one
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Startup(Progress):
    """Stages of a start and bytes loaded; `stage` and `loading` may be called at any rate.

    `captures`: whether a capture of CUDA graphs follows the load.
    """

    def __init__(
        self,
        *,
        captures: bool,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        super().__init__("loading weights", out=out, clock=clock, interval=interval)
        self._captures = captures
        self._whole = False

    def stage(self, text: str) -> None:
        self.close()
        print(text, file=self._out, flush=True)

    def loading(self, done: int, total: int) -> None:
        """Show that all ranks together have loaded `done` of `total` bytes. `total` 0: not known yet."""
        if not total or self._whole:
            return
        if done >= total:
            self._whole = True
            self.stage("weights are there; " + ("capturing CUDA graphs" if self._captures else "preparing to step"))
        else:
            self.show(done, total)


@contextmanager
def startup(*, captures: bool) -> Iterator[Startup]:
    """Yield a `Startup` and remove its bar at the end, also after an error."""
    found = Startup(captures=captures)
    try:
        yield found
    finally:
        found.close()
