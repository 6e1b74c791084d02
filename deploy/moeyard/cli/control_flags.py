"""Flags of `moeyard drain`, `undrain`, `restart` and `scale`, and what a restart may change."""

import argparse

from moeyard.cli.door_flags import byte_size, count, duration
from moeyard.cli.flags import port
from moeyard_worker.config.engine_config import EXPERT_POLICIES

# Fields of EngineConfig in which a rank may differ from the others (docs/reliability.md has the reasons).
CHANGEABLE = (
    *("threads", "max_num_seqs", "prefill_chunk", "mixed_prefill_tokens", "max_waiting"),
    *("kv_memory", "expert_slots", "expert_policy"),
)


def rank(text: str) -> int:
    """argparse type of a rank."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank; ranks are numbers from 0")
    return int(text)


def rank_or_all(text: str) -> int | None:
    """The same, None for all."""
    return None if text == "all" else rank(text)


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """Which server."""
    parser.add_argument(
        "--port", type=port, metavar="P", help="port of the server's API (default: of the only one that runs here)"
    )


def add_timeout_argument(parser: argparse.ArgumentParser) -> None:
    """How long requests may stay at a rank."""
    parser.add_argument(
        "--drain-timeout",
        type=duration,
        default=30.0,
        metavar="S",
        help="seconds for what runs there, which then goes on at other ranks (default %(default)g)",
    )


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `moeyard drain`."""
    parser.add_argument("--worker", type=rank, required=True, metavar="N", help="the rank")
    add_timeout_argument(parser)
    add_server_argument(parser)


def add_undrain_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `moeyard undrain`."""
    parser.add_argument("--worker", type=rank, required=True, metavar="N", help="the rank")
    add_server_argument(parser)


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `moeyard scale`."""
    parser.add_argument("size", type=count, metavar="N", help="how many workers there are to be")
    add_timeout_argument(parser)
    add_server_argument(parser)


def add_restart_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `moeyard restart`: names and meanings of the flags that may change are those of `moeyard serve`."""
    parser.add_argument("--worker", type=rank_or_all, metavar="N", help="the rank (default: all, one after the other)")
    add_timeout_argument(parser)
    add_server_argument(parser)
    changes = parser.add_argument_group("flags of `moeyard serve` that the new processes are to have")
    for name in CHANGEABLE:
        flag = f"--{name.replace('_', '-')}"
        if name == "expert_policy":
            changes.add_argument(flag, choices=EXPERT_POLICIES)
        else:
            size = name == "kv_memory"
            changes.add_argument(flag, type=byte_size if size else count, metavar="SIZE" if size else "N")
