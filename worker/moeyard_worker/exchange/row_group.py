"""Rows between ranks through a process group of torch.distributed, made anew for every epoch: NCCL, or gloo on a CPU.

Nothing of it is torch's global state: no `init_process_group`, no port, no file. Ranks find each other through a store
that the mesh carries (`meeting.py`), and what is lost is found by the mesh, too.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moeyard_kernels.host_memory import HostWord
from moeyard_worker.config.nccl_config import set_nccl_environment
from moeyard_worker.exchange.meeting import RelayStore, Through, relay
from moeyard_worker.exchange.mesh import Mesh

log = logging.getLogger(__name__)

# What making a communicator may take.
MEET_S = 60.0
# torch gives up on an abort after its group's time limit, which nothing else is to reach: the host ends every wait.
_NEVER = timedelta(days=1)
_ABORT_S = 10.0


class Moved(Protocol):
    """Rows on their way."""

    def has_begun(self) -> bool:
        """Whether this rank's device has come to it: then it waits for others."""
        ...

    def has_ended(self) -> bool:
        """Whether all rows are here, or the attempt has failed."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if it has failed; the host does not wait."""
        ...


class RowGroup(Protocol):
    """What `NcclExchange` asks of a transport. Sizes are rows of the first dimension, by a member's place."""

    # Whether the host has to wait for rows: they do not lie behind one another on a device.
    host_waits: bool
    # Whether a graph can hold it, of this epoch.
    captures: bool

    def meet(self, mesh: Mesh) -> None:
        """A group of the mesh's members, once the one before has settled; all call it.

        Raises ExchangeError, the same on all of them.
        """
        ...

    def move(
        self, given: torch.Tensor, sent: Sequence[int], into: torch.Tensor, received: Sequence[int]
    ) -> Moved | None:
        """Send the first sent[0] rows of `given` to the first member, the next to the second, ...; likewise `into`.

        Both contiguous. None: a graph holds it, and it moves when that is launched. Raises RuntimeError where the group
        has failed.
        """
        ...

    def replayed(self, count: int) -> Sequence[Moved]:
        """A graph was launched that holds so many moves among several members: these, in order."""
        ...

    def abort(self) -> None:
        """End the group: whatever waits on a device stops waiting, soon. Safe to call twice."""
        ...

    def settle(self) -> None:
        """Wait until what has been ended is gone; what a graph holds of it has to be gone before."""
        ...


