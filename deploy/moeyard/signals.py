"""What SIGTERM and Ctrl-C do while a fleet starts, runs Ray's own code, and stops."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """While the fleet starts, SIGTERM unwinds as Ctrl-C does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM must not cut the clean-up short and leave processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """ray.init replaces the handler of SIGTERM: put it back, and let the signal unwind this block as Ctrl-C does.

    Ray forks much here, and Python swallows what a handler raises within a callback of fork. Its wake-up descriptor
    remembers every signal, so one that was swallowed ends the block late instead of never.
    """
    if threading.current_thread() is not threading.main_thread():
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
