"""The connections to all workers: made, made again when they break, and replaced when a worker is."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import zmq

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.flights import Flights
from moeyard_router.fleet.link import LinkEvents, Message, WorkerLink
from moeyard_router.fleet.reconnect import gave_up
from moeyard_router.fleet.worker_state import WorkerState
from moeyard_worker.protocol import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvents:
    """Where the connections report, in the event loop: a worker's state has changed, and messages came (in order).

    `apart(rank, reason)`: the fleet cannot run steps for now; what ran on `rank`, unless it is None, has ended there.
    `lost(rank, reason, died, replaced)`: a worker is not coming back; `died` is false for one that was told to stop,
    `replaced` true for one whose place is taken already, or will be without a word from here. `unfit`: it never will,
    it is none for this fleet.
    """

    changed: Callable[[], None]
    messages: Callable[[int, list[Message]], None]
    apart: Callable[[int | None, str], None]
    lost: Callable[[int, str, bool, bool], None]
    unfit: Callable[[str], None]


class Members:
    """One `WorkerState` per rank. A connection that breaks is made again, once in a step deadline; if the worker does
    not answer within another as the one it was, or nobody listens there any more, it is lost.
    """

    def __init__(self, config: RouterConfig, flights: Flights, events: MemberEvents) -> None:
        self.addresses = config.workers
        self.workers: list[WorkerState] = []
        self._config = config
        self._flights = flights
        self._events = events
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replaced = False
        self._pausing: str | None = None
        self._reconnecting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect to every worker; raises `ValueError` for an unusable endpoint."""
        for address in self.addresses:
            self.workers.append(self._open(address))

    def replace(self, addresses: tuple[WorkerAddress, ...]) -> list[int]:
        """Connect to those of `addresses` that are new; the others stay. Raises as `start`.

        Returns the ranks that are new or away since. Before, `lost` is called for workers that are there and whose
        places are taken, or empty from now on.
        """
        self._replaced, self._pausing = True, None
        new = [a.rank for a in addresses if not self._stays(a)]
        for rank in range(len(self.workers)):
            if rank in new or rank >= len(addresses):
                gone = rank >= len(addresses)
                self.workers[rank].leaving |= gone  # whatever this router was told before
                what = "has left" if gone else "is away" if addresses[rank].away else "was replaced"
                self.lose(rank, f"worker {rank} {what}", replaced=True)
        self.addresses = addresses
        del self.workers[len(addresses) :]
        self._flights.resize(len(addresses))
        for rank in new:
            self.workers[rank : rank + 1] = [self._open(addresses[rank])]
        for worker, address in zip(self.workers, addresses, strict=True):
            worker.draining, worker.leaving = address.draining, False
        return new

    def drain(self, ranks: Collection[int]) -> None:
        """These take no new sequences, and all others do."""
        self.addresses = tuple(replace(a, draining=a.rank in ranks) for a in self.addresses)
        for worker in self.workers:
            worker.draining = worker.link.rank in ranks

    def pause(self, leaving: Iterable[int], reason: str) -> None:
        """These ranks are about to be replaced, or to leave: until `replace` the fleet is not whole."""
        self._pausing = reason
        for rank in leaving:
            self.workers[rank].leaving = True

    def _stays(self, address: WorkerAddress) -> bool:
        worker = self.workers[address.rank] if address.rank < len(self.workers) else None
        same = worker is not None and worker.link.endpoint == address.endpoint
        return worker is not None and same and (address.away or not worker.lost)

    def lose(self, rank: int, reason: str, *, replaced: bool = False) -> None:
        """A worker is lost: another must take its place, unless it is `replaced` already."""
        worker = self.workers[rank]
        if worker.lost:
            return
        died = worker.state != "stopping" and not worker.stopped and not worker.leaving
        worker.lost = True
        worker.link.close()
        self._events.lost(rank, reason, died, replaced or worker.leaving)

    def close(self) -> None:
        """Close all sockets."""
        for task in self._reconnecting:
            task.cancel()
        for worker in self.workers:
            worker.link.close()
        self._context.destroy(linger=0)

    def any_usable(self) -> bool:
        """Whether a worker takes requests."""
        return any(worker.usable for worker in self.workers)

    def any_open(self) -> bool:
        """Whether a worker takes new ones."""
        return any(worker.open for worker in self.workers)

    def unready(self) -> str | None:
        """Which worker is not ready for steps with the others, or None: the fleet is whole."""
        if self._pausing is not None:
            return self._pausing
        there = [worker for worker in self.workers if not worker.away]
        for worker in there:
            if worker.state != "ready":
                what = "is not connected yet" if worker.state == "connecting" else f"is {worker.state}"
                return f"worker {worker.link.rank} at {worker.link.endpoint} {what}"
        # Those that stay are of a new epoch, and know of other ranks, before this router does.
        said = {(w.snapshot.epoch, w.snapshot.world_size) for w in there if w.snapshot is not None}
        if {world for _, world in said} != {len(there)}:
            return f"the workers count {', '.join(str(world) for _, world in sorted(said))} ranks, not {len(there)}"
        if len(said) > 1:
            return f"the workers are of epochs {', '.join(str(epoch) for epoch, _ in sorted(said))}"
        return None

    def take(self, rank: int, said: Snapshot) -> bool:
        """Take a worker's word; whether it tells that a step ran."""
        worker = self.workers[rank]
        if worker.lost:
            return False
        before, problem = worker.snapshot, self._mismatch(rank, said)
        worker.take(said)
        if problem is not None:
            self.lose(rank, problem)
            self._events.unfit(problem)
        elif before is None and worker.epoch not in (None, said.epoch):
            told = f"its epoch is {said.epoch}, and was {worker.epoch} before its connection broke"
            self.lose(rank, f"worker {rank} at {worker.link.endpoint} is another than it was: {told}")
        elif said.state == "failed":
            self.lose(rank, f"worker {rank} failed: {said.failure}")
        elif said.state == "recovering" and (before is None or before.state != "recovering"):
            self._events.apart(None, f"worker {rank} recovers: {said.failure}")
        if before is None or before.state != said.state:
            self._events.changed()
        return before is not None and said.step > before.step

    def _mismatch(self, rank: int, said: Snapshot) -> str | None:
        """What makes a worker another than the one that is served, or None. How many ranks it counts may change.

        Where others take lost ones' places it may have done so before this router, if it has just started, is told.
        """
        config, worker = self._config, self.workers[rank]
        known = worker.snapshot is not None or self._replaced or config.recovery_timeout > 0
        world = said.world_size if known else sum(not each.away for each in self.workers)
        if (said.rank, said.world_size, said.vocab_size) != (rank, world, config.vocab_size):
            return (
                f"the worker at {worker.link.endpoint} is rank {said.rank} of {said.world_size} with "
                f"{said.vocab_size} token ids; expected rank {rank} of {len(self.workers)} with {config.vocab_size}"
            )
        if said.max_model_len < config.max_model_len:
            return (
                f"worker {rank} takes sequences of {said.max_model_len} tokens, the router promises "
                f"{config.max_model_len}"
            )
        return None

    def _open(self, address: WorkerAddress) -> WorkerState:
        events = LinkEvents(up=self._up, messages=self._events.messages, broke=self._broke, lost=self.lose)
        link = WorkerLink(address, context=self._context, config=self._config, events=events)
        if not address.away:
            link.open()
        return WorkerState(link, self._flights.held[address.rank], lost=address.away, draining=address.draining)

    def _up(self, rank: int) -> None:
        self.workers[rank].connected = True
        self._events.changed()

    def _broke(self, rank: int, reason: str) -> None:
        now, worker, deadline = time.monotonic(), self.workers[rank], self._config.step_deadline
        if not self._config.recovery_timeout or now - worker.broke < deadline:
            self.lose(rank, reason)
            return
        worker.link.close()
        again = self._open(self.addresses[rank])
        again.broke, again.epoch = now, None if worker.snapshot is None else worker.snapshot.epoch
        again.stopped, again.leaving = worker.state == "stopping", worker.leaving
        self.workers[rank] = again
        self._events.apart(rank, reason)

        async def wait() -> None:
            gone = await gave_up(again.link.endpoint, deadline, lambda: again.snapshot is not None or again.lost)
            if gone and self.workers[rank : rank + 1] == [again]:
                self.lose(rank, reason)

        task = asyncio.get_running_loop().create_task(wait())
        self._reconnecting.add(task)
        task.add_done_callback(self._reconnecting.discard)
