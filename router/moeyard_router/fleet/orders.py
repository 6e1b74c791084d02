"""What a launcher tells routers of ranks that are drained or about to be replaced. Pure."""

from dataclasses import dataclass

# In the place of a number of sequences: the fleet is not whole, and they may be anywhere.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """From now on `ranks`, and no others, take no new sequences.

    `rank` is the one that the answer is about. `carry`: what it has goes on at others, if another takes sequences.
    `leaves`: its process is about to be replaced, so that its end is nobody's fault and requests wait until then.
    `size`: the same of all ranks from this one on, which leave for good; or there will be so many ranks, if that is
    more. None: there are as many as before.
    """

    ranks: tuple[int, ...]
    rank: int
    carry: bool = False
    leaves: bool = False
    size: int | None = None
