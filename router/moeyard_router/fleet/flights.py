"""The sequences of a fleet: the output so far of each, and the rank that runs it, if any. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moeyard_router.fleet.capacity import Capacity
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.ranks import Ranks
from moeyard_worker.protocol import SamplingParams, Submit

# A sequence may be what kills its workers, so it does not get a fourth one.
MOST_DEATHS = 3


@dataclass(slots=True, kw_only=True)
class Flight:
    """A sequence that has not ended, with all that another rank needs to go on with it.

    `rank` is None while it waits; then `was_at` is the rank that it lost, if any. `listener` is the caller's mailbox,
    None once the client has left: then only the end is awaited. A sequence sent to test one rank is not `carried` to
    another. `output` are the ids that were delivered, `scored` counts the prompt tokens whose log-probabilities were.
    `pending` estimates the tokens that its rank has to compute before the next output; `num_ranks` counts the times
    that it was given to a rank. While it `pauses`, a timer sends it again. `left` are ranks that were asked to stop it
    so that another could go on with it, and have not confirmed that yet.

    `entry` is its place in the queue (fleet/waiters.py) before its first turn. It was first sent at `sent`, after it
    `waited`; `charged` are the output tokens that `key` was charged for then (fleet/fair.py).
    """

    name: str
    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    client: str | None
    listener: Any
    key: str | None = None
    entry: Entry | None = None
    sent: float = 0.0
    waited: float = 0.0
    charged: float | None = None
    carried: bool = True
    rank: int | None = None
    was_at: int | None = None
    output: list[int] = field(default_factory=list)
    scored: int = 0
    pending: int = 0
    num_ranks: int = 0
    pauses: bool = False
    deaths: int = 0
    left: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output: a rank without a cache computes them first."""
        return len(self.prompt) + len(self.output)

    @property
    def began(self) -> bool:
        """Whether another rank or connection had it before the one where it is."""
        return self.num_ranks > 1

    @property
    def unread(self) -> int:
        """Tokens of its prompt, while there is no output."""
        return 0 if self.output else len(self.prompt)

    def submit(self) -> Submit:
        """Return the message that makes a rank run it from its present state."""
        return Submit(
            request_id=self.name,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            output_token_ids=self.output,
            num_scored=self.scored,
        )


class Flights:
    """All sequences by name in order of arrival, with the counts of the fleet's `capacity` and of each rank."""

    def __init__(self, capacity: Capacity, ranks: Ranks) -> None:
        self.by_name: dict[str, Flight] = {}
        self._capacity = capacity
        self._ranks = ranks

    def enter(self, flight: Flight) -> None:
        """Take a new sequence, which waits."""
        assert flight.name not in self.by_name, f"request id {flight.name} is already in flight"
        self.by_name[flight.name] = flight
        self._capacity.entered(len(flight.prompt))

    def place(self, flight: Flight, number: int, cached_tokens: int) -> None:
        """Give a waiting sequence to a rank, whose cache may hold its first `cached_tokens`."""
        assert flight.rank is None, f"{flight.name} is at rank {flight.rank} already"
        flight.rank, flight.was_at = number, None
        flight.num_ranks += 1
        flight.pauses = False
        flight.pending = max(0, flight.num_tokens - cached_tokens)
        rank = self._ranks[number]
        rank.sequences += 1
        rank.pending += flight.pending

    def computed(self, flight: Flight) -> None:
        """Count all tokens as computed that its rank was given."""
        if flight.rank is not None:
            self._ranks[flight.rank].pending -= flight.pending
        flight.pending = 0

    def unplace(self, flight: Flight) -> None:
        """Take a sequence from its rank: it waits again."""
        if flight.rank is not None:
            self.computed(flight)
            self._ranks[flight.rank].sequences -= 1
            flight.rank, flight.was_at = None, flight.rank

    def remove(self, now: float, flight: Flight, *, ran: bool) -> None:
        """Forget a sequence that has ended; `ran` is false if its end freed no place by running."""
        unread = flight.unread
        self.unplace(flight)
        del self.by_name[flight.name]
        self._capacity.left(now, unread, ran=ran)

    def at(self, number: int) -> list[Flight]:
        """Return those at a rank."""
        return [flight for flight in self.by_name.values() if flight.rank == number]

    def died(self, number: int) -> list[Flight]:
        """Count a death for those that were at this rank; return those that have seen too many."""
        seen = [flight for flight in self.waiting() if flight.was_at == number]
        for flight in seen:
            flight.was_at = None
            flight.deaths += 1
        return [flight for flight in seen if flight.deaths >= MOST_DEATHS]

    def waiting(self) -> list[Flight]:
        """Return those without a rank that left the queue: first those with output, each in order of arrival."""
        waiting = (f for f in self.by_name.values() if f.rank is None and f.entry is None)
        return sorted(waiting, key=lambda flight: not flight.output)

    def clear(self) -> list[Flight]:
        """Forget and return all of them: the fleet itself ends them."""
        flights, self.by_name = list(self.by_name.values()), {}
        for rank in self._ranks:
            rank.sequences = rank.pending = 0
        self._capacity.cleared()
        return flights

    def validate(self) -> None:
        """Assert that counts are the sums over what is in flight, and that each sequence has exactly one state."""
        for rank in self._ranks:
            mine = self.at(rank.number)
            assert rank.sequences == len(mine), f"rank {rank.number} counts {rank.sequences} of {len(mine)} sequences"
            assert rank.pending == sum(f.pending for f in mine), f"rank {rank.number} counts {rank.pending} tokens"
            assert not (rank.lost and mine), "a lost worker runs nothing"
        unread = sum(flight.unread for flight in self.by_name.values())
        assert (self._capacity.sequences, self._capacity.unread_tokens) == (len(self.by_name), unread), "miscounted"
        for name, flight in self.by_name.items():
            assert name == flight.name
            assert flight.rank is not None or flight.listener is not None, f"{name} waits, and nobody listens"
            assert (flight.entry is None) == (flight.charged is not None), f"{name} is charged too early, or never"
            assert flight.rank is None or flight.entry is None, f"{name} is queued, and runs"
            assert flight.rank is None or not flight.pauses, f"{name} pauses, and runs"
            assert flight.rank is not None or not flight.pending, f"{name} has no rank that computes its tokens"
            assert flight.deaths < MOST_DEATHS, f"{name} goes on after {flight.deaths} workers"
