"""The sequences of a fleet: what each was told so far, which rank runs it, and those that wait for one. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moeyard_router.fleet.fair import Entry
from moeyard_router.fleet.room import Room
from moeyard_router.fleet.ticket import Ticket
from moeyard_worker.protocol import SamplingParams, Submit

# It may be what kills them: a sequence does not get a fourth worker.
MOST_DEATHS = 3


@dataclass(slots=True)
class Held:
    """What one rank has of this router: sequences without an end yet, and their tokens that are yet to be computed."""

    sequences: int = 0
    pending: int = 0


@dataclass(slots=True, kw_only=True)
class Flight:
    """A sequence that has no end yet, with all that another rank needs to go on with it.

    `rank` is None while it waits for one; then `was_at` is the rank that it lost, if any. `ticket` is None once nobody
    listens any more; then only its end is awaited. One that was sent to a rank to try that rank is not `carried` to
    another. `output` are the ids that were told, `scored` counts the prompt tokens whose log-probabilities were.
    `pending` counts the tokens that its rank is thought to have to compute before the next output; `num_ranks` the
    times that it was given to one. It `pauses` before it asks again for room. `left` are ranks that were told to stop
    it so that another could go on with it, and have not said yet that they have.

    `entry` is its place in the waiting room (fleet/waiters.py) while its first turn has not come. It was first sent at
    `sent`, after it `waited`; `charged` are the output tokens that `key` was charged for then (fleet/fair.py).
    """

    name: str
    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    client: str | None
    ticket: Ticket | None
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
        """Of prompt and output: what a rank that knows nothing of it computes first."""
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
        """The message that makes a rank run it, from where it is."""
        return Submit(
            request_id=self.name,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            output_token_ids=self.output,
            num_scored=self.scored,
        )


class Flights:
    """All of them by name, in the order in which they came, counted per rank (`held`) and in the fleet's room.

    `ended(now, flight, output)` is called for each that has ended, after so many output tokens.
    """

    def __init__(self, room: Room, num_ranks: int, *, ended: Callable[[float, Flight, int], None]) -> None:
        self.by_name: dict[str, Flight] = {}
        self.held = [Held() for _ in range(num_ranks)]
        self._room = room
        self._ended = ended

    def enter(self, flight: Flight) -> None:
        """A new one, which waits."""
        assert flight.name not in self.by_name, f"request id {flight.name} is already in flight"
        self.by_name[flight.name] = flight
        self._room.entered(len(flight.prompt))

    def place(self, flight: Flight, rank: int, cached_tokens: int) -> None:
        """One that waits gets a rank, which may know so many of its tokens."""
        assert flight.rank is None, f"{flight.name} is at rank {flight.rank} already"
        flight.rank, flight.was_at = rank, None
        flight.num_ranks += 1
        flight.pending = max(0, flight.num_tokens - cached_tokens)
        held = self.held[rank]
        held.sequences += 1
        held.pending += flight.pending

    def computed(self, flight: Flight) -> None:
        """Its rank has computed all it was given."""
        if flight.rank is not None:
            self.held[flight.rank].pending -= flight.pending
        flight.pending = 0

    def unplace(self, flight: Flight) -> None:
        """It waits again."""
        if flight.rank is not None:
            self.computed(flight)
            self.held[flight.rank].sequences -= 1
            flight.rank, flight.was_at = None, flight.rank

    def leave(self, now: float, flight: Flight, *, ran: bool, output: int | None = None) -> None:
        """It has ended; `ran` false: without having made room by running (`Room.left`).

        `output` counts its tokens, if more is known of them than what was told.
        """
        unread = flight.unread
        self.unplace(flight)
        del self.by_name[flight.name]
        self._room.left(now, unread, ran=ran)
        self._ended(now, flight, len(flight.output) if output is None else output)

    def release(self, now: float, rank: int) -> list[Flight]:
        """A rank cannot be reached: what ran there waits, what nobody listens to is gone; returned is what ends."""
        for flight in self.by_name.values():
            flight.left -= {rank}
        there = [flight for flight in self.by_name.values() if flight.rank == rank]
        for flight in there:
            if flight.ticket is None:
                self.leave(now, flight, ran=False)
            else:
                self.unplace(flight)
        return [flight for flight in there if flight.ticket is not None and not flight.carried]

    def died(self, rank: int) -> list[Flight]:
        """A rank that was released had died: returned is what has seen too many do so."""
        seen = [flight for flight in self.waiting() if flight.was_at == rank]
        for flight in seen:
            flight.was_at = None
            flight.deaths += 1
        return [flight for flight in seen if flight.deaths >= MOST_DEATHS]

    def waiting(self) -> list[Flight]:
        """Those without a rank whose turn had come: first those with output, each in the order in which they came."""
        waiting = (f for f in self.by_name.values() if f.rank is None and f.entry is None)
        return sorted(waiting, key=lambda flight: not flight.output)

    def resize(self, num_ranks: int) -> None:
        """There are so many ranks now; those that are gone were released."""
        assert all(not held.sequences for held in self.held[num_ranks:]), "a rank went with its sequences"
        del self.held[num_ranks:]
        self.held += [Held() for _ in range(num_ranks - len(self.held))]

    def clear(self, now: float) -> None:
        """All have ended at once, for the fleet's own reasons."""
        flights, self.by_name = self.by_name, {}
        for flight in flights.values():
            self._ended(now, flight, len(flight.output))
        for held in self.held:
            held.sequences = held.pending = 0
        self._room.cleared()

    def validate(self) -> None:
        """Assert that the counts are the sums over what is in flight, and that tickets know what is theirs."""
        for rank, held in enumerate(self.held):
            mine = [f for f in self.by_name.values() if f.rank == rank]
            assert held.sequences == len(mine), f"rank {rank} counts {held.sequences} of {len(mine)} sequences"
            assert held.pending == sum(f.pending for f in mine), f"rank {rank} counts {held.pending} tokens"
        unread = sum(flight.unread for flight in self.by_name.values())
        assert (self._room.sequences, self._room.unread_tokens) == (len(self.by_name), unread), "room is miscounted"
        for name, flight in self.by_name.items():
            assert flight.ticket is None or flight.ticket.runs(flight.index, name), f"{name} is nobody's"
            assert flight.rank is not None or flight.ticket is not None, f"{name} waits for nobody"
            assert (flight.entry is None) == (flight.charged is not None), (
                f"{name} is charged before its turn, or never"
            )
            assert flight.rank is None or flight.entry is None, f"{name} waits for its turn, and runs"
            assert flight.rank is not None or not flight.pending, f"{name} is computed by nobody"
            assert flight.deaths < MOST_DEATHS, f"{name} goes on after {flight.deaths} workers"
