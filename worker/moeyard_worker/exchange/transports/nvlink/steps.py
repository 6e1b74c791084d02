"""The life of steps over NVLink: waits of the device for peers, their failures, and the device's counts."""

import time
from collections.abc import Callable, Sequence

import torch

from moeyard_kernels.types.peer_shape import KEPT_TIMES, NUM_TIMES, RECEIVED, SENT, TIMES
from moeyard_kernels.types.peer_window import (
    ABORT,
    COMBINE,
    EPOCH,
    FAILED,
    FETCH,
    LAYER,
    PHASE,
    RANKS,
    REASON,
    SILENT,
    SPENT,
    PeerWindow,
)
from moeyard_worker.exchange.base import ExchangeError, ExchangeStats, ExchangeSteps, PeerRows
from moeyard_worker.exchange.membership.agreement import name_ranks, where_in_step
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.nvlink.expert_fetch import PeerFetch
from moeyard_worker.exchange.transports.nvlink.memory import GpuMemory

# Seconds between two looks at a running step, and between two looks at the mesh meanwhile.
_PAUSE_S, _LOOK_S = 50e-6, 0.01
# The rest of a step after its waits for peers have ended.
_DRAIN_S = 10.0
# A record of a failure is complete after this time.
_WRITTEN_S = 0.001
LOOK_SECONDS = 0.2  # between two looks at a device's counts


class NvlinkSteps(ExchangeSteps):
    """Steps whose launches wait for peers on the device, while the host listens to the mesh.

    A wait of the device ends after `seconds`, or after a deadline of the mesh unless a peer says that it is slow.
    `drafts`: steps may also have exchanges for drafts, so an exchange's number does not tell its step.
    """

    def __init__(
        self,
        window: PeerWindow,
        *,
        memory: GpuMemory,
        stats: ExchangeStats,
        num_layers: int,
        seconds: float,
        drafts: bool,
        fetch: PeerFetch | None,
        on_rows: Callable[[PeerRows], None],
    ) -> None:
        super().__init__(on_rows)
        # Its fault record and state are the same tensors in every epoch.
        self._window, self._memory, self._fetch = window, memory, fetch
        self._num_layers, self._seconds, self._drafts = num_layers, seconds, drafts
        self.counts = PeerCounts(window.views(window.rank).counts, stats)
        # Whether the host has ended a wait of the device after a deadline.
        self._ended = False
        # Times: of the last look, of the first look without a gap, of the last slow peer, of the first failure record.
        self._looked = self._looking = self._slow = self._noticed = 0.0

    def open_epoch(self, mesh: Mesh) -> None:
        super().open_epoch(mesh)
        self._ended, self._noticed = False, 0.0
        mesh.while_waiting = self._look_while_waiting

    def finish(self, step: int, has_run: Callable[[], bool]) -> None:
        super().finish(step, has_run)
        self._listen(has_run)
        self._check(step)
        self.counts.look()

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        if self.mesh is None or (has_run is not None and has_run()):
            return
        self._listen(has_run or self._memory.mark())
        if self._window.fault[FAILED]:
            # The record of a later step may be incomplete.
            time.sleep(_WRITTEN_S)
            self._check(self.step)

    def abort(self, lost: Sequence[int] = ()) -> None:
        self._window.abort()
        if self._fetch is not None and lost:
            # Reads of a lost rank's memory end by themselves, as they no longer wait for a peer.
            self._memory.drain()
            self._fetch.forget(lost)

    def _listen(self, has_run: Callable[[], bool]) -> None:
        """Wait for the device and check the mesh meanwhile, because a lost peer does not end a wait of the device."""
        assert self.mesh is not None, "a step begins after the ranks have met"
        try:
            while not has_run():
                time.sleep(_PAUSE_S)
                # The interval also spans short waits that follow one another.
                if time.monotonic() - self._looked > _LOOK_S:
                    self._end_vain_wait()
        except ExchangeError:
            self.abort()
            limit, has_run = time.monotonic() + _DRAIN_S, self._memory.mark()
            while not has_run() and time.monotonic() < limit:
                time.sleep(_PAUSE_S)
            raise

    def _end_vain_wait(self) -> None:
        """Check the mesh, and end a wait of the device that has lasted for a deadline, unless a peer was slow.

        The host may have missed messages while it was busy elsewhere, so that time does not count.
        """
        mesh, now = self.mesh, time.monotonic()
        assert mesh is not None
        mesh.check_peers()
        if now - self._looked > mesh.deadline / 2:
            self._looking = now
        if any(mesh.signs.of(peer) is Phase.BUSY for peer in mesh.peers):
            self._slow = now
        self._looked, fault = now, self._window.fault
        if fault[FAILED]:
            return
        waits = int(fault[SPENT]) > mesh.deadline * 1e9
        if self._ended and not fault[SPENT]:
            # The rows arrived just as the host ended the wait. The next wait is a new one.
            fault[ABORT], self._ended = 0, False
        elif waits and not self._ended and now - max(self._looking, self._slow) > mesh.deadline:
            self._ended = True
            self._window.abort()

    def _look_while_waiting(self) -> None:
        """Look at the device while the host waits for a peer's plan, which may never come."""
        self._end_vain_wait()
        if not self._window.fault[FAILED]:
            return
        now = time.monotonic()
        self._noticed = self._noticed or now
        if now - self._noticed > _WRITTEN_S:
            self._check(self.step)

    def _check(self, step: int) -> None:
        """Raise ExchangeError for a failure that the device has recorded in this step or an earlier one."""
        record = self._window.fault.tolist()
        phase, layer, bits, number, reason = (record[field] for field in (PHASE, LAYER, RANKS, EPOCH, REASON))
        # A later step may be failing now: its incomplete record is read when that step is finished.
        if not record[FAILED] or not number:
            return
        failed_at = self._first + (number - 1) // self._num_layers
        if failed_at > step and not self._drafts:
            return
        # With drafts, steps have different numbers of exchanges. The failure belongs to this step at the latest.
        failed_at = step if self._drafts else failed_at
        assert self.mesh is not None
        # A failure that others have named meanwhile takes precedence.
        self.mesh.check_peers()
        ranks = [rank for rank in range(self._window.shape.world_size) if bits >> rank & 1]
        named = {COMBINE: Phase.COMBINE, FETCH: Phase.FETCH}.get(phase, Phase.DISPATCH)
        seconds = self.mesh.deadline if self._ended else self._seconds
        what = f"silent ({seconds:.1f} s)" if reason == SILENT else "sent more rows than were agreed on"
        where = where_in_step(failed_at, layer, named)
        self.mesh.miss(ranks, f"{name_ranks(ranks)} {what} at {where}", step=failed_at, layer=layer, phase=named)


