"""The flags that limit what clients may ask of the router at once, and the fields of RouterConfig that they set."""

import argparse
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from moeyard.cli.parser import Arguments
from moeyard_router.config import RouterConfig
from moeyard_worker.config.engine_config import EngineConfig, parse_size

_DEFAULTS = MappingProxyType({f.name: f.default for f in fields(RouterConfig) if f.default is not MISSING})
# Of RouterConfig, and set here by a flag of the same name where it is given.
_FIELDS = (
    *("max_inflight", "max_waiting_tokens", "max_body_bytes", "max_buffered_bytes", "max_header_bytes"),
    *("header_timeout", "body_timeout", "keep_alive_timeout", "send_timeout", "intake_processes"),
    "recovery_timeout",
)


def count(text: str) -> int:
    """argparse type of a number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """argparse type of a time."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def duration(text: str) -> float:
    """argparse type of a time that may be 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds; expected 0 or more")
    return value


def byte_size(text: str) -> int:
    """argparse type of a size in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_door_arguments(parser: Arguments) -> None:
    """Flags of every command that starts a router; defaults are RouterConfig's."""

    def add(name: str, kind: Any, metavar: str, text: str) -> None:
        default = _DEFAULTS[name.removeprefix("--").replace("-", "_")]
        shown = "no limit" if default is None else f"{default // 1024} KiB" if kind is byte_size else f"{default:g}"
        note = "" if "(default" in text else f" (default {shown})"
        parser.add_argument(name, type=kind, metavar=metavar, help=text + note)

    add("--max-inflight", count, "N", "sequences at all ranks before 429 (default: what their places and queues hold)")
    add("--max-waiting-tokens", count, "N", "prompt tokens of sequences without a token yet, at all ranks, before 429")
    parser.add_argument(
        "--max-queue-seconds",
        type=seconds,
        metavar="S",
        help="longest wait of a request for its start, then 429 (default: no limit for a burst; while more comes than "
        "goes, half the time of a first token. For batches that may wait, 3600)",
    )
    add("--max-body-bytes", byte_size, "SIZE", "longest request body, then 413")
    add("--max-buffered-bytes", byte_size, "SIZE", "bodies that are being read, together, then 503")
    add("--max-header-bytes", byte_size, "SIZE", "longest request line and headers, then 431")
    add("--header-timeout", seconds, "S", "time for a request's headers, then 408")
    add("--body-timeout", seconds, "S", "time for a request's body, then 408")
    add("--keep-alive-timeout", seconds, "S", "time without a request before a connection is closed")
    add("--send-timeout", seconds, "S", "time without a byte of its answer taken before a client is cut off")
    add("--recovery-timeout", seconds, "S", "how long requests wait for a fleet that has lost a worker")
    add("--intake-processes", count, "N", "processes that read request bodies of more than 64 KiB")


def door_fields(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """The fields of RouterConfig that the flags set."""
    given = {name: getattr(args, name) for name in _FIELDS}
    each = config.max_num_seqs + config.max_waiting
    return {
        "max_inflight": config.num_workers * each,
        **({"inflight_per_worker": each} if args.max_inflight is None else {}),
        "worker_places": config.max_num_seqs,
        "max_queue_seconds": config.max_queue_seconds,
        **{name: value for name, value in given.items() if value is not None},
    }
