"""What the console script and `python -m moeyard` run: quiet from the first line."""

import os
import signal
from types import FrameType

from moeyard.lazy import load

# What a shell says of a command that Ctrl-C ended.
INTERRUPTED = 130


def leave(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGINT while we import."""
    os._exit(INTERRUPTED)


def main() -> int:
    """The command line. Until it has begun there is nothing to put in order, so an interrupt ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    return int(load("moeyard.cli.commands").main())