class PeerCounts:
    """Updates `stats` from `live`, the counts of this rank's window (`peer_shape`), without waiting for the device.

    The counts of a GPU are those of the previous look, because the copy of one look is read at the next.
    """

    def __init__(self, live: torch.Tensor, stats: ExchangeStats) -> None:
        self._live, self._stats = live, stats
        self._seen = torch.zeros_like(live, device="cpu", pin_memory=live.is_cuda)
        self._copied = torch.cuda.Event() if live.is_cuda else None
        self._looked = 0.0
        # By phase, how many times have been read.
        self._num_read = [0, 0]

    def look(self, *, wait: bool = False) -> None:
        """Update to the counts of the last look, if that is LOOK_SECONDS ago; with `wait`, to those of now."""
        now = time.monotonic()
        if not wait and now < self._looked + LOOK_SECONDS:
            return
        if self._copied is None or wait:
            self._seen.copy_(self._live)
        elif not self._copied.query():
            return
        self._looked = now
        self._update(self._seen.tolist())
        if self._copied is not None:
            self._seen.copy_(self._live, non_blocking=True)
            self._copied.record()

    def _update(self, counts: list[int]) -> None:
        self._stats.bytes_sent, self._stats.bytes_received = counts[SENT], counts[RECEIVED]
        for phase, name in enumerate(("dispatch", "combine")):
            number, first = counts[NUM_TIMES + phase], TIMES + phase * KEPT_TIMES
            # The device has overwritten older times.
            for i in range(max(self._num_read[phase], number - KEPT_TIMES), number):
                self._stats.seconds[name].append(counts[first + i % KEPT_TIMES] * 1e-9)
            self._num_read[phase] = number
