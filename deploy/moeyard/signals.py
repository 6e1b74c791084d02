"""Effects of SIGTERM and Ctrl-C while a fleet starts, runs Ray's own code, and stops."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from moeyard.entry import INTERRUPTED
from moeyard.last_resort import ENDING

PATIENCE_SECONDS = 10.0
_SLICE_SECONDS = 0.1


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process; none outside the main thread. Ignored signals are left out.

    `nohup` ignores SIGHUP and a script's `&` ignores SIGINT, so that the process continues.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


class Interrupts:
    """Ending signals, noted on arrival and acted on at `check`, where it is safe.

    An exception must not interrupt Ray's code while it starts or stops native threads. That is the likely cause of
    SIGSEGV and SIGABRT in starts that were interrupted three times (docs/journal.md).

    A third signal, at least `patience` seconds after the first, kills the process and its children.
    """

    def __init__(self, *, patience: float = PATIENCE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._first = 0.0
        self._at_once = False
        self.count = 0

    def note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            self._first = self._clock()
            # Not print: the handler may interrupt a write to the same stream.
            os.write(2, b"stopping\n")
        if self._at_once or (self.count >= 3 and self._clock() - self._first > self._patience):
            end_now(INTERRUPTED)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self.count:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Enter a block in which a signal ends the process at once: ray.init, before anything needs cleanup.

        If a signal also reaches Ray's daemons, ray.init looks for them for 15 s. It runs in another thread
        (`run_apart`), so that the handler runs while Ray's code waits.
        """
        self.check()
        self._at_once = True
        try:
            with last_resort():
                yield
        finally:
            self._at_once = False


def end_now(code: int) -> NoReturn:
    """End this process and all its descendants without running more of its Python code.

    Another program replaces it with exec and inherits its pid and children. This process must not kill them itself:
    Ray's code may wait for a stopped daemon and hold the GIL for half a minute.
    """
    # The new program inherits ignored signals. Only the main thread may set them.
    for number in ENDING if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "moeyard.last_resort", str(code)])


@contextlib.contextmanager
def last_resort() -> Iterator[None]:
    """Enter a block in which a signal ends this process within two seconds, even if its Python code is blocked.

    Has no effect outside the main thread, because only that thread may set the wake-up descriptor.
    """
    if not ending_signals():
        yield
        return
    # Not a pipe from Popen: set_wakeup_fd needs a non-blocking descriptor.
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    helper = subprocess.Popen([sys.executable, "-P", "-m", "moeyard.last_resort"], stdin=theirs, start_new_session=True)
    os.close(theirs)
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)
        helper.wait()


@contextlib.contextmanager
def noted() -> Iterator[Interrupts]:
    """Note signals in this block. Ignore them after it, because the process ends.

    Only the main thread may set handlers; elsewhere this has no effect.
    """
    interrupts = Interrupts()
    signals = ending_signals()
    for number in signals:
        signal.signal(number, interrupts.note)
    try:
        yield interrupts
    finally:
        # The interpreter runs no handlers during its exit. The default action would kill a process after its orderly
        # shutdown.
        for number in signals:
            signal.signal(number, signal.SIG_IGN)


def run_apart(call: Callable[[], object]) -> None:
    """Run `call`, which starts Ray, in a separate thread, so that the main thread can handle signals.

    Outside the main thread Ray does not replace the SIGTERM handler, and no handler's exception can unwind its code.
    The thread stays alive: Ray asks the kernel to kill its daemons when their parent thread exits (PR_SET_PDEATHSIG).
    Children inherit the blocked SIGHUP. When the terminal closes, this process ends them in order, as it does after
    Ctrl-C (Ray itself blocks SIGINT there). Raises the exception of `call`.
    """
    done, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            call()
        except BaseException as error:  # boundary: raised again by the thread that waits
            errors.append(error)
        done.set()
        threading.Event().wait()

    threading.Thread(target=run, name="ray-init", daemon=True).start()
    # Wait in slices: a signal delivered to another thread does not wake this one.
    while not done.wait(_SLICE_SECONDS):
        pass
    if errors:
        raise errors[0]
