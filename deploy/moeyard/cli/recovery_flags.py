"""The flags that say what a fleet does when it loses a worker."""

import argparse

from moeyard.cli.door_flags import count, duration
from moeyard.cli.parser import Arguments
from moeyard.takeover import MODES as TAKEOVERS


def processes(text: str) -> int:
    """argparse type of a number of processes, which may be none."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def add_recovery_arguments(parser: Arguments) -> None:
    """Flags of `moeyard serve`."""
    add = parser.add_argument
    add(
        "--expert-takeover",
        choices=TAKEOVERS,
        default="auto",
        help="whether the others take a lost rank's experts over until it is back; auto: if they have room and that is "
        "quicker (default %(default)s)",
    )
    add(
        "--restart-limit",
        type=count,
        default=3,
        metavar="N",
        help="a worker that is lost so often within the window ends the fleet, with exit code 1 (default %(default)s)",
    )
    add(
        "--restart-window",
        type=duration,
        default=60.0,
        metavar="S",
        help="seconds within which lost workers are counted (default %(default)g)",
    )
    add(
        "--standby",
        type=processes,
        metavar="N",
        help="processes that wait, with everything imported, to take a lost worker's place; a few hundred MB of host "
        "memory each, none with --ray-address (default: 1 on GPUs, else 0)",
    )
