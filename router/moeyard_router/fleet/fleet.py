"""The workers as one thing: who runs what, the end of every sequence, and the fleet's health.

With expert parallelism every rank is needed by every token, so while one is missing the fleet recovers: nothing runs,
and nothing is lost. What ran on the missing rank waits, with all that its clients were told, and goes on from there
wherever there is room once every rank is ready again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.dispatch import Dispatch
from moeyard_router.fleet.draining import Draining
from moeyard_router.fleet.flights import Flight, Flights
from moeyard_router.fleet.link import Message
from moeyard_router.fleet.loads import LoadsReader
from moeyard_router.fleet.members import MemberEvents, Members
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.recent import RecentRequests
from moeyard_router.fleet.recovery import Recovery
from moeyard_router.fleet.replies import Replies
from moeyard_router.fleet.room import Room
from moeyard_router.fleet.ticket import Lost, Ticket
from moeyard_router.fleet.waiters import Waiters
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Rejected, SamplingParams

_WAITS = Route(rank=None, reason="waits")


class Fleet:
    """Owner of the connections to all workers. Lives in one event loop; `start` it there and `close` it there.

    `on_lost(rank, reason)` is called in the loop, once for every worker that does not come back by itself; whoever can
    start another in its place then calls `replace`, or `give_up`. With a `recovery_timeout` of 0 it is called once, and
    all that is in flight ends.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[int, str], None] = lambda rank, reason: None,
    ) -> None:
        self.config = config
        self.generation = 0  # counts the times that workers were replaced
        self.failure: str | None = None
        self.given_up = False
        self.stopping: str | None = None
        self.recent = RecentRequests()
        self.loads = LoadsReader(lambda: [w.link for w in self._members.workers if w.state == "ready"])
        self._recovers = config.recovery_timeout > 0
        self._metrics = metrics
        self._on_change = on_change
        self._on_lost = on_lost
        room = self._room = Room(time.monotonic(), config.most_inflight(len(config.workers)), config.max_waiting_tokens)
        self.waiters = Waiters(config, metrics, drain=self._drain, refuse=self._end_here)
        self._flights = Flights(room, len(config.workers), ended=self.waiters.ended)
        events = MemberEvents(
            changed=self._changed, messages=self._take, apart=self._apart, lost=self._lost, unfit=self.fail
        )
        self._members = Members(config, self._flights, events)
        self._dispatch = Dispatch(
            self._members, self._flights, self.waiters, prefix_caching=config.prefix_caching, waits=self._wait
        )
        self._recovery = Recovery(config.recovery_timeout, metrics, self.fail, was_whole=config.restarted)
        self.incidents = self._recovery.incidents
        self.read = self._dispatch.read
        self.drain = Draining(self._dispatch, self._recovery, self._changed).take
        self._replies = Replies(
            self._members, self._flights, self._recovery, self.waiters, room=room, loads=self.loads,
            recovers=self._recovers, left=self._count, settle=self._settle, again=self._dispatch.again,
        )  # fmt: skip

    def start(self) -> None:
        """Begin to connect to every worker; raises `ValueError` for an unusable endpoint."""
        self._members.start()
        self._changed()

    def replace(self, addresses: tuple[WorkerAddress, ...], facts: Mapping[str, Any] | None = None) -> None:
        """Go on with these workers, some of which may be new; raises `ValueError` as `start`.

        Workers that keep their endpoint, and are there, keep their sequences; those of the others go on once all are
        ready. `facts` are what the launcher knows of the incident.
        """
        if self.given_up:
            return
        if not self._recovers:
            self.end_all(self.failure or "the workers were started again")
        self.failure = None
        new = self._members.replace(addresses)
        self.waiters.resize(len(addresses), self._room)
        if self._recovers and (new or not self._recovery.is_whole):
            self._wait("workers were replaced")
        self._dispatch.forget(new)
        self.generation += 1
        if facts is not None:
            self.incidents.note(facts)
        self._settle()
        self._changed()

    def close(self) -> None:
        """End everything in flight and close all sockets."""
        self.stop("the router has stopped")
        self.given_up = True
        self._recovery.fail("the router has stopped")
        self.end_all("the router has stopped")
        self._members.close()

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Of the workers in use, by rank."""
        return self._members.addresses

    @property
    def last_progress(self) -> float | None:
        """Monotonic seconds of the latest sign that a step ran."""
        return self._replies.last_progress

    @property
    def num_inflight(self) -> int:
        """Sequences without an end, aborted ones included until their worker says that they have ended."""
        return len(self._flights.by_name)

    def unavailable(self) -> str | None:
        """Why nothing runs now, or None."""
        if self.failure is not None:
            return f"the fleet has failed: {self.failure}"
        if self.stopping is not None:
            return self.stopping
        if self._recovery.reason is not None:
            return f"recovering: {self._recovery.reason}"
        return self._members.unready()

    def _refuses(self, rank: int | None) -> str | None:
        """Why a request (for `rank`, unless it is None) cannot even wait here."""
        if self.failure is None and self.stopping is None and self._recovers and self._recovery.was_whole:
            ready = rank is None or [w.state for w in self._members.workers[rank : rank + 1]] == ["ready"]
            return None if ready else f"worker {rank} is not ready"
        return self.unavailable()

    def submit(
        self,
        request_id: str,
        sequences: list[tuple[Sequence[int], SamplingParams]],
        *,
        client: str | None = None,
        key: str | None = None,
        rank: int | None = None,
    ) -> Ticket:
        """Take sequences (prompt ids, sampling) for the ranks that the policy chooses for `client`, or all for `rank`.

        They wait here until a rank has room and the fleet is whole; `key` names whose turn it is then
        (fleet/waiting.py). Those for a `rank` try it: they do not wait, need no room, and end if that one is lost.
        Raises `ApiError` 503 if the fleet cannot run them and 429 if it is full; then none was taken.
        """
        problem = self._refuses(rank)
        if problem is not None:
            reason = "fleet_failed" if self.failure is not None else "not_ready"
            raise ApiError(503, problem, reason=reason)
        now, count, tokens = time.monotonic(), len(sequences), sum(len(prompt) for prompt, _ in sequences)
        if rank is None:
            self.waiters.check(key, count)
            self.waiters.displace(now, key, until=lambda: self._room.fits(count, tokens))
            self._room.check(now, count, tokens)
        ticket = Ticket(self.abandon, self._replies.announced.append)
        flights = [
            Flight(
                name=f"{request_id}-{index}", index=index, prompt=prompt, sampling=sampling, client=client,
                key=key, ticket=ticket, carried=rank is None,
            )
            for index, (prompt, sampling) in enumerate(sequences)
        ]  # fmt: skip
        for flight in flights:
            self._flights.enter(flight)
            ticket.opened(flight.index, flight.name, _WAITS)
        self._dispatch.take(now, flights, rank, whole=self._recovery.is_whole)
        self._count()
        return ticket

    def _take(self, rank: int, messages: list[Message]) -> None:
        self._replies.take(rank, messages)
        if self.waiters.num_sequences:
            self._drain()

    def _drain(self) -> None:
        """Who waits for a turn goes to the workers, while these have room."""
        if self._recovery.is_whole:
            self._dispatch.drain()
            self._count()

    def abandon(self, request_id: str) -> None:
        """Stop listening to a sequence and tell its worker to stop it. Unknown ids are ignored."""
        flight = self._flights.by_name.get(request_id)
        if flight is None or flight.ticket is None:
            return
        flight.ticket = None
        self._dispatch.abort(flight)
        if flight.rank is None:
            self._flights.leave(time.monotonic(), flight, ran=False)
            self._count()

    def stop(self, reason: str) -> None:
        """Take no more requests; those in flight go on."""
        if self.stopping is None:
            self.stopping = reason
            self._changed()

    def end_all(self, reason: str) -> None:
        """End everything in flight with a named error, and tell the workers that still listen."""
        now = time.monotonic()
        for flight in list(self._flights.by_name.values()):
            if flight.ticket is not None:
                self._dispatch.abort(flight)
                flight.ticket.put(now, flight.index, Lost(reason))
        self._flights.clear(now)
        self._count()

    def fail(self, reason: str) -> None:
        """The fleet is lost, until it is whole again or others take its workers' places. The first reason stays."""
        if self.failure is None:
            self.failure = reason
            self._recovery.begin(reason)  # whoever gives up may know more than was heard here
            self._recovery.fail(reason)
            self.end_all(reason)
            self._changed()

    def give_up(self, reason: str) -> None:
        """The same for good: nothing will recover."""
        self.given_up = True
        self.fail(reason)

    def describe(self) -> dict[str, Any]:
        """State of the fleet and of each rank, for people and dashboards."""
        return {
            "failure": self.failure,
            "stopping": self.stopping,
            "recovering": self._recovery.reason,
            "inflight": self.num_inflight,
            "waiting": len(self._flights.waiting()) + self.waiters.num_sequences,
            "workers": [worker.describe() for worker in self._members.workers],
        }

    def validate(self) -> None:
        """Assert that everything is counted, and that what waits is waited for."""
        self._flights.validate()
        self.waiters.validate(self._flights.by_name.values())
        self._recovery.validate()
        assert self.failure is None or not self.num_inflight, "a failed fleet has nothing in flight"
        waiting = [f for f in self._flights.waiting() if not f.pauses]
        waits_turn = self.waiters.num_sequences and not self._members.any_usable()
        assert self._recovery.reason is not None or not (waiting or waits_turn), "nobody would ever run what waits"
        assert all(not w.lost or not w.held.sequences for w in self._members.workers), "a lost worker runs nothing"

    def _changed(self) -> None:
        self._metrics.set_workers([w.shown for w in self._members.workers])
        self._on_change()

    def _count(self) -> None:
        self._metrics.inflight.set(self.num_inflight - self.waiters.num_sequences)

    def _wait(self, reason: str, lost: int | None = None) -> None:
        """Requests wait for the fleet to be whole; where there is no recovery it has failed."""
        if not self._recovers:
            self.fail(reason)
        elif self.failure is None:
            self.waiters.hold(time.monotonic())
            self._recovery.begin(reason, lost)

    def _apart(self, rank: int | None, reason: str) -> None:
        """What ran on a rank does so no more (None: all still runs), and it may be back."""
        self._wait(reason)
        if rank is not None:
            self._release(rank, reason)
        self._changed()

    def _lost(self, rank: int, reason: str, died: bool, replaced: bool) -> None:
        """A worker is lost, or replaced."""
        told = replaced or (self.failure is not None and not self._recovers)
        if self._recovers or not replaced:
            self._wait(reason, rank)
        self._release(rank, reason)
        for flight in self._flights.died(rank) if died else ():
            why = f"{flight.deaths} workers were lost while they ran this request: {reason}"
            self._end_here(time.monotonic(), flight, Lost(why))
        self._changed()
        if not told:
            self._on_lost(rank, reason)

    def _release(self, rank: int, reason: str) -> None:
        """What ran on a rank waits, but for what must not; that ends."""
        now = time.monotonic()
        for flight in self._flights.release(now, rank):
            self._end_here(now, flight, Lost(reason))
        self._count()

    def _end_here(self, now: float, flight: Flight, event: Lost | Rejected) -> None:
        """End it for another reason than its rank's word."""
        self._flights.leave(now, flight, ran=False)
        self._count()
        if flight.ticket is not None:
            flight.ticket.put(now, flight.index, event)

    def _settle(self) -> None:
        """If every worker is ready, what waits goes on."""
        over = self.given_up or (self.failure is not None and not self._recovers)
        if over or self._recovery.is_whole or self._members.unready() is not None:
            return
        self.failure = None
        waiting = self._flights.waiting()
        self._dispatch.resume(waiting)
        self._recovery.end(waiting, expects_output=any(f.carried for f in self._flights.by_name.values()))
        self.waiters.resume(time.monotonic())
        self._drain()
        self._changed()
