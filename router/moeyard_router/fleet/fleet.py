"""The connections to all workers. Carries out the instructions of the admission machine (fleet/admission.py)."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import zmq

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.admission import Admission
from moeyard_router.fleet.instructions import (
    Answered,
    Began,
    Carried,
    Changed,
    Connect,
    Disconnect,
    Ended,
    Instruction,
    ReportLost,
    Run,
    Stop,
    Waited,
    WakeAt,
)
from moeyard_router.fleet.link import LinkEvents, WorkerLink, gave_up
from moeyard_router.fleet.loads import LoadsReader
from moeyard_router.fleet.orders import Cancel, Drain, FleetOrder, Forget, Hold
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.records import RECENT, Phases, Refusals
from moeyard_router.fleet.ticket import Ticket
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Abort, Message, SamplingParams

_WAITS = Route(rank=None, reason="waits")


class Fleet:
    """Owner of the connections to all workers, in one event loop. `admission` decides and knows the fleet's state.

    `on_lost(rank, reason)` reports a worker that does not come back by itself. The owner of the workers then calls
    `replace` or `give_up`. With a `recovery_timeout` of 0 it is called once, and everything in flight ends.
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
        self.recent: deque[Phases] = deque(maxlen=RECENT)  # choices that ended
        self.refusals = Refusals()
        self.loads = LoadsReader(self._ready_links)
        self.admission = Admission(time.monotonic(), config)
        self._metrics = metrics
        self._on_change = on_change
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[int, WorkerLink] = {}
        self._watches: set[asyncio.Task[None]] = set()  # of links that were opened again
        self._announced: list[Ticket] = []  # to call once all received messages are delivered
        self._carries_out = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        metrics.inflight.set_function(lambda: self.num_inflight - self.num_queued)
        metrics.waiting.set_function(lambda: self.num_queued)

    # The life of the fleet.

    def start(self) -> None:
        """Begin to connect to every worker. Raises `ValueError` for an unusable endpoint."""
        self.admission.start()
        self._carry_out()

    def replace(self, addresses: tuple[WorkerAddress, ...], facts: Mapping[str, Any] | None = None) -> None:
        """Continue with these workers, as `Admission.replace`. Raises `ValueError` for an unusable endpoint."""
        self.admission.replace(time.monotonic(), addresses, facts)
        self._carry_out()

    def stop(self, reason: str) -> None:
        """Accept no more requests. Those in flight continue."""
        self.admission.stop(reason)
        self._carry_out()

    def end_all(self, reason: str) -> None:
        """End everything in flight with `reason` as the error, and abort it at the workers."""
        self.admission.end_all(time.monotonic(), reason)
        self._carry_out()

    def give_up(self, reason: str) -> None:
        """Declare the fleet permanently lost."""
        self.admission.give_up(time.monotonic(), reason)
        self._carry_out()

    def obey(self, order: FleetOrder) -> int:
        """Carry out an order, as `Admission.drain`, `Admission.hold` or `Admission.cancel`."""
        now, admission = time.monotonic(), self.admission
        match order:
            case Drain():
                count = admission.drain(now, order)
            case Hold():
                count = admission.hold(now, order)
            case Cancel():
                count = admission.cancel(now, order)
            case Forget():
                count = admission.forget()
        self._carry_out()
        return count

    def close(self) -> None:
        """End everything in flight and close all sockets."""
        self.admission.close(time.monotonic(), "the router has stopped")
        self._carry_out()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._watches:
            task.cancel()
        for link in self._links.values():
            link.close()
        self._context.destroy(linger=0)

    # Requests.

    def check(self, key: str | None) -> None:
        """Raise `ApiError` 429 if a request of `key` would wait too long."""
        self.admission.check(time.monotonic(), key)

    async def read(self, prompts: Iterable[Sequence[int]]) -> None:
        """Hash prompts for `submit`, one per turn of the event loop, because a long one takes half a ms."""
        loads = self.admission.ranks.loads()
        for prompt in prompts if loads and self.config.prefix_caching else ():
            self.admission.placement.read(prompt, loads[0].page_size)
            await asyncio.sleep(0)

    def submit(
        self,
        request_id: str,
        sequences: list[tuple[Sequence[int], SamplingParams]],
        *,
        client: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        on_move: Callable[[float, int, int | None], None] | None = None,
        names: frozenset[str] = frozenset(),
    ) -> Ticket:
        """Accept sequences of (prompt ids, sampling), as `Admission.submit`. Raises `ApiError` 503 and 429.

        `on_move` is called with monotonic seconds, index and rank whenever a sequence is sent to a rank.
        """
        ticket = Ticket(self.abandon, self._announced.append, on_move)
        try:
            flights = self.admission.submit(
                time.monotonic(),
                request_id,
                sequences,
                listener=ticket,
                client=client,
                key=key,
                rank=rank,
                names=names,
            )
            for flight in flights:
                ticket.opened(flight.index, flight.name, _WAITS)
        finally:
            self._carry_out()
        return ticket

    def abandon(self, request_id: str) -> None:
        """Abort a sequence whose client has left. Unknown ids are ignored."""
        self.admission.abandon(time.monotonic(), request_id)
        self._carry_out()

    # State.

    @property
    def num_inflight(self) -> int:
        """Number of sequences that have not ended. An aborted one counts until its worker confirms."""
        return len(self.admission.flights.by_name)

    @property
    def num_queued(self) -> int:
        """Number of sequences that wait for their first start."""
        return self.admission.waiters.queue.num_sequences

    def validate(self) -> None:
        """Assert all invariants of the machine, its listeners and its links."""
        self.admission.validate()
        assert not self.admission.deliveries, "a delivery was not carried out"
        assert not self.admission.instructions, "an instruction was not carried out"
        for name, flight in self.admission.flights.by_name.items():
            assert flight.listener is None or flight.listener.runs(flight.index, name), f"no request has {name}"
        linked = {rank.number for rank in self.admission.ranks if not rank.lost}
        assert self.admission.given_up or set(self._links) == linked, "links and ranks differ"

    # Events from links and the clock.

    def _up(self, rank: int) -> None:
        self.admission.connected(rank)
        self._carry_out()

    def _heard(self, rank: int, messages: list[Message]) -> None:
        self.admission.heard(time.monotonic(), rank, messages)
        self._carry_out()

    def _broke(self, rank: int, reason: str) -> None:
        self.admission.broke(time.monotonic(), rank, reason)
        self._carry_out()

    def _lose(self, rank: int, reason: str) -> None:
        self.admission.lose(time.monotonic(), rank, reason)
        self._carry_out()

    def _wake(self) -> None:
        self._timer = None
        self.admission.time_passed(time.monotonic())
        self._carry_out()

    # Instructions.

    def _carry_out(self) -> None:
        """Carry out all deliveries and instructions in order, with those that are added meanwhile."""
        if self._carries_out:
            return  # an instruction below has called: the loop continues with the new ones
        machine = self.admission
        while True:
            deliveries, machine.deliveries = machine.deliveries, []
            for now, ticket, index, event in deliveries:
                ticket.put(now, index, event)
            if not machine.instructions:
                break
            instructions, machine.instructions = machine.instructions, []
            self._carries_out = True
            try:
                for instruction in instructions:
                    self._carry_out_one(instruction)
            finally:
                self._carries_out = False
        if self._announced:
            announced = self._announced[:]
            self._announced.clear()
            for ticket in announced:
                ticket.read()

    def _carry_out_one(self, instruction: Instruction) -> None:
        match instruction:
            case Run(ticket, index, route, submit):
                ticket.moved(index, route)
                self._send(route.rank, submit)
            case Stop(rank, name):
                self._send(rank, Abort(request_id=name))
            case Connect(address, broke):
                self._connect(address, broke)
            case Disconnect(rank):
                if rank in self._links:
                    self._links.pop(rank).close()
            case Answered(loads):
                self.loads.take(loads)
            case ReportLost(rank, reason):
                self._on_lost(rank, reason)
            case Changed():
                self._metrics.set_workers([rank.shown for rank in self.admission.ranks])
                self._on_change()
            case WakeAt(seconds):
                self._wake_at(seconds)
            case Waited(seconds):
                self._metrics.waited.observe(seconds)
            case Began(incident):
                incident.when = time.time()
            case Ended(incident):
                if incident.planned is None:
                    self._metrics.recoveries.inc()
                    self._metrics.recovery_seconds.observe(incident.whole_seconds or 0.0)
                else:
                    self._metrics.changes[incident.change].inc()
            case Carried(sequences, recomputed_tokens):
                self._metrics.carried.inc(sequences)
                self._metrics.recomputed.inc(recomputed_tokens)

    def _send(self, rank: int | None, message: Message) -> None:
        link = None if rank is None else self._links.get(rank)
        if link is not None:
            link.send(message)

    def _connect(self, address: WorkerAddress, broke: str | None) -> None:
        number = address.rank
        if number in self._links:
            self._links.pop(number).close()
        events = LinkEvents(up=self._up, messages=self._heard, broke=self._broke, lost=self._lose)
        link = WorkerLink(address, context=self._context, config=self.config, events=events)
        link.open()
        self._links[number] = link
        if broke is None:
            return

        def settled() -> bool:
            return self._links.get(number) is not link or self.admission.ranks[number].snapshot is not None

        async def watch() -> None:
            if await gave_up(link.endpoint, self.config.step_deadline, settled) and not settled():
                self._lose(number, broke)

        task = asyncio.get_running_loop().create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            if self._wakes_at <= at:
                return
            self._timer.cancel()
        self._wakes_at = at
        delay = max(0.0, at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _ready_links(self) -> list[WorkerLink]:
        return [self._links[rank.number] for rank in self.admission.ranks if rank.state == "ready"]
