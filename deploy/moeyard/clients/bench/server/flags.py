"""The flags of `moeyard bench URL`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeyard.clients.bench.server.workload import KINDS, parse_lengths
from moeyard.clients.target import add_target_arguments

ENDPOINTS = ("chat", "completions")


def kind(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that keeps the words of the ValueError with which `parse` refuses."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def positive(text: str) -> float:
    """A number above 0, "inf" included. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{text!r} is no number above 0")
    return value


def whole(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return parse


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return value


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    add = parser.add_argument
    add_target_arguments(parser)
    add("--endpoint", choices=ENDPOINTS, default="chat", help="/v1/chat/completions or /v1/completions (default chat)")
    add(
        "--prompts",
        choices=KINDS,
        default="words",
        help="random words, or random token ids for --endpoint completions (default %(default)s)",
    )
    add(
        "--vocab-size",
        type=kind(whole(2)),
        default=256,
        metavar="N",
        help="token ids go up to here (default %(default)s, which every model has)",
    )
    lengths, count = kind(parse_lengths), kind(whole(1))
    distribution = "N, LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"
    add("--prompt-tokens", type=lengths, default="512", metavar="DIST", help=f"{distribution} (default 512)")
    add("--output-tokens", type=lengths, default="128", metavar="DIST", help="the same of the answers (default 128)")
    add(
        "--shared-prefix",
        type=kind(whole(0)),
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, beside their own (default none)",
    )
    add("--turns", type=count, default=1, metavar="K", help="requests of a conversation, history resent (default 1)")
    add(
        "--concurrency",
        type=count,
        metavar="N",
        help="conversations at once (default 8; with --rate: any number)",
    )
    add(
        "--rate", type=kind(positive), metavar="R", help="conversations begun per second, or inf (default: closed loop)"
    )
    add(
        "--burstiness",
        type=kind(positive),
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of --rate's gaps: 1 is Poisson, less comes in bursts (default 1)",
    )
    add("--num-requests", type=count, metavar="N", help="requests in all (default 100, or as --duration allows)")
    add("--duration", type=kind(positive), metavar="S", help="seconds in which requests are begun")
    add("--warmup", type=kind(whole(0)), default=4, metavar="N", help="requests before, not measured (default 4)")
    add("--seed", type=int, metavar="N", help="of lengths, words and arrivals (default: another one each time)")
    add("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length (default; a server that refuses the field wants --no-ignore-eos)",
    )
    add("--extra-body", type=kind(json_object), default={}, metavar="JSON", help="fields put into every request")
    add("--timeout", type=kind(positive), default=600.0, metavar="S", help="for a whole answer (default %(default)g)")
    add("--slo", metavar="LIST", help="objectives that goodput counts, e.g. ttft=500ms,tpot=30ms,e2e=5s")
    add("--json", type=Path, metavar="FILE", help="write figures and a row per request there")
    add("--png", type=Path, metavar="FILE", help="draw latencies and throughput there (needs matplotlib)")
    add(
        "--compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="with one result of --json: beside this run; with two: those, and nothing is run",
    )
