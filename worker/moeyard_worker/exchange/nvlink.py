"""The exchange of GPUs of one host: launches write rows straight into the memory of peers, and graphs can hold them.

The kernels own the window, the packets and the wait (`moeyard_kernels.types.peer_window`, `experts/peer_exchange.py`).
This file is the host's side: the room for rows, the step and the name of a failure, and how ranks meet again in another
epoch while captured graphs go on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from moeyard_kernels import ops
from moeyard_kernels.types.fetch_window import FetchWindow
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
    open_window,
)
from moeyard_kernels.types.sending import to_device
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import (
    Dispatched,
    ExchangeError,
    ExchangeStats,
    ExchangeSteps,
    ExchangeTraits,
    PeerRows,
)
from moeyard_worker.exchange.frames import Phase
from moeyard_worker.exchange.meeting import gather
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks, where_in_step
from moeyard_worker.exchange.peer_counts import PeerCounts
from moeyard_worker.exchange.peer_fetch import Lending, PeerFetch
from moeyard_worker.exchange.peer_memory import PeerMemory
from moeyard_worker.exchange.shape import ExchangeShape

# Between two looks at a running step, and between two at the mesh meanwhile.
_PAUSE_S, _LOOK_S = 50e-6, 0.01
# The rest of a step after its waits for peers have ended.
_DRAIN_S = 10.0
# A record of a failure is complete after this time.
_WRITTEN_S = 0.001
# Compiled kernels rely on this alignment of each layer's owners.
_ALIGNED = 4


class NvlinkSteps(ExchangeSteps):
    """Steps whose launches wait for peers on the device, while the host listens to the mesh.

    A wait of the device ends after `seconds`, or after a deadline of the mesh unless a peer says that it is slow.
    `drafts`: steps may also have exchanges for drafts, so an exchange's number does not tell its step.
    """

    def __init__(
        self,
        window: PeerWindow,
        *,
        memory: PeerMemory,
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
        # When the host looked last, since when it looks, when a peer was last slow, when it saw a record of a failure.
        self._looked = self._looking = self._slow = self._noticed = 0.0

    def open_epoch(self, mesh: Mesh) -> None:
        super().open_epoch(mesh)
        self._ended, self._noticed = False, 0.0
        mesh.beside = self._look_beside

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
        """Wait for the device and listen to the mesh: a lost peer does not end a wait of the device."""
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
        """Listen to the mesh, and end a wait of the device that has lasted for a deadline, unless a peer was slow.

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
            # The rows came just as the host ended the wait: the next wait is another one.
            fault[ABORT], self._ended = 0, False
        elif waits and not self._ended and now - max(self._looking, self._slow) > mesh.deadline:
            self._ended = True
            self._window.abort()

    def _look_beside(self) -> None:
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


