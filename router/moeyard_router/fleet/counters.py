"""Counters of ranks over all their workers. They never fall, as Prometheus requires of a counter. Pure."""

from collections.abc import Iterable
from itertools import zip_longest

from moeyard_worker.protocol import Snapshot

# Fields of a snapshot. All but the first count from a worker's start.
COUNTERS = frozenset(
    (
        *("step", "generation_tokens", "prefill_tokens", "prefix_query_tokens", "prefix_hit_tokens", "preemptions"),
        *("expert_hits", "expert_misses", "expert_evictions", "draft_tokens", "accepted_tokens", "num_drafts"),
        *("accepted_by_place", "steps_by_rows", "step_rows"),
    )
)


class Counters:
    """Totals of the workers that have had one rank number since this router began.

    The lockstep step belongs to the fleet: the first worker here begins with it, and a later one counts from where it
    joins.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, ...]] = {}  # what earlier workers counted
        self._latest: Snapshot | None = None
        self._joined = 0  # the present worker's first step

    def begin(self) -> None:
        """Keep the totals so far, because the next snapshot comes from another worker."""
        if self._latest is not None:
            self._before = {field: self.total(field) for field in COUNTERS}
            self._latest = None

    def take(self, snapshot: Snapshot, *, first: bool) -> None:
        """Store a snapshot. `first`: whether it is the first one of a connection, which may reach another worker."""
        if first and self._latest is not None and _fell(self._latest, snapshot):
            self.begin()
        if self._latest is None and self._before:
            self._joined = snapshot.step
        self._latest = snapshot

    def total(self, field: str) -> tuple[int, ...]:
        """Return a counter as a tuple: one number, or one per place. Empty if no worker has sent it."""
        now = values_of(self._latest, field)
        if field == "step" and now:
            now = (now[0] - self._joined,)
        return added((self._before.get(field, ()), now))


def added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums of tuples, one per place. Missing places count as 0."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def values_of(snapshot: Snapshot | None, field: str) -> tuple[int, ...]:
    """Return a field of a snapshot as a tuple. Empty if it is unknown."""
    value: int | tuple[int, ...] | None = getattr(snapshot, field, None)
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _fell(old: Snapshot, new: Snapshot) -> bool:
    pairs = (zip(values_of(old, field), values_of(new, field), strict=False) for field in COUNTERS)
    return any(after < before for pair in pairs for before, after in pair)
