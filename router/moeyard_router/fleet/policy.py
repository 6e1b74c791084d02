"""Which rank takes the next sequence. Pure: no clock, no sockets."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What is known of one rank: its latest snapshot, and what this router has sent it.

    `reported` counts sequences running and waiting in the snapshot; `own_at_snapshot` how many of this router's were
    unanswered when the snapshot arrived, and `own` how many are now. `own_tokens` sums prompt + output limit of the
    latter. `kv_pages_free` is the snapshot's.
    """

    rank: int
    usable: bool
    reported: int
    own_at_snapshot: int
    own: int
    own_tokens: int
    kv_pages_free: int

    @property
    def sequences(self) -> int:
        """Sequences at this rank: this router's exactly, and those of other routers as of the snapshot."""
        return self.own + max(0, self.reported - self.own_at_snapshot)


def choose_rank(loads: Iterable[RankLoad]) -> int | None:
    """The usable rank with the fewest sequences; ties by fewer tokens, more free KV pages, lower rank. None if none."""
    usable = [load for load in loads if load.usable]
    if not usable:
        return None
    return min(usable, key=lambda load: (load.sequences, load.own_tokens, -load.kv_pages_free, load.rank)).rank
