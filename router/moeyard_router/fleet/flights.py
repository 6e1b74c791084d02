"""The sequences of a fleet, each with its output so far and the rank that runs it, if any. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moeyard_router.fleet.capacity import Capacity
from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.ranks import Ranks
from moeyard_worker.protocol import SamplingParams, Submit

# A sequence that may be the cause of three lost workers does not get a fourth one.
MOST_DEATHS = 3


@dataclass(slots=True, kw_only=True)
class Flight:
    """A sequence that has not ended, with everything that another rank needs to continue it.

    listener: the caller's mailbox. None once the client has left; then only the end is awaited.
    key: the API key that pays. `entry`: its place in the queue before its first start (fleet/waiters.py).
    sent, waited: time of its first start, and its wait before that, in monotonic seconds.
    charged: the output tokens that `key` was charged at its start (fleet/fair.py).
    carried: whether it continues on another rank after a loss. A sequence that tests a rank does not.
    rank: its rank, None while it waits. `was_at`: then the rank that it lost, if any.
    output, scored, routed: the delivered ids, the number of prompt tokens with delivered log-probabilities, and the
        position up to which the prompt's experts are delivered.
    pending: estimate of the tokens that its rank computes before the next output.
    num_ranks: how often it was sent to a rank. `deaths`: how many workers were lost while they ran it.
    pauses: whether a timer will send it again.
    names: those by which its client may end the request.
    left: ranks that were asked to abort it, so that another could continue it, and have not confirmed.
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
    routed: int = 0
    pending: int = 0
    num_ranks: int = 0
    pauses: bool = False
    deaths: int = 0
    names: frozenset[str] = frozenset()
    left: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, which a rank without a cache computes first."""
        return len(self.prompt) + len(self.output)

    @property
    def began(self) -> bool:
        """Whether it ran on another rank or connection before the present one."""
        return self.num_ranks > 1

    @property
    def unread(self) -> int:
        """Tokens of its prompt, 0 once there is output."""
        return 0 if self.output else len(self.prompt)

    def submit(self) -> Submit:
        """Return the message that lets a rank run it from its present state."""
        return Submit(
            request_id=self.name,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            output_token_ids=self.output,
            num_scored=self.scored,
            num_routed=self.routed,
        )


class Flights:
    """All sequences by name, in order of arrival. Keeps the counts of the fleet's `capacity` and of each rank."""

    def __init__(self, capacity: Capacity, ranks: Ranks) -> None:
        self.by_name: dict[str, Flight] = {}
        self._capacity = capacity
        self._ranks = ranks

    def enter(self, flight: Flight) -> None:
        """Add a new, waiting sequence."""
        assert flight.name not in self.by_name, f"request id {flight.name} is already in flight"
        self.by_name[flight.name] = flight
        self._capacity.entered(len(flight.prompt))

    def place(self, flight: Flight, number: int, cached_tokens: int) -> None:
        """Place a waiting sequence on a rank, whose cache may hold its first `cached_tokens`."""
        assert flight.rank is None, f"{flight.name} is at rank {flight.rank} already"
        flight.rank, flight.was_at = number, None
        flight.num_ranks += 1
        flight.pauses = False
        flight.pending = max(0, flight.num_tokens - cached_tokens)
        rank = self._ranks[number]
        rank.sequences += 1
        rank.pending += flight.pending

    def computed(self, flight: Flight) -> None:
        """Count all its pending tokens as computed."""
        if flight.rank is not None:
            self._ranks[flight.rank].pending -= flight.pending
        flight.pending = 0

    def unplace(self, flight: Flight) -> None:
        """Remove a sequence from its rank, so that it waits again."""
        if flight.rank is not None:
            self.computed(flight)
            self._ranks[flight.rank].sequences -= 1
            flight.rank, flight.was_at = None, flight.rank

    def remove(self, now: float, flight: Flight, *, ran: bool) -> None:
        """Forget an ended sequence. `ran`: whether it ran to its end, which counts for the rate of ends."""
        unread = flight.unread
        self.unplace(flight)
        del self.by_name[flight.name]
        self._capacity.left(now, unread, ran=ran)

    def at(self, number: int) -> list[Flight]:
        """Return the sequences on a rank."""
        return [flight for flight in self.by_name.values() if flight.rank == number]

    def died(self, number: int) -> list[Flight]:
        """Count a death for the sequences that were on this rank. Return those with too many deaths."""
        lost = [flight for flight in self.waiting() if flight.was_at == number]
        for flight in lost:
            flight.was_at = None
            flight.deaths += 1
        return [flight for flight in lost if flight.deaths >= MOST_DEATHS]

    def waiting(self) -> list[Flight]:
        """Return started sequences without a rank: first those with output, each group in order of arrival."""
        waiting = (f for f in self.by_name.values() if f.rank is None and f.entry is None)
        return sorted(waiting, key=lambda flight: not flight.output)

    def clear(self) -> list[Flight]:
        """Forget and return all sequences, because the fleet itself ends them."""
        flights, self.by_name = list(self.by_name.values()), {}
        for rank in self._ranks:
            rank.sequences = rank.pending = 0
        self._capacity.cleared()
        return flights

    def validate(self) -> None:
        """Assert that counts are sums over the sequences in flight, and that each sequence has exactly one state."""
        for rank in self._ranks:
            mine = self.at(rank.number)
            assert rank.sequences == len(mine), f"rank {rank.number} counts {rank.sequences} of {len(mine)} sequences"
            assert rank.pending == sum(f.pending for f in mine), f"rank {rank.number} counts {rank.pending} tokens"
            assert not (rank.lost and mine), "a lost worker runs nothing"
        unread = sum(flight.unread for flight in self.by_name.values())
        assert (self._capacity.sequences, self._capacity.unread_tokens) == (len(self.by_name), unread), "miscounted"
        for name, flight in self.by_name.items():
            assert name == flight.name
            assert flight.rank is not None or flight.listener is not None, f"{name} waits without a listener"
            assert (flight.entry is None) == (flight.charged is not None), f"{name} is charged too early, or never"
            assert flight.rank is None or flight.entry is None, f"{name} is queued, and runs"
            assert flight.rank is None or not flight.pauses, f"{name} pauses, and runs"
            assert flight.rank is not None or not flight.pending, f"{name} has no rank that computes its tokens"
            assert flight.deaths < MOST_DEATHS, f"{name} goes on after {flight.deaths} workers"
