"""Rows between ranks through a process group of torch.distributed, one for every epoch: NCCL, or gloo on a CPU.

It uses none of torch's global state: no `init_process_group`, no port, no file. Ranks find each other through a store
that the mesh carries (`relay`), and the mesh finds lost ranks, too.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from moeyard_kernels.host_memory import HostWord
from moeyard_worker.config.nccl_config import set_nccl_environment
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.mesh import Mesh

log = logging.getLogger(__name__)

# The limit for making a communicator, and the pause between two rounds of `relay` without news.
MEET_S, _PAUSE_S = 60.0, 2e-3
# torch gives up on an abort after its group's time limit. The host ends every wait long before.
_NEVER = timedelta(days=1)
_ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class Moved:
    """Rows in flight.

    has_begun: whether this rank's device has reached the move, where it waits for others.
    has_ended: whether all rows are here, or the move has failed.
    check: raises RuntimeError if the move has failed, without waiting. Does nothing where the host ends failed moves.
    """

    has_begun: Callable[[], bool]
    has_ended: Callable[[], bool]
    check: Callable[[], object] = lambda: None


class RelayStore(dist.Store):
    """A table on each rank for torch's process groups, which set any keys from any thread. It never uses the mesh.

    `relay` exchanges the new values of all tables. The caller keeps the store alive.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._news: dict[str, bytes] = {}

    def take_news(self) -> dict[str, bytes]:
        """Return the values set on this rank since the last call."""
        with self._changed:
            news, self._news = self._news, {}
            return news

    def merge(self, news: dict[str, bytes]) -> None:
        """Add the values that another rank has set."""
        with self._changed:
            self._values.update(news)
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = self._news[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all keys are there. Raises TimeoutError."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else self._seconds
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"nobody has set {missing} within {seconds:.1f} s")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def relay(mesh: Mesh, store: RelayStore, ended: Callable[[], str | None], *, seconds: float) -> None:
    """Exchange the new values of all ranks' stores until all ranks have connected; every rank calls it.

    `ended` returns None while this rank connects, then its error, "" for none. Raises ExchangeError, the same on all
    ranks, for a lost rank, an error, or a rank that connects for over `seconds`.
    """
    limit = perf_counter() + seconds
    while True:
        # Ask before taking the values, which then include everything that was set before the end.
        end = ended()
        late = end is None and perf_counter() > limit
        error = f"no connection within {seconds:.0f} s" if late else end or ""
        payloads = mesh.gather(msgpack.packb([end is not None, error, store.take_news()]))
        found = {rank: msgpack.unpackb(payloads[rank]) for rank in mesh.members}
        for rank, (_, error, _) in found.items():
            if error:
                reason = f"rank {rank} did not meet the others: {error}"
                raise ExchangeError(mesh.fail(reason, ranks=[rank]))
        for rank, (_, _, theirs) in found.items():
            if rank != mesh.rank:
                store.merge(theirs)
        if all(is_over for is_over, _, _ in found.values()):
            return
        if not any(theirs for _, _, theirs in found.values()):
            sleep(_PAUSE_S)