class NvlinkExchange:
    """`Exchange` over memory that all ranks map; `seconds` and `drafts` as of `NvlinkSteps`.

    `lending`: what this rank lends to others that read its missed experts for it, and the memory that they write to;
    None where every rank reads alone. Launches before the first `attach` take no part; they are there to be captured.
    """

    traits = ExchangeTraits(capturable=True)

    def __init__(
        self,
        memory: PeerMemory,
        *,
        rank: int,
        world_size: int,
        shape: ExchangeShape,
        placement: Placement,
        seconds: float,
        drafts: bool = False,
        lending: tuple[Lending, PeerMemory | None] | None = None,
    ) -> None:
        self.rank, self.world_size, self.stats = rank, world_size, ExchangeStats()
        self._memory = memory
        self._experts = shape.num_experts
        device, width = memory.own.device, -(-shape.num_experts // _ALIGNED) * _ALIGNED
        # [2, L, E, 2]: owner and local id of each layer's experts, by turns. Captured graphs read it in place.
        self._tables = torch.zeros(2, len(placement.layers), width, 2, dtype=torch.int32, device=device)
        window = open_window(
            shape.window(world_size),
            [memory.own] * world_size,
            rank=rank,
            dtype=getattr(torch, shape.dtype),
            owner=(),
            local=(),
            seconds=seconds,
        )
        window.views(rank).ids.fill_(-1)
        window.poison()
        self._window, self._layers = window, placement.layers
        self._fetch = None if lending is None else PeerFetch(lending[1], lending[0], window)
        self._map_layers()
        self._write_owners(placement)
        self._max_rows = 1
        self._prompt: torch.Tensor | None = None
        self.steps = NvlinkSteps(
            window,
            memory=memory,
            stats=self.stats,
            num_layers=len(placement.layers),
            seconds=seconds,
            drafts=drafts,
            fetch=self._fetch,
            on_rows=self._set_rows,
        )

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """Have all ranks meet; launches take part from here on. Raises ValueError for a placement on fewer ranks."""
        if mesh.members != tuple(range(self.world_size)) or placement.num_experts != self._experts:
            raise ValueError(f"the nvlink exchange is one of {self.world_size} ranks, these are {mesh.members}")
        self.steps.open_epoch(mesh)
        # Launches of the previous epoch have ended on all ranks before any memory is reset.
        self._memory.drain()
        mapped = self._memory.meet(mesh)
        self._window = replace(self._window, memory=tuple(mapped))
        # Captured graphs find peers and owners here.
        self._window.table.copy_(torch.tensor([each.data_ptr() for each in mapped], dtype=torch.int64))
        self._write_owners(placement)
        if self._fetch is not None:
            self._fetch.meet(mesh)
        self._map_layers()
        self._window.reset()
        self._memory.drain()
        # No rank writes to a peer before that peer has reset its memory.
        gather(mesh, b"")

    def _map_layers(self) -> None:
        """Make each layer's windows: with its owners, and for reading missed experts together if this rank does."""
        owner, local = self._tables[:, :, : self._experts]
        self._windows = {
            layer: replace(self._window, owner=owner[i], local=local[i]) for i, layer in enumerate(self._layers)
        }
        fetch = None if self._fetch is None else self._fetch.window
        self._fetches: dict[int, FetchWindow] = {}
        if fetch is not None:
            self._fetches = {layer: replace(fetch, layer=layer) for layer in self._layers}

    def _write_owners(self, placement: Placement) -> None:
        """Write the placement into the tables."""
        has = [placement.experts(rank) for rank in range(self.world_size)]
        owner, local = [], []
        for i, row in enumerate(placement.owners):
            second = dict(placement.copies_of(i))
            number = [{expert: place for place, expert in enumerate(layers[i])} for layers in has]
            owner.append([(rank, second.get(expert, rank)) for expert, rank in enumerate(row)])
            local.append([[number[rank][expert] for rank in ranks] for expert, ranks in enumerate(owner[i])])
        self._tables[:, :, : self._experts].copy_(torch.tensor([owner, local], dtype=torch.int32))

    def _set_rows(self, rows: PeerRows) -> None:
        """Send the prompt flags to the device. A captured step keeps the rows of its capture, and has no prompts.

        More rows than the window holds are an assertion: no step is planned with more (`memory.exchange_shape`).
        """
        assert rows.most <= self._window.shape.max_tokens, f"{rows} of {self._window.shape.max_tokens}"
        self._max_rows, self._prompt = max(1, rows.most), None
        if any(rows.prompts):
            prompt = torch.arange(self._max_rows)[:, None] < torch.tensor(rows.prompts)
            self._prompt = to_device(prompt.flatten(), self._memory.own.device)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """Row t of rank s is row t * W + s. The host does not wait."""
        assert self.steps.rows is not None, f"dispatch of layer {layer} before `set_rows` of its step"
        self.steps.enter(layer)
        rows, experts = ops.dispatch_rows(x, topk_ids, self._windows[layer], layer=layer, max_rows=self._max_rows)
        return Dispatched(
            rows=rows,
            experts=experts,
            prompt=self._prompt,
            handle=(layer, topk_ids.shape[0]),
            num_owners=self.world_size,
            expert_fetch=self._fetches.get(layer),
            result_window=self._windows[layer],
        )

    def combine(self, expert_out: torch.Tensor | None, handle: tuple[int, int]) -> torch.Tensor:
        layer, num_tokens = handle
        self.steps.leave(layer)
        rows = None if expert_out is None else expert_out.flatten(0, 1)
        return ops.combine_rows(rows, self._windows[layer], layer=layer, num_tokens=num_tokens, max_rows=self._max_rows)

    def close(self) -> None:
        """End all waits; memory is freed with the tensors."""
        self.steps.abort()
