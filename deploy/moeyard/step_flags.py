"""Flags of how a rank's steps are planned and run."""

import argparse
from typing import Any

from moeyard_worker.config.engine_config import MAX_DRAFTS, SPECULATIONS


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
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
        type=int,
        default=2,
        metavar="K",
        help=f"with --speculate: tokens drafted behind every one, 1 to {MAX_DRAFTS} (default %(default)s)",
    )


def speculation_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the last two describe."""
    return {"speculate": None if args.speculate == "off" else args.speculate, "draft_tokens": args.draft_tokens}
