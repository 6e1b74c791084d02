"""The life of steps whose collectives only the host can end. Hosts find out which ranks wait and which do not.

A device that waits in a collective knows nothing of others. So hosts exchange signs (`Mesh.say`). A host that has
waited for half a deadline sends a sign, repeatedly. A host that receives it and waits, too, answers at once. A peer
that has sent no sign within a deadline and does not compile has not come to the collective.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moeyard_worker.exchange.base import ExchangeError, ExchangeSteps, PeerRows
from moeyard_worker.exchange.membership.agreement import name_ranks, where_in_step
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.nccl.group import Moved, TorchGroup

log = logging.getLogger(__name__)

# Seconds between two looks at the device, and between two looks at the mesh meanwhile.
_PAUSE_S, _LOOK_S = 50e-6, 0.01
# A peer that arrives at the last moment has this long to send its sign.
_GRACE_S = 0.05
# The rest of a step after its waits for peers have ended.
_DRAIN_S = 10.0
# Collectives that the host launches ahead of its device, two per layer. If about a thousand launches wait for a device
# that waits for a peer, the next launch blocks, and the host no longer watches.
_AHEAD = 16

# Step, layer and phase of a collective.
Place = tuple[int, int, Phase]


@dataclass(frozen=True, slots=True)
class _Mark:
    """Rows in flight, and their step, layer and phase."""

    at: Place
    moved: Moved


class NcclSteps(ExchangeSteps):
    """Steps of one rank: the collectives of `group` that its device has not passed yet, oldest first.

    A rank names itself if its device does not reach its next collective within `seconds`. `on_replay` returns the
    layers of a captured step in order.
    """

    def __init__(
        self,
        group: TorchGroup,
        *,
        rank: int,
        seconds: float,
        on_rows: Callable[[PeerRows], None],
        on_replay: Callable[[], Sequence[int]],
    ) -> None:
        super().__init__(on_rows)
        self._group, self._rank, self._seconds, self._on_replay = group, rank, seconds, on_replay
        self._marks: deque[_Mark] = deque()
        # When a peer was last known to compile. The rows of other peers may have arrived long before its own.
        self._compiled = 0.0

    def open_epoch(self, mesh: Mesh) -> None:
        super().open_epoch(mesh)
        self._marks.clear()

    def finish(self, step: int, has_run: Callable[[], bool]) -> None:
        super().finish(step, has_run)
        self._until(has_run)

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        self._until(has_run or (lambda: not self._marks))

    def abort(self, lost: Sequence[int] = ()) -> None:
        """End the waits, then free the graphs, then the group: graphs hold the communicator that the waits are in."""
        self._end()
        self.release_graphs()
        self._group.settle()

    def before_capture(self) -> None:
        self.drain()
        if self.mesh is not None:
            self.mesh.send_sign(Phase.BUSY)

    def replayed(self) -> None:
        places = [(self.step, layer, phase) for layer in self._on_replay() for phase in (Phase.DISPATCH, Phase.COMBINE)]
        moves = self._group.replayed(len(places)) if places else ()
        self._marks.extend(_Mark(at, moved) for at, moved in zip(places, moves, strict=True))

    def launched(self, at: Place, moved: Moved) -> None:
        """Note a launched collective, and wait if the host is too far ahead. On a CPU its rows have then arrived."""
        self._marks.append(_Mark(at, moved))
        ahead = 0 if self._group.host_waits else _AHEAD
        if len(self._marks) > ahead:
            self._until(lambda: len(self._marks) <= ahead)

    def _until(self, has_run: Callable[[], bool]) -> None:
        """Wait until `has_run`. Raises ExchangeError if the wait is in vain, after the device has stopped waiting.

        Time that the host spent before the wait, such as to compile the next launch, does not count.
        """
        since = looked = time.monotonic()
        state: tuple[int, bool] | None = None
        while True:
            now = self._progress()
            if has_run():
                return
            clock = time.monotonic()
            if now != state:
                state, since = now, clock
            if clock - looked > _LOOK_S:
                looked = clock
                self._look(clock - since)
            time.sleep(_PAUSE_S)

    def _progress(self) -> tuple[int, bool]:
        """Return how many collectives the device has ahead, and whether it waits in the first of them."""
        while self._marks and self._marks[0].moved.has_ended():
            mark = self._marks.popleft()
            try:
                mark.moved.check()
            except RuntimeError as error:
                self.fail(error, mark.at)
        return len(self._marks), bool(self._marks) and self._marks[0].moved.has_begun()

    def _look(self, seconds: float) -> None:
        """Check the mesh. The device has made no progress for `seconds`."""
        mesh = self.mesh
        assert mesh is not None, "a step begins after the ranks have met"
        at = self._marks[0].at if self._marks else None
        try:
            mesh.check_peers(at)
            if at is not None and self._marks[0].moved.has_begun():
                self._ask(mesh, seconds, at)
            elif seconds > self._seconds:
                where = f"step {self.step}" if at is None else where_in_step(*at)
                raise ExchangeError(mesh.fail(f"rank {self._rank} silent ({self._seconds:.1f} s) at {where}"))
        except ExchangeError:
            self._end()
            raise

    def _ask(self, mesh: Mesh, seconds: float, at: Place) -> None:
        """Tell the peers that this rank waits for them. Raises ExchangeError if the wait is in vain."""
        signs, limit, clock = {peer: mesh.signs.of(peer) for peer in mesh.peers}, mesh.deadline, time.monotonic()
        if seconds > limit / 2 or Phase.WAITING in signs.values():
            mesh.send_sign(Phase.WAITING)
        if Phase.BUSY in signs.values():
            self._compiled = clock
        if seconds < limit + _GRACE_S:
            return
        where, (step, layer, phase) = where_in_step(*at), at
        # A peer that has sent a later frame has passed this collective.
        silent = {peer for peer, sign in signs.items() if sign is None}.difference(mesh.arrived())
        if silent:
            reason = f"{name_ranks(silent)} silent ({mesh.signs.allowed(silent, limit):.1f} s) at {where}"
            mesh.miss(silent, reason, step=step, layer=layer, phase=phase)
        if seconds > 2 * limit and clock - self._compiled > limit:
            # Neither a host nor a device is late, so the delay lies between them.
            reason = f"{name_ranks(mesh.members)} wait for each other's rows ({2 * limit:.1f} s) at {where}"
            raise ExchangeError(mesh.fail(f"{reason}: the network may be down", ranks=mesh.members))

    def fail(self, error: RuntimeError, at: Place) -> NoReturn:
        """Raise ExchangeError for a failed group. If the mesh learns of a lost peer, that is the reason."""
        assert self.mesh is not None
        limit = time.monotonic() + self.mesh.deadline
        try:
            while time.monotonic() < limit:
                self.mesh.check_peers(at)
                time.sleep(_LOOK_S)
            text = str(error).strip().split("\n", 1)[0]
            raise ExchangeError(self.mesh.fail(f"rank {self._rank} cannot move rows at {where_in_step(*at)}: {text}"))
        finally:
            self._end()

    def _end(self) -> None:
        """End the waits of the device, and let it run to its end."""
        self._group.abort()
        limit = time.monotonic() + (0 if self._group.host_waits else _DRAIN_S)
        try:
            while self._marks and time.monotonic() < limit:
                if self._marks[0].moved.has_ended():
                    self._marks.popleft()
                else:
                    time.sleep(_PAUSE_S)
        except RuntimeError as error:  # boundary: a failed device waits for no peer; its error is raised elsewhere
            log.warning("the device has failed: %s", str(error).split("\n", 1)[0])
        self._marks.clear()
