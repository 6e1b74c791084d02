"""Flags of how a rank's steps are planned and run."""

import argparse
from typing import Any

from moeyard.cli.parser import Arguments
from moeyard_worker.config.engine_config import DEFAULT_SEQS, MAX_DRAFTS, SPECULATIONS


def add_step_arguments(parser: Arguments) -> None:
    """Two steps at a time, captured steps, drafts."""
    add = parser.add_argument
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before runs (default: on a GPU)",
    )
    add("--enforce-eager", action="store_true", help="capture no step in a CUDA graph")
    add(
        "--speculate",
        choices=("off", *SPECULATIONS),
        default="off",
        help="mtp: draft tokens with the checkpoint's layer for multi-token prediction, verify them a step later; no "
        "answer changes (default %(default)s)",
    )
    add(
        "--draft-tokens",
        type=draft_tokens,
        default="auto",
        metavar="K",
        help=f"with --speculate: tokens drafted behind every one, 1 to {MAX_DRAFTS}, or auto: from step to step as "
        "many as have turned out to be worth it, or none (default %(default)s)",
    )


def draft_tokens(text: str) -> int | None:
    """argparse type of --draft-tokens; None for auto."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_DRAFTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto or a number from 1 to {MAX_DRAFTS}")
    return int(text)


def default_seqs(args: argparse.Namespace, rows: int) -> int:
    """Sequences that a step of so many rows has room for, each with its drafts, but not more than by default."""
    each = 1 if args.speculate == "off" else 1 + (args.draft_tokens or MAX_DRAFTS)
    return max(min(DEFAULT_SEQS, rows // each), 1)


def speculation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the last two describe."""
    return {"speculate": None if args.speculate == "off" else args.speculate, "draft_tokens": args.draft_tokens}
