"""Entry of the console script and of `python -m moeyard`, quiet from the first line; and late imports."""

import importlib
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

# Set if Python's own clean-up at exit would wait for ever, as for a thread that is stuck inside Ray's code.
unclean = threading.Event()
# A shell's exit code of a command that Ctrl-C ended.
INTERRUPTED = 130


def load(module: str) -> Any:
    """Import a module now and return it. All late imports of the launcher go through this function.

    Ray takes a second to import and reads its settings meanwhile, torch takes two seconds and 200 MB, and transformers
    may be absent. `--help`, a wrong flag and the router import none of them.
    """
    return importlib.import_module(module)


def leave(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGINT during imports."""
    os._exit(INTERRUPTED)


def main() -> int:
    """Run the command line. An interrupt during imports exits silently, because nothing needs cleanup yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        code = int(load("moeyard.cli.commands").main())
    except SystemExit as end:
        if not unclean.is_set() or not isinstance(end.code, int):
            raise
        code = end.code
    if unclean.is_set():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by a reader that has left
                stream.flush()
        os._exit(code)
    return code
