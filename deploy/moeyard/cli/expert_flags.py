"""Flags of where a rank keeps its experts, and how it comes by those that it misses."""

from collections.abc import Mapping
from typing import Any

from moeyard.cli.door_flags import byte_size
from moeyard.cli.parser import Arguments
from moeyard_worker.config.engine_config import EXPERT_FETCHES, EXPERT_POLICIES


def expert_memory(text: str) -> int | None:
    """argparse type of --expert-memory: a size, or auto for as much as fits."""
    return None if text == "auto" else byte_size(text)


def add_expert_arguments(parser: Arguments, defaults: Mapping[str, Any]) -> None:
    """Slots, the policy that hands them out, and the links over which they are filled."""
    add = parser.add_argument
    add("--expert-slots", type=int, metavar="N", help="expert-cache slots of each rank (default: as many as fit)")
    add(
        "--expert-memory",
        type=expert_memory,
        metavar="SIZE",
        help="expert-cache memory of each rank, e.g. 2GiB, or auto (default)",
    )
    add(
        "--expert-policy",
        choices=EXPERT_POLICIES,
        default=defaults["expert_policy"],
        help="residency policy (default %(default)s)",
    )
    add(
        "--expert-fetch",
        choices=EXPERT_FETCHES,
        default=defaults["expert_fetch"],
        help="shared: GPUs of one host (--exchange nvlink) read for each other the experts that have no slot, over the "
        "links of all; auto: so where it can be; alone: each its own (default %(default)s)",
    )
    add("--record-routing", metavar="FILE", help="record the experts each step needs, for cache-sim")
