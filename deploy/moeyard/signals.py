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
    """The signals that end what runs here: none outside the main thread, and none that was ignored from the start.

    `nohup` ignores SIGHUP, a script's `&` SIGINT, so that what they start goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


class Interrupts:
    """Signals that end us are noted, and acted upon where it is safe: at `check`, never in the middle of Ray's code.

    An exception thrown into Ray while it starts or stops its native threads is the likely cause of starts that ended by
    SIGSEGV or SIGABRT when they were interrupted three times (docs/architecture.md has the drill).

    A third signal, at least `patience` seconds after the first, ends the process at once, with its children.
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

        A signal that reaches Ray's daemons too leaves ray.init looking for them for a quarter of a minute. It runs
        apart (`run_apart`), so that the handler is called while Ray's code waits.
        """
        self.check()
        self._at_once = True
        try:
            with last_resort():
                yield
        finally:
            self._at_once = False


def end_now(code: int) -> NoReturn:
    """End this process and all that descend from it, without another line of its Python.

    Another program takes its place, its number and its children. Killing them from here would not do: once a daemon of
    Ray's is stopped, Ray's own code, which waits for it, may hold the interpreter's lock for half a minute.
    """
    # The program that follows inherits what is ignored. Only the main thread may say so.
    for number in ENDING if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "moeyard.last_resort", str(code)])


@contextlib.contextmanager
def last_resort() -> Iterator[None]:
    """A block in which a signal ends this process within two seconds, even if no Python runs in it any more.

    Nothing outside the main thread, which alone may set the wake-up descriptor.
    """
    if not ending_signals():
        yield
        return
    # Not a pipe made by Popen: Python wants the descriptor of its handlers not to block.
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
    """Signals of this block are noted; those after it are ignored, because the process is ending.

    Only the main thread may set handlers; elsewhere nothing is changed and nothing is noted.
    """
    interrupts = Interrupts()
    signals = ending_signals()
    for number in signals:
        signal.signal(number, interrupts.note)
    try:
        yield interrupts
    finally:
        # The interpreter runs no handlers while it ends. The system's default would kill a process that has already
        # stopped in good order.
        for number in signals:
            signal.signal(number, signal.SIG_IGN)


def run_apart(call: Callable[[], object]) -> None:
    """Run `call`, which starts Ray, in a thread of its own, so that the main thread stays free for signals.

    In a thread Ray leaves the handler of SIGTERM alone, and no handler's exception can unwind its code. The thread then
    stays until the process ends: Ray has the kernel kill its daemons when the thread that started them is gone
    (PR_SET_PDEATHSIG). Its children inherit that SIGHUP is blocked: a terminal that closes ends this process, which
    ends them in order, as Ctrl-C does (Ray itself blocks SIGINT there). Raises what `call` raises.
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
    # In slices: a signal that another thread was given does not wake this one.
    while not done.wait(_SLICE_SECONDS):
        pass
    if errors:
        raise errors[0]
