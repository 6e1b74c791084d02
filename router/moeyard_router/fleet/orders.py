"""Orders of a launcher to routers about ranks that drain or will be replaced. Pure."""

from dataclasses import dataclass

# Instead of a number of sequences: the fleet is incomplete, so the number is unknown.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Stop sending new sequences to `ranks`, and send them to all others.

    rank: the rank whose sequences the answer counts.
    carry: whether its sequences go on at other ranks, if another rank takes sequences.
    leaves: whether its process will be replaced. Its end is then planned, and requests wait for its successor.
    size: the next number of ranks, or None. Ranks from `size` on leave for good.
    """

    ranks: tuple[int, ...]
    rank: int
    carry: bool = False
    leaves: bool = False
    size: int | None = None
