"""The exchange of GPUs of one host: rows are put straight into the memory of peers, in launches that a graph can hold.

The window, the packets and the wait are the kernels' (`moeyard_kernels.types.peer_window`, `experts/peer_exchange.py`);
here is what the host knows of them: how many rows there is room for, which step a failure belongs to and what all ranks
call it, and how ranks meet again in another epoch while what was captured goes on.
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
from moeyard_worker.exchange.base import Dispatched, ExchangeError, ExchangeStats, PeerRows
from moeyard_worker.exchange.frames import Phase
from moeyard_worker.exchange.meeting import gather
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks, where_in_step
from moeyard_worker.exchange.peer_counts import PeerCounts
from moeyard_worker.exchange.peer_fetch import Lending, PeerFetch
from moeyard_worker.exchange.peer_memory import PeerMemory
from moeyard_worker.exchange.shape import ExchangeShape

# Between two looks at a step that runs, and between two at the mesh meanwhile.
_PAUSE_S, _LOOK_S = 50e-6, 0.01
# What is left of a step once it waits for nobody.
_DRAIN_S = 10.0
# By then a record of a failure is whole.
_WRITTEN_S = 0.001
# Owners of a layer begin at multiples of so many: what compiled kernels count on.
_ALIGNED = 4


class NvlinkExchange:
    """`Exchange` over memory that all ranks map. A wait of the device ends after `seconds`, or after a deadline of the
    mesh unless a peer says that it is slow. `drafts`: whether steps may have exchanges for drafts too. `lending`: what
    this rank lends to others that read for it what it misses, and the memory that they put it into; None where every
    rank reads alone.

    What is launched before the first `attach` takes no part: it is there to be captured.
    """

    captures = True
    of_epoch = None
    warms = True
    places_rows = True
    stays = False

    def __init__(
        self, memory: PeerMemory, *, rank: int, world_size: int, shape: ExchangeShape, placement: Placement,
        seconds: float, drafts: bool = False, lending: tuple[Lending, PeerMemory | None] | None = None,
    ) -> None:  # fmt: skip
        self._drafts = drafts
        self.rank, self.world_size, self.stats = rank, world_size, ExchangeStats()
        self._memory, self._seconds = memory, seconds
        self._experts = shape.num_experts
        device, width = memory.own.device, -(-shape.num_experts // _ALIGNED) * _ALIGNED
        # [2, L, E, 2]: owner and number of each layer's experts, by turns; where they are for what was captured.
        self._tables = torch.zeros(2, len(placement.layers), width, 2, dtype=torch.int32, device=device)
        window = open_window(
            shape.window(world_size), [memory.own] * world_size, rank=rank, dtype=getattr(torch, shape.dtype),
            owner=(), local=(), seconds=seconds,
        )  # fmt: skip
        window.views(rank).ids.fill_(-1)
        window.poison()
        self._window, self._layers = window, placement.layers
        self._fetch = None if lending is None else PeerFetch(lending[1], lending[0], window)
        self._fetches = self._of_fetch()
        self._counts = PeerCounts(window.views(rank).counts, self.stats)
        self._windows = self._of_layers()
        self._place(placement)
        self._mesh: Mesh | None = None
        # The steps that the device's first exchange of this epoch and its last belong to; 0: none has begun.
        self._first_step = self._last_step = 0
        # Whether the host has ended a wait of the device after a deadline.
        self._ended = False
        # When it looked last, since when it has, when a peer was last known to be slow, and a record of a failure seen.
        self._looked = self._looking = self._slow = self._noticed = 0.0
        self._rows = PeerRows(1)
        self._prompt: torch.Tensor | None = None

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """See `Exchange.attach`: all ranks meet, and what is launched from here on takes part.

        Raises ExchangeError naming who is not there, ValueError for a placement on fewer ranks.
        """
        if mesh.members != tuple(range(self.world_size)) or placement.num_experts != self._experts:
            raise ValueError(f"the nvlink exchange is one of {self.world_size} ranks, these are {mesh.members}")
        self._mesh, mesh.beside = mesh, self._look_beside
        self._ended, self._noticed = False, 0.0
        # What ran in the epoch before has ended everywhere before anybody's memory is as new.
        self._memory.drain()
        mapped = self._memory.meet(mesh)
        self._window = replace(self._window, memory=tuple(mapped))
        self._windows = self._of_layers()
        # What was captured finds peers and owners here.
        self._window.table.copy_(torch.tensor([each.data_ptr() for each in mapped], dtype=torch.int64))
        self._place(placement)
        if self._fetch is not None:
            self._fetch.meet(mesh)
            self._fetches = self._of_fetch()
        self._window.reset()
        self._memory.drain()
        self._first_step = 0
        # Nobody writes to a peer that is not as new.
        gather(mesh, b"")

    def _of_layers(self) -> dict[int, PeerWindow]:
        """The window with each layer's owners."""
        owner, local = self._tables[:, :, : self._experts]
        return {
            layer: replace(self._window, owner=owner[i], local=local[i]) for i, layer in enumerate(self._layers)
        }  # fmt: skip

    def _of_fetch(self) -> dict[int, FetchWindow]:
        """What ranks fetch through, by layer; nothing where this one misses nothing or reads alone for good."""
        window = None if self._fetch is None else self._fetch.window
        return {} if window is None else {layer: replace(window, layer=layer) for layer in self._layers}

    def _place(self, placement: Placement) -> None:
        """Write down who owns what."""
        has = [placement.experts(rank) for rank in range(self.world_size)]
        owner, local = [], []
        for i, row in enumerate(placement.owners):
            second = dict(placement.copies_of(i))
            number = [{expert: place for place, expert in enumerate(layers[i])} for layers in has]
            owner.append([(rank, second.get(expert, rank)) for expert, rank in enumerate(row)])
            local.append([[number[rank][expert] for rank in ranks] for expert, ranks in enumerate(owner[i])])
        self._tables[:, :, : self._experts].copy_(torch.tensor([owner, local], dtype=torch.int32))

    def begin_step(self, step: int) -> None:
        """See `Exchange.begin_step`."""
        self._first_step, self._last_step = self._first_step or step, step

    def expect(self, rows: PeerRows) -> None:
        """See `Exchange.expect`. A captured step keeps what was said when it was captured, and is told of no prompts.

        More rows than the window holds are an assertion: no step is planned with more (`memory.exchange_shape`).
        """
        assert rows.most <= self._window.shape.max_tokens, f"{rows} of {self._window.shape.max_tokens}"
        self._rows, self._prompt = PeerRows(max(1, rows.most), rows.prompts), None
        if any(rows.prompts):
            of_source = torch.tensor(rows.prompts)
            prompt = torch.arange(self._rows.most)[:, None] < of_source
            self._prompt = to_device(prompt.flatten(), self._memory.own.device)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """See `Exchange.dispatch`: row t of rank s is row t * W + s. Nothing waits for the host."""
        rows, experts = ops.dispatch_rows(x, topk_ids, self._windows[layer], layer=layer, max_rows=self._rows.most)
        return Dispatched(
            rows=rows, experts=experts, prompt=self._prompt, handle=(layer, topk_ids.shape[0]), one_in=self.world_size,
            fetch=self._fetches.get(layer), home=self._windows[layer],
        )  # fmt: skip

    def combine(self, expert_out: torch.Tensor | None, handle: tuple[int, int]) -> torch.Tensor:
        """See `Exchange.combine`."""
        layer, num_tokens = handle
        rows = None if expert_out is None else expert_out.flatten(0, 1)
        return ops.combine_rows(
            rows, self._windows[layer], layer=layer, num_tokens=num_tokens, max_rows=self._rows.most
        )  # fmt: skip

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        """See `Exchange.finish_step`: the mesh is listened to, as a peer that is gone ends no wait of the device."""
        self._listen(has_run)
        self._check(step)
        self._counts.look()

    def _listen(self, has_run: Callable[[], bool]) -> None:
        """Wait for the device, and end its waits for peers where they are in vain."""
        assert self._mesh is not None, "a step begins after the ranks have met"
        try:
            while not has_run():
                time.sleep(_PAUSE_S)
                # Also between waits that are short, one behind the other.
                if time.monotonic() - self._looked > _LOOK_S:
                    self._end_wait_in_vain()
        except ExchangeError:
            self.abort()
            limit, has_run = time.monotonic() + _DRAIN_S, self._memory.mark()
            while not has_run() and time.monotonic() < limit:
                time.sleep(_PAUSE_S)
            raise

    def _end_wait_in_vain(self) -> None:
        """Listen to the mesh; end a wait of the device that has lasted for a deadline, unless a peer was slow in it.

        What was said while the host was elsewhere it may not have heard: that time counts for nothing.
        """
        mesh, now = self._mesh, time.monotonic()
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
            # What was waited for came as the host said so: the next wait is another one.
            fault[ABORT], self._ended = 0, False
        elif waits and not self._ended and now - max(self._looking, self._slow) > mesh.deadline:
            self._ended = True
            self._window.abort()

    def _look_beside(self) -> None:
        """What the device has found is heard, too, while the host waits for a peer's plan, which may never come."""
        self._end_wait_in_vain()
        if not self._window.fault[FAILED]:
            return
        now = time.monotonic()
        self._noticed = self._noticed or now
        # What is half written down is whole a little later.
        if now - self._noticed > _WRITTEN_S:
            self._check(self._last_step)

    def _check(self, step: int) -> None:
        """Raise what the device has written down of this step or one before."""
        record = self._window.fault.tolist()
        phase, layer, bits, number, reason = (record[field] for field in (PHASE, LAYER, RANKS, EPOCH, REASON))
        # The step behind this one may be failing now: what is half written down is read when that one is finished.
        if not record[FAILED] or not number:
            return
        failed_at = self._first_step + (number - 1) // len(self._windows)
        if failed_at > step and not self._drafts:
            return
        # With drafts steps have exchanges of different numbers. It is then this step's, at the latest.
        failed_at = step if self._drafts else failed_at
        assert self._mesh is not None
        # If others have said by now what happened, that counts.
        self._mesh.check_peers()
        ranks = [rank for rank in range(self.world_size) if bits >> rank & 1]
        named = {COMBINE: Phase.COMBINE, FETCH: Phase.FETCH}.get(phase, Phase.DISPATCH)
        seconds = self._mesh.deadline if self._ended else self._seconds
        what = f"silent ({seconds:.1f} s)" if reason == SILENT else "sent more rows than were agreed on"
        where = where_in_step(failed_at, layer, named)
        self._mesh.miss(ranks, f"{name_ranks(ranks)} {what} at {where}", step=failed_at, layer=layer, phase=named)

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """See `Exchange.drain`: a wait of the device ends by itself, but late where the host may have to end it."""
        if self._mesh is None or (has_run is not None and has_run()):
            return
        self._listen(has_run or self._memory.mark())
        if self._window.fault[FAILED]:
            # Of a step behind this one it may be half written down.
            time.sleep(_WRITTEN_S)
            self._check(self._last_step)

    def abort(self, lost: Sequence[int] = ()) -> None:
        """See `Exchange.abort`."""
        self._window.abort()
        if self._fetch is not None and lost:
            # What reads of theirs ends by itself, now that it waits for nobody.
            self._memory.drain()
            self._fetch.forget(lost)

    def close(self) -> None:
        """See `Exchange.close`: memory is given back with the tensors, and with the process."""
        self.abort()
