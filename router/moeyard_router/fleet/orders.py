"""Orders of a launcher about ranks that drain or are about to be replaced. Pure."""

from dataclasses import dataclass

# Replaces a number of sequences while the fleet is incomplete: the sequences may then be on any rank.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Stop sending new sequences to `ranks`, and only to these.

    The answer is about `rank`. `carry`: its sequences continue on other ranks, if another rank accepts sequences.
    `leaves`: its process is about to be replaced. Its exit is not a fault, and requests wait until then.
    `size`: the new number of ranks. If it is smaller, all ranks from `size` on leave for good. None: no change.
    """

    ranks: tuple[int, ...]
    rank: int
    carry: bool = False
    leaves: bool = False
    size: int | None = None