class TorchGroup:
    """`RowGroup` on `device`. Of one member: copies. `captures`: whether graphs are to hold it."""

    def __init__(self, device: torch.device, *, captures: bool = False) -> None:
        self._device, self.captures = device, captures
        self.host_waits = device.type == "cpu"
        self._ticks = _Ticks(device)
        self._ending: threading.Thread | None = None
        self._backend: Any = None
        self._world = 1
        # Where a group is destroyed torch joins its threads, and these may wait for who is gone: groups are kept.
        self._ended: list[Any] = []
        self._store: RelayStore | None = None

    def meet(self, mesh: Mesh) -> None:
        """See `RowGroup.meet`."""
        self._world = len(mesh.members)
        if self._world == 1:
            return
        store = self._store = RelayStore(MEET_S)
        place = mesh.members.index(mesh.rank)
        found: list[Any] = []
        through: list[Through] = []

        def connect() -> None:
            try:
                found.append(self._connect(store, place, self._world, one_host=mesh.one_host))
                through.append(Through())
            except Exception as error:  # boundary: of whatever kind, all ranks are told
                through.append(Through(str(error).strip().split("\n", 1)[0][:300] or repr(error)))

        # It waits for peers, and the mesh is this thread's.
        threading.Thread(target=connect, name="meet-peers", daemon=True).start()
        relay(mesh, store, lambda: through[0] if through else None, seconds=MEET_S)
        self._backend = found[0]

    def _connect(self, store: RelayStore, place: int, world: int, *, one_host: bool) -> Any:
        """The group, with every pair of ranks connected."""
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
        word = torch.full((world, 1), place, dtype=torch.uint8, device=self._device)
        heard = torch.empty_like(word)
        backend.alltoall_base(heard, word, [1] * world, [1] * world).wait()
        if (said := heard.flatten().tolist()) != [*range(world)]:
            raise RuntimeError(f"members {said} have answered, of {world}")
        return backend

    def in_graph(self) -> bool:
        """Whether what is launched now is held by a graph, and runs with that."""
        return not self.host_waits and torch.cuda.is_current_stream_capturing()

    def move(
        self, given: torch.Tensor, sent: Sequence[int], into: torch.Tensor, received: Sequence[int]
    ) -> Moved | None:
        """See `RowGroup.move`."""
        if self._world == 1:
            into.copy_(given)
            return _Here()
        if self._backend is None:
            raise RuntimeError("the process group has ended")
        if self.in_graph():
            # Of an event in a graph no host can ask. On the stream of its own that NCCL has otherwise, a graph would
            # keep the rows of every layer until its end.
            here = dist.AllToAllOptions()
            here.asyncOp = False
            self._ticks.tick()
            # NCCL's is behind what was launched before, and there is nothing to wait for.
            if (work := self._backend.alltoall_base(into, given, [*received], [*sent], here)) is not None:
                work.wait()
            self._ticks.tick()
            return None
        begun = None if self.host_waits else _event()
        work = self._backend.alltoall_base(into, given, [*received], [*sent])
        if begun is None:
            return _OfHost(work)
        # The current stream waits for the rows; the host does not (`set_nccl_environment`).
        work.wait()
        return _OfDevice(begun, _event())

    def replayed(self, count: int) -> Sequence[Moved]:
        """See `RowGroup.replayed`."""
        return [self._ticks.next_move() for _ in range(count)]

    def abort(self) -> None:
        """See `RowGroup.abort`."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        self._ended.append((backend, self._store))
        if not self.host_waits:
            # The device hears of it first; then NCCL waits until no graph holds its communicator any more.
            self._ending = threading.Thread(target=_quietly(backend.abort), name="abort-group", daemon=True)
            self._ending.start()

    def settle(self) -> None:
        """See `RowGroup.settle`."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.join(_ABORT_S)


class _Ticks:
    """How many beginnings and ends of moves a device has passed in graphs, since the process began."""

    def __init__(self, device: torch.device) -> None:
        self._word = HostWord(device)
        self._launched = 0

    def tick(self) -> None:
        """One more, on the device: of a count beside it and its copy to the host each takes a launch, and three times
        as long."""
        self._word.there.add_(1)

    def heard(self) -> int:
        """How many the host knows of."""
        return int(self._word.here)

    def next_move(self) -> "_OfReplay":
        """The next of those that were launched with a graph: two ticks."""
        self._launched += 2
        return _OfReplay(self, self._launched)


class _OfReplay:
    """What lies between two ticks."""

    def __init__(self, ticks: _Ticks, end: int) -> None:
        self._ticks, self._end = ticks, end

    def has_begun(self) -> bool:
        return self._ticks.heard() >= self._end - 1

    def has_ended(self) -> bool:
        return self._ticks.heard() >= self._end

    def check(self) -> None:
        """What fails is ended by the host."""


class _Here:
    """Rows that were copied."""

    def has_begun(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return True

    def check(self) -> None:
        """Nothing fails."""


class _OfHost:
    """A gloo work."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def has_begun(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return bool(self._work.is_completed())

    def check(self) -> None:
        self._work.wait()


class _OfDevice:
    """What lies between two events of a stream."""

    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._begun, self._ended = begun, ended

    def has_begun(self) -> bool:
        return self._begun.query()

    def has_ended(self) -> bool:
        return self._ended.query()

    def check(self) -> None:
        """What fails is ended by the host."""


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _quietly(abort: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            abort()
        except RuntimeError as error:  # boundary: what was to end has failed already
            log.warning("the process group did not end: %s", str(error).split("\n", 1)[0])

    return run


def missing_nccl() -> str | None:
    """What keeps this torch from NCCL; None: nothing."""
    if not dist.is_available() or not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    return None
