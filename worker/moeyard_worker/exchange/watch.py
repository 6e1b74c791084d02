"""Waiting for exchanges that only the host can end: of whom it is known that they wait, too, and of whom they do not.

A device that waits in a collective knows nothing of others. So hosts tell each other (`Mesh.say`): whoever waits for
half a deadline says that it does, and again as long as it lasts; whoever hears that and waits, too, says so at once.
After a deadline a peer that has not said it, and is not compiling either, has not come so far.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.frames import Phase
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks, where_in_step
from moeyard_worker.exchange.row_group import Moved, RowGroup

log = logging.getLogger(__name__)

# Between two looks at what is waited for, and between two at the mesh meanwhile.
_PAUSE_S, _LOOK_S = 50e-6, 0.01
# Who comes at the last moment has so long to say so.
_GRACE_S = 0.05
# What is left of a step once it waits for nobody.
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """Rows on their way, and for which part of a step."""

    at: tuple[int, int, Phase]
    moved: Moved


class Watch:
    """What one rank's device has not passed yet of what `group` moves, oldest first (`len`), and the wait for it.

    A device that does not come to its next exchange within `seconds` is named by its own rank.
    """

    def __init__(self, group: RowGroup, *, rank: int, seconds: float) -> None:
        self._group, self._rank, self._seconds = group, rank, seconds
        self._marks: deque[_Mark] = deque()
        self._mesh: Mesh | None = None
        # When a peer was last known to compile: the others' rows may have come long before its own.
        self._compiled = 0.0

    def __len__(self) -> int:
        return len(self._marks)

    def begin(self, mesh: Mesh) -> None:
        """Go on over another mesh; what was on its way is forgotten."""
        self._mesh = mesh
        self._marks.clear()

    def add(self, at: tuple[int, int, Phase], moved: Moved) -> None:
        """Rows were launched: of which step, layer and phase."""
        self._marks.append(_Mark(at, moved))

    def until(self, has_run: Callable[[], bool], *, step: int) -> None:
        """Wait, in `step`; raises ExchangeError as soon as it is known to be in vain, and the device waits no more.

        What the host did before it waits, as to compile what comes next, counts for nothing here.
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
                self._look(clock - since, step)
            time.sleep(_PAUSE_S)

    def _progress(self) -> tuple[int, bool]:
        """How many exchanges are ahead of the device, and whether it waits in the first of them."""
        while self._marks and self._marks[0].moved.has_ended():
            mark = self._marks.popleft()
            try:
                mark.moved.check()
            except RuntimeError as error:
                self.fail(error, mark.at)
        return len(self._marks), bool(self._marks) and self._marks[0].moved.has_begun()

    def _look(self, seconds: float, step: int) -> None:
        """Listen to the mesh; the device has been where it is for so long."""
        mesh = self._mesh
        assert mesh is not None, "a step begins after the ranks have met"
        at = self._marks[0].at if self._marks else None
        try:
            mesh.check_peers(at)
            if at is not None and self._marks[0].moved.has_begun():
                self._ask(mesh, seconds, at)
            elif seconds > self._seconds:
                where = f"step {step}" if at is None else where_in_step(*at)
                raise ExchangeError(mesh.fail(f"rank {self._rank} silent ({self._seconds:.1f} s) at {where}"))
        except ExchangeError:
            self.end()
            raise

    def _ask(self, mesh: Mesh, seconds: float, at: tuple[int, int, Phase]) -> None:
        """This rank waits for its peers: tell them, and raise ExchangeError once it is in vain."""
        said, limit, clock = {peer: mesh.signs.of(peer) for peer in mesh.peers}, mesh.deadline, time.monotonic()
        if seconds > limit / 2 or Phase.WAITING in said.values():
            mesh.say(Phase.WAITING)
        if Phase.BUSY in said.values():
            self._compiled = clock
        if seconds < limit + _GRACE_S:
            return
        where, (step, layer, phase) = where_in_step(*at), at
        # Whoever has sent anything that is due later has been here.
        silent = {peer for peer, sign in said.items() if sign is None}.difference(mesh.arrived())
        if silent:
            reason = f"{name_ranks(silent)} silent ({mesh.signs.allowed(silent, limit):.1f} s) at {where}"
            mesh.miss(silent, reason, step=step, layer=layer, phase=phase)
        if seconds > 2 * limit and clock - self._compiled > limit:
            # No host is late, and no device: what is late is between them.
            reason = f"{name_ranks(mesh.members)} wait for each other's rows ({2 * limit:.1f} s) at {where}"
            raise ExchangeError(mesh.fail(f"{reason}: the network may be down", ranks=mesh.members))

    def fail(self, error: RuntimeError, at: tuple[int, int, Phase]) -> NoReturn:
        """The group has failed: a peer's end is the reason, if the mesh learns of one."""
        assert self._mesh is not None
        limit = time.monotonic() + self._mesh.deadline
        try:
            while time.monotonic() < limit:
                self._mesh.check_peers(at)
                time.sleep(_LOOK_S)
            said = str(error).strip().split("\n", 1)[0]
            raise ExchangeError(self._mesh.fail(f"rank {self._rank} cannot move rows at {where_in_step(*at)}: {said}"))
        finally:
            self.end()

    def end(self) -> None:
        """End what the device waits for, and let it run to its end."""
        self._group.abort()
        limit = time.monotonic() + (0 if self._group.host_waits else _DRAIN_S)
        try:
            while self._marks and time.monotonic() < limit:
                if self._marks[0].moved.has_ended():
                    self._marks.popleft()
                else:
                    time.sleep(_PAUSE_S)
        except RuntimeError as error:  # boundary: a device that has failed waits for nobody, and its loop says why
            log.warning("a device that has failed: %s", str(error).split("\n", 1)[0])
        self._marks.clear()
