"""The flags that say who may come in and what is logged, and the environment variable that holds a key."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from moeyard.cli.parser import Arguments
from moeyard.logs import FORMATS, LEVELS, LogConfig
from moeyard_router.config import DoorConfig
from moeyard_router.http.origins import parse_origins

KEY_VARIABLE = "MOEYARD_API_KEY"


class _NoKeyHere(argparse.Action):
    """vLLM's --api-key, refused with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        parser.error(
            f"--api-key would show the key to everybody on this machine; use --api-key-file FILE or {KEY_VARIABLE}"
        )


def add_door_arguments(parser: Arguments) -> None:
    """Flags of `moeyard serve` about keys, certificates, web pages and logs."""
    add = parser.add_argument
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"API keys, one per line: KEY, NAME:KEY or NAME:sha256:HEX (one more may be in {KEY_VARIABLE})",
    )
    add("--api-key", nargs="?", action=_NoKeyHere, help=argparse.SUPPRESS)
    add("--protect-metrics", action="store_true", help="ask for an API key on /metrics too")
    add("--ssl-certfile", type=Path, metavar="FILE", help="PEM certificate chain: serve HTTPS")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its PEM private key (default: in the same file)")
    add("--ssl-ca-certs", type=Path, metavar="FILE", help="PEM authorities: clients must show a certificate of theirs")
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call from a browser, e.g. https://chat.example.com, or '*' (default: only our own)",
    )
    add(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one line per request on stderr (default: yes)",
    )
    add("--log-level", choices=LEVELS, default="info", help="of router and workers (default %(default)s)")
    add("--log-format", choices=FORMATS, default="text", help="of log lines (default %(default)s)")


def door_config(args: argparse.Namespace) -> DoorConfig:
    """The door that the flags and the environment describe; raises ValueError for what is no origin."""
    # Taken out, so that no process that is started from here inherits it.
    key = os.environ.pop(KEY_VARIABLE, "").strip()
    return DoorConfig(
        api_key_file=args.api_key_file,
        api_keys=(key,) if key else (),
        protect_metrics=args.protect_metrics,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        allowed_origins=tuple(parse_origins(args.allowed_origins)),
        access_log=args.access_log,
    )


def log_config(args: argparse.Namespace) -> LogConfig:
    """How the flags want log lines."""
    return LogConfig(level=args.log_level, format=args.log_format)