class TorchGroup:
    """A group on `device`; of one member it copies. Sizes are rows of the first dimension, by a member's place.

    captures: whether graphs may hold its moves, for this epoch. host_waits: whether the host has to wait for rows,
    because moves do not follow one another on a device.
    """

    def __init__(self, device: torch.device, *, captures: bool = False) -> None:
        self._device, self.captures = device, captures
        self.host_waits = device.type == "cpu"
        self._ticks = _Ticks(device)
        self._ending: threading.Thread | None = None
        self._backend: Any = None
        self._world = 1
        # Destroying a group joins its threads, which may wait for a lost rank. So ended groups are never destroyed.
        self._ended: list[Any] = []
        self._store: RelayStore | None = None

    def meet(self, mesh: Mesh) -> None:
        """Make a group of the mesh's members once the previous one has settled; all members call it.

        Raises ExchangeError, the same on all of them.
        """
        self._world = len(mesh.members)
        if self._world == 1:
            return
        store = self._store = RelayStore(MEET_S)
        place = mesh.members.index(mesh.rank)
        found: list[Any] = []
        ended: list[str] = []

        def connect() -> None:
            try:
                found.append(self._connect(store, place, self._world, one_host=mesh.one_host))
                ended.append("")
            except Exception as error:  # boundary: the error goes to all ranks
                ended.append(str(error).strip().split("\n", 1)[0][:300] or repr(error))

        # `connect` waits for peers, while only this thread may use the mesh.
        threading.Thread(target=connect, name="meet-peers", daemon=True).start()
        try:
            relay(mesh, store, lambda: ended[0] if ended else None, seconds=MEET_S)
        finally:
            # A group that only some members have made must be ended, too, and its destructor would block this thread.
            self._backend = found[0] if found else None

    def _connect(self, store: RelayStore, place: int, world: int, *, one_host: bool) -> Any:
        """Return a group in which every pair of ranks is connected."""
        backend: Any
        if self.host_waits:
            backend = dist.ProcessGroupGloo(store, place, world, timedelta(seconds=MEET_S))
        else:
            set_nccl_environment(one_host=one_host)
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            backend = dist.ProcessGroupNCCL(store, place, world, options)
        # NCCL makes its communicator, and connects pairs, when they are first used.
        sent = torch.full((world, 1), place, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)
        backend.alltoall_base(received, sent, [1] * world, [1] * world).wait()
        if (answered := received.flatten().tolist()) != [*range(world)]:
            raise RuntimeError(f"members {answered} have answered, of {world}")
        return backend

    def in_graph(self) -> bool:
        """Return whether a graph is being captured, which then holds what is launched now."""
        return not self.host_waits and torch.cuda.is_current_stream_capturing()

    def move(
        self, given: torch.Tensor, sent: Sequence[int], into: torch.Tensor, received: Sequence[int]
    ) -> Moved | None:
        """Send the first sent[0] rows of `given` to the first member, the next to the second, and so on.

        `into` receives the members' rows in the same way. Both are contiguous. Returns None if a graph holds the move.
        Raises RuntimeError if the group has failed.
        """
        if self._world == 1:
            into.copy_(given)
            return Moved(lambda: True, lambda: True)
        if self._backend is None:
            raise RuntimeError("the process group has ended")
        if self.in_graph():
            # The host cannot query an event in a graph. On NCCL's own stream a graph would keep the rows of every layer
            # until its end.
            here = dist.AllToAllOptions()
            here.asyncOp = False
            self._ticks.tick()
            # NCCL's move follows the previous launches and returns no work.
            if (work := self._backend.alltoall_base(into, given, [*received], [*sent], here)) is not None:
                work.wait()
            self._ticks.tick()
            return None
        begun = None if self.host_waits else _event()
        work = self._backend.alltoall_base(into, given, [*received], [*sent])
        if begun is None:
            return Moved(lambda: True, lambda: bool(work.is_completed()), work.wait)
        # The current stream waits for the rows; the host does not (`set_nccl_environment`).
        work.wait()
        return Moved(begun.query, _event().query)

    def replayed(self, count: int) -> Sequence[Moved]:
        """Return, in order, the `count` moves of a graph that was launched."""
        return [self._ticks.next_move() for _ in range(count)]

    def abort(self) -> None:
        """End the group: waits of the device end soon. Safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        self._ended.append((backend, self._store))
        if not self.host_waits:
            # The device is signalled first. Then NCCL waits until no graph holds its communicator.
            self._ending = threading.Thread(target=_abort, args=(backend,), name="abort-group", daemon=True)
            self._ending.start()

    def settle(self) -> None:
        """Wait until the ended group is gone. The caller has freed the graphs that hold it."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.join(_ABORT_S)


class _Ticks:
    """The number of begins and ends of moves that a device has passed in graphs."""

    def __init__(self, device: torch.device) -> None:
        self._word = HostWord(device)
        self._launched = 0

    def tick(self) -> None:
        """Count one more on the device. A device counter and its copy would take three times as long."""
        self._word.there.add_(1)

    def passed(self) -> int:
        """Return the number that has reached the host."""
        return int(self._word.here)

    def next_move(self) -> Moved:
        """Return the next move that was launched with a graph: it lies between two ticks."""
        self._launched += 2
        end = self._launched
        return Moved(lambda: self.passed() >= end - 1, lambda: self.passed() >= end)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # boundary: the group has failed already
        log.warning("the process group did not end: %s", str(error).split("\n", 1)[0])
