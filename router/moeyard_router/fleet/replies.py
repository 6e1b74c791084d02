"""What workers say of sequences: in order to whom it concerns, until the end."""

import time
from collections.abc import Callable
from dataclasses import replace

from moeyard_router.fleet.flights import Flight, Flights
from moeyard_router.fleet.link import Message
from moeyard_router.fleet.loads import LoadsReader
from moeyard_router.fleet.members import Members
from moeyard_router.fleet.recovery import Recovery
from moeyard_router.fleet.room import Room
from moeyard_router.fleet.ticket import Ticket
from moeyard_router.fleet.waiters import Waiters
from moeyard_worker.protocol import Done, PromptLogprobs, Rejected, Snapshot, Tokens

# A carried sequence that found a full queue asks again: its client was let in long ago.
_PAUSE_SECONDS = 0.25


class Replies:
    """Takes the messages of all ranks. `last_progress`: monotonic seconds of the latest sign that a step ran.
    `announced`: tickets that want to be called when the messages at hand are delivered.

    It calls `left` when a sequence has left, `settle` when a worker's state may have changed, and `again` for a
    sequence that its rank will not run, with the seconds after which another rank may.
    """

    def __init__(
        self,
        members: Members,
        flights: Flights,
        recovery: Recovery,
        waiters: Waiters,
        *,
        room: Room,
        loads: LoadsReader,
        recovers: bool,
        left: Callable[[], None],
        settle: Callable[[], None],
        again: Callable[[Flight, float], None],
    ) -> None:
        self.last_progress: float | None = None
        self.announced: list[Ticket] = []
        self._members = members
        self._flights = flights
        self._incidents = recovery.incidents
        self._waiters = waiters
        self._room = room
        self._loads = loads
        self._recovers = recovers
        self._left = left
        self._settle = settle
        self._again = again

    def take(self, rank: int, messages: list[Message]) -> None:
        """Take messages of a rank, in order."""
        now = time.monotonic()
        for message in messages:
            if isinstance(message, Tokens):
                self._tokens(now, rank, message)
            elif isinstance(message, Done | Rejected):
                self._end(now, rank, message)
            elif isinstance(message, PromptLogprobs):
                self._scores(now, rank, message)
            elif isinstance(message, Snapshot):
                if self._members.take(rank, message):
                    self.last_progress = now
                self._settle()
            elif not self._loads.take(rank, message):
                self._members.lose(rank, f"worker {rank} broke the protocol: it sent a {message.type} message")
        for ticket in self.announced:
            ticket.read()
        self.announced.clear()

    def _tokens(self, now: float, rank: int, message: Tokens) -> None:
        self.last_progress = now
        flight = self._flights.by_name.get(message.request_id)
        if flight is None or flight.rank != rank or flight.ticket is None or not message.token_ids:
            return  # late words of a sequence that has ended here, or runs elsewhere
        output = flight.output
        if message.start != len(output):
            reason = (
                f"worker {rank} broke the protocol: request {message.request_id} has {len(output)} tokens, the next "
                f"ones start at {message.start}"
            )
            self._members.lose(rank, reason)
            return
        if not output:
            self._room.read(now, len(flight.prompt))
            if not flight.waited and not flight.began:
                self._waiters.answered(now, now - flight.sent)
        if flight.pending:
            self._flights.computed(flight)
        output.extend(message.token_ids)
        flight.ticket.put(now, flight.index, message)
        if self._incidents.silent is not None and flight.carried:
            self._incidents.output(now)

    def _scores(self, now: float, rank: int, message: PromptLogprobs) -> None:
        self.last_progress = now
        flight = self._flights.by_name.get(message.request_id)
        if flight is not None and flight.rank == rank and flight.ticket is not None:
            flight.scored += len(message.logprobs)
            flight.ticket.put(now, flight.index, message)

    def _end(self, now: float, rank: int, message: Done | Rejected) -> None:
        flight = self._flights.by_name.get(message.request_id)
        if flight is not None and rank in flight.left:
            flight.left -= {rank}
            return
        if flight is None or flight.rank != rank or self._goes_on(rank, flight, message):
            return
        if isinstance(message, Done):
            self._flights.leave(now, flight, ran=True, output=message.completion_tokens)
            message = replace(message, queue_seconds=message.queue_seconds + flight.waited)
        else:
            self._flights.leave(now, flight, ran=False)
        self._left()
        if isinstance(message, Rejected) and message.reason in ("queue_full", "queue_timeout"):
            # A worker cannot know when the fleet will have room again.
            message = replace(message, retry_after=self._room.wait(now, 1))
        if flight.ticket is not None:
            flight.ticket.put(now, flight.index, message)

    def _goes_on(self, rank: int, flight: Flight, message: Done | Rejected) -> bool:
        """Whether a worker's last word on a sequence tells of the worker's end or want of room, not the sequence's."""
        if not self._recovers or flight.ticket is None or not flight.carried:
            return False
        stopping = self._members.workers[rank].state == "stopping"
        if isinstance(message, Done):
            goes_on = stopping and message.finish_reason == "abort"
        elif message.reason == "fleet_failed" and not stopping:
            self._members.lose(rank, f"worker {rank} failed: {message.message}")
            return True
        else:
            goes_on = stopping or (message.reason == "queue_full" and flight.began)
        if goes_on:
            self._again(flight, 0.0 if stopping else _PAUSE_SECONDS)
        return goes_on
