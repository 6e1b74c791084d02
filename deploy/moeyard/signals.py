"""What SIGTERM and Ctrl-C do while a fleet starts, runs Ray's own code, and stops."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _handled_by(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Only the main thread may set handlers; elsewhere they stay."""
    before = {number: signal.signal(number, handler) for number in signals} if _is_main_thread() else {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def sigterm_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """While the fleet starts, SIGTERM unwinds as Ctrl-C does, so that nothing is left behind."""
    return _handled_by(_interrupt, signal.SIGTERM)


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """A second Ctrl-C or SIGTERM must not cut the clean-up short and leave processes."""
    return _handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """ray.init replaces the handler of SIGTERM: put it back, and let the signal unwind this block as Ctrl-C does.

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
