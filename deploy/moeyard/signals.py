"""What SIGTERM and Ctrl-C do while a fleet starts, runs Ray's own code, and stops."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

PATIENCE_SECONDS = 10.0
# What a shell says of a command that Ctrl-C ended.
INTERRUPTED = 130


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interrupts:
    """SIGINT and SIGTERM are noted, and acted upon where it is safe: at `check`, never in the middle of Ray's code.

    An exception thrown into Ray while it starts or stops its native threads is the likely cause of starts that ended by
    SIGSEGV or SIGABRT when they were interrupted three times (docs/architecture.md has the drill).

    Whoever has waited `patience` seconds since the first and then signals at least for the third time wants out
    whatever it costs: the process ends at once, and takes its children with it.
    """

    def __init__(self, *, patience: float = PATIENCE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._first = 0.0
        self._at_once = False
        self.count = 0

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        self.count += 1
        if self.count == 1:
            self._first = self._clock()
            # Not print: a handler may run while the same stream is being written to.
            os.write(2, b"stopping\n")
        if self._at_once or (self.count >= 3 and self._clock() - self._first > self._patience):
            end_now(INTERRUPTED)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self.count:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that can neither be unwound nor waited for, before there is anything to put in order: ray.init.

        A terminal's Ctrl-C ends Ray's daemons too, and ray.init then looks for them for a quarter of a minute.
        """
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


def end_now(code: int) -> None:
    """End this process and all that descend from it, without another line of Python."""
    # Stopped first, so that none starts another between the look and the end.
    for act in (psutil.Process.suspend, psutil.Process.suspend, psutil.Process.kill):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # boundary: it ended by itself
                act(process)
    os._exit(code)


@contextlib.contextmanager
def noted() -> Iterator[Interrupts]:
    """Signals of this block are noted; those after it are ignored, because the process is ending.

    Only the main thread may set handlers; elsewhere nothing is changed and nothing is noted.
    """
    interrupts = Interrupts()
    signals = (signal.SIGINT, signal.SIGTERM) if _is_main_thread() else ()
    for number in signals:
        signal.signal(number, interrupts.note)
    try:
        yield interrupts
    finally:
        # What a handler of Python's own would do, the interpreter no longer does while it ends: the system's default
        # would then kill a process that has already stopped in good order.
        for number in signals:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """ray.init replaces the handler of SIGTERM: put it back, and let a signal end this block as Ctrl-C would.

    Ray forks much here, and Python swallows what a handler raises within a callback of fork. Its wake-up descriptor
    remembers every signal, so one that was swallowed ends the block late instead of never.
    """
    if not _is_main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    heard, told = socket.socketpair()
    with heard, told:
        for end in (heard, told):
            end.setblocking(False)
        wakeup = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        try:
            yield
            with contextlib.suppress(BlockingIOError):  # boundary: no signal came
                if {signal.SIGTERM, signal.SIGINT} & set(heard.recv(4096)):
                    raise KeyboardInterrupt
        except SystemExit:
            raise KeyboardInterrupt from None
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)
