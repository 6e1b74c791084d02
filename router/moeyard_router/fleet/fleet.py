"""The workers as one thing: connections, who runs what, the end of every sequence, and the fleet's health.

With expert parallelism every rank is needed by every token, so one lost worker ends the fleet: sequences in flight get
a named failure at once, new ones are refused with it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.flight import Flight
from moeyard_router.fleet.link import LinkEvents, Message, WorkerLink
from moeyard_router.fleet.loads import LoadsReader
from moeyard_router.fleet.placement import Placement
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.recent import RecentRequests
from moeyard_router.fleet.room import Room
from moeyard_router.fleet.ticket import Lost, Ticket
from moeyard_router.fleet.waiters import Order, Waiters
from moeyard_router.fleet.worker_state import WorkerState, any_room, fault_of, loads
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Abort, Done, PromptLogprobs, Rejected, SamplingParams, Snapshot, Submit, Tokens


class Fleet:
    """Owner of the connections to all workers. Lives in one event loop; `start` it there and `close` it there."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.addresses = config.workers
        self.generation = 0  # counts the workers' replacements
        self.failure: str | None = None
        self.stopping: str | None = None
        self.last_progress: float | None = None  # monotonic seconds of the latest sign that a step ran
        self.recent = RecentRequests()
        self.loads = LoadsReader(lambda: [w.link for w in self._workers if w.state == "ready"])
        self._metrics = metrics
        self._on_change = on_change
        self._on_failed = on_failed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers: list[WorkerState] = []
        self._flights: dict[str, Flight] = {}
        self._room = Room(time.monotonic(), config.max_inflight, config.max_waiting_tokens)
        self.waiters = Waiters(config, metrics, drain=self._drain, left=self._room.withdrawn)
        self._placement = Placement(len(config.workers), prefix_caching=config.prefix_caching)

    def start(self) -> None:
        """Begin to connect to every worker; raises `ValueError` for an unusable endpoint."""
        events = LinkEvents(up=self._up, messages=self._receive, lost=self._lost)
        for address in self.addresses:
            link = WorkerLink(address, context=self._context, step_deadline=self.config.step_deadline, events=events)
            self._workers.append(WorkerState(link))
            link.open()
        self._changed()

    def replace(self, addresses: tuple[WorkerAddress, ...]) -> None:
        """Go on with workers that were started in the place of these, failed or not; raises `ValueError` as `start`.

        What is still in flight ends with a named error.
        """
        assert len(addresses) == len(self.addresses), f"{len(addresses)} workers in the place of {len(self.addresses)}"
        self.end_all(self.failure or "the workers were started again")
        for worker in self._workers:
            worker.link.close()
        self._workers = []
        self.addresses, self.failure = addresses, None
        self._placement.forget()
        self.generation += 1
        self.start()

    def close(self) -> None:
        """End everything in flight and close all sockets."""
        self.stop("the router has stopped")
        self.end_all("the router has stopped")
        for worker in self._workers:
            worker.link.close()
        self._context.destroy(linger=0)

    @property
    def num_inflight(self) -> int:
        """Sequences that wait or are at the workers, aborted ones included until their worker says that they ended."""
        return len(self._flights) + self.waiters.num_sequences

    def unavailable(self) -> str | None:
        """Why no request can be taken now, or None."""
        if self.failure is not None:
            return f"the fleet has failed: {self.failure}"
        if self.stopping is not None:
            return self.stopping
        for worker in self._workers:
            if worker.state != "ready":
                what = "is not connected yet" if worker.state == "connecting" else f"is {worker.state}"
                return f"worker {worker.link.rank} at {worker.link.endpoint} {what}"
        return None

    async def read(self, prompts: Iterable[Sequence[int]]) -> None:
        """What `submit` wants to know of prompts, one in a turn of the event loop: a long one takes half a ms."""
        known = loads(self._workers)
        for prompt in prompts if known and self.config.prefix_caching else ():
            self._placement.read(prompt, known[0].page_size)
            await asyncio.sleep(0)

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

        They wait here until a rank has room; `key` names whose turn it is then (fleet/waiting.py). Those for a `rank`
        do not wait. Raises `ApiError` 503 if the fleet cannot run them and 429 if it is full; then none is taken.
        """
        problem = self.unavailable()
        if problem is not None:
            raise ApiError(503, problem, reason="not_ready" if self.failure is None else "fleet_failed")
        now = time.monotonic()
        order = Order(request_id, list(sequences), client, Ticket(self.abandon))
        tokens = sum(len(prompt) for prompt, _ in sequences)
        if rank is None:
            self.waiters.check(key, len(sequences))
            self.waiters.displace(now, key, until=lambda: self._room.fits(len(sequences), tokens))
        self._room.check(now, len(sequences), tokens)
        for prompt, _ in sequences:
            self._room.entered(len(prompt))
        if rank is None and (self.waiters.num_sequences or not any_room(self._workers, self.waiters.worker_places)):
            self.waiters.push(now, key, order)
        else:
            self._send(now, key, order, rank=rank)
        return order.ticket

    def _drain(self) -> None:
        """Send who waits to the workers while these have room."""
        now = time.monotonic()
        while any_room(self._workers, self.waiters.worker_places) and (entry := self.waiters.first()) is not None:
            self.waiters.start(now, entry)
            self._send(now, entry.key, entry.load, waited=now - entry.since)

    def _send(self, now: float, key: str | None, order: Order, *, rank: int | None = None, waited: float = 0.0) -> None:
        """Send what is left of a request to ranks with room, or to `rank`."""
        for index, sequence in enumerate(order.sequences):
            if sequence is None:
                continue
            prompt, sampling = sequence
            known = loads(self._workers, self.waiters.worker_places)
            asked = None if rank is None else Route(rank=rank, reason="asked")
            route = asked or self._placement.choose(known, prompt, client=order.client)
            worker, name = self._workers[route.rank], order.name(index)
            assert name not in self._flights, f"request id {name} is already in flight"
            charged = self.waiters.started(now, key, len(prompt), sampling.max_tokens)
            flight = self._flights[name] = Flight(
                rank=route.rank, prompt=len(prompt), pending=len(prompt) - route.cached_tokens, index=index,
                ticket=order.ticket, key=key, charged=charged, sent=now, waited=waited,
            )  # fmt: skip
            order.ticket.opened(index, name, route)
            worker.own += 1
            worker.pending += flight.pending
            worker.link.send(Submit(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        self._metrics.inflight.set(len(self._flights))

    def abandon(self, request_id: str) -> None:
        """Stop listening to a sequence and tell its worker to stop it. Unknown ids are ignored."""
        flight = self._flights.get(request_id)
        if flight is None:
            self.waiters.abandon(time.monotonic(), request_id)
        elif flight.ticket is not None:
            flight.ticket = None
            self._workers[flight.rank].link.send(Abort(request_id=request_id))

    def stop(self, reason: str) -> None:
        """Take no more requests; those in flight go on."""
        if self.stopping is None:
            self.stopping = reason
            self._changed()

    def end_all(self, reason: str) -> None:
        """End everything in flight with a named error, and tell the workers that still listen."""
        now = time.monotonic()
        flights, self._flights = self._flights, {}
        self.waiters.end_all(now, reason)
        self._room.cleared()
        for request_id, flight in flights.items():
            self.waiters.ended(flight.key, flight.charged, flight.received)
            worker = self._workers[flight.rank]
            worker.own = worker.pending = 0
            if flight.ticket is not None:
                worker.link.send(Abort(request_id=request_id))
                flight.ticket.put(now, flight.index, Lost(reason))
        self._metrics.inflight.set(0)

    def fail(self, reason: str) -> None:
        """A rank is lost, and with it the fleet. The first reason stays."""
        if self.failure is not None:
            return
        self.failure = reason
        self.end_all(reason)
        self._changed()
        self._on_failed(reason)

    def describe(self) -> dict[str, Any]:
        """State of the fleet and of each rank, for people and dashboards."""
        ranks = [worker.describe() for worker in self._workers]
        counts = {"inflight": self.num_inflight, "waiting": self.waiters.num_sequences, "workers": ranks}
        return {"failure": self.failure, "stopping": self.stopping, **counts}

    def validate(self) -> None:
        """Assert that the counts per worker are the sums over what is in flight, and tickets know what is theirs."""
        for worker in self._workers:
            mine = [f for f in self._flights.values() if f.rank == worker.link.rank]
            assert worker.own == len(mine), f"rank {worker.link.rank} counts {worker.own} of {len(mine)} sequences"
            assert worker.pending == sum(f.pending for f in mine)
        unread = self.waiters.validate() + sum(f.prompt for f in self._flights.values() if not f.received)
        assert (self._room.sequences, self._room.unread_tokens) == (self.num_inflight, unread), "room is miscounted"
        for name, flight in self._flights.items():
            assert flight.ticket is None or flight.ticket.runs(flight.index, name), f"{name} is nobody's"
        assert self.failure is None or not self._flights, "a failed fleet has nothing in flight"

    def _changed(self) -> None:
        self._metrics.set_workers([w.state for w in self._workers])
        self._on_change()

    def _up(self, rank: int) -> None:
        self._workers[rank].connected = True
        self._changed()

    def _lost(self, rank: int, reason: str) -> None:
        self._workers[rank].lost = True
        self._workers[rank].link.close()
        self.fail(reason)
        self._changed()

    def _receive(self, rank: int, messages: list[Message]) -> None:
        now = time.monotonic()
        for message in messages:
            if isinstance(message, Tokens):
                self._tokens(now, rank, message)
            elif isinstance(message, Done | Rejected):
                self._end(now, rank, message)
            elif isinstance(message, PromptLogprobs):
                self._scores(now, rank, message)
            elif isinstance(message, Snapshot):
                self._snapshot(now, rank, message)
            elif not self.loads.take(rank, message):
                self.fail(f"worker {rank} broke the protocol: it sent a {message.type} message")
        if self.waiters.num_sequences:
            self._drain()

    def _tokens(self, now: float, rank: int, message: Tokens) -> None:
        self.last_progress = now
        flight = self._flights.get(message.request_id)
        if flight is None or flight.rank != rank or flight.ticket is None or not message.token_ids:
            return  # late words of a sequence that has ended here
        if message.start != flight.received:
            what = f"request {message.request_id} has {flight.received} tokens, the next ones start at {message.start}"
            self.fail(f"worker {rank} broke the protocol: {what}")
            return
        if not flight.received:
            self._computed(flight)
            self._room.read(now, flight.prompt)
            if not flight.waited:
                self.waiters.answered(now, now - flight.sent)
        flight.received += len(message.token_ids)
        flight.ticket.put(now, flight.index, message)

    def _computed(self, flight: Flight) -> None:
        self._workers[flight.rank].pending -= flight.pending
        flight.pending = 0

    def _scores(self, now: float, rank: int, message: PromptLogprobs) -> None:
        self.last_progress = now
        flight = self._flights.get(message.request_id)
        if flight is not None and flight.rank == rank and flight.ticket is not None:
            flight.ticket.put(now, flight.index, message)

    def _end(self, now: float, rank: int, message: Done | Rejected) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None or flight.rank != rank:
            return
        del self._flights[message.request_id]
        worker = self._workers[rank]
        worker.own -= 1
        self._computed(flight)
        self._metrics.inflight.set(len(self._flights))
        self._room.left(now, 0 if flight.received else flight.prompt, ran=isinstance(message, Done))
        if isinstance(message, Done):
            self.waiters.ended(flight.key, flight.charged, message.completion_tokens)
            message = replace(message, queue_seconds=message.queue_seconds + flight.waited)
        else:
            self.waiters.ended(flight.key, flight.charged, 0)
            if message.reason in ("queue_full", "queue_timeout"):  # a worker cannot know when there will be room again
                message = replace(message, retry_after=self._room.wait(now, 1))
        if flight.ticket is not None:
            flight.ticket.put(now, flight.index, message)

    def _snapshot(self, now: float, rank: int, message: Snapshot) -> None:
        worker = self._workers[rank]
        before = worker.snapshot
        worker.take(message)
        if before is not None and message.step > before.step:
            self.last_progress = now
        if (fault := fault_of(message, worker.link, len(self._workers), self.config)) is not None:
            self.fail(fault)
        if before is None or before.state != message.state:
            self._changed()
