"""The exchange of GPUs of one host: launches write rows straight into the memory of peers, and graphs can hold them.

The kernels own the window, the packets and the wait (`moeyard_kernels.types.peer_window`, `experts/peer_exchange.py`).
This file is the host's side: room for rows, steps, names of failures, and the start of a new epoch while captured
graphs stay valid.
"""

from dataclasses import replace

import torch

from moeyard_kernels import ops
from moeyard_kernels.types.fetch_window import FetchWindow
from moeyard_kernels.types.peer_window import open_window
from moeyard_kernels.types.sending import to_device
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeStats, ExchangeTraits, PeerRows
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.nvlink.expert_fetch import FetchOffer, PeerFetch
from moeyard_worker.exchange.transports.nvlink.memory import GpuMemory
from moeyard_worker.exchange.transports.nvlink.steps import NvlinkSteps

# Compiled kernels rely on this alignment of each layer's owners.
_ALIGNED = 4


class NvlinkExchange:
    """`Exchange` over memory that all ranks map. Launches before the first `attach` move nothing: graphs capture them.

    seconds, drafts: as in `NvlinkSteps`.
    fetch: this rank's offer to peers that read its missed experts for it, and the memory that they write to. None if
        every rank reads alone.
    """

    traits = ExchangeTraits(capturable=True)

    def __init__(
        self,
        memory: GpuMemory,
        *,
        rank: int,
        world_size: int,
        shape: ExchangeShape,
        placement: Placement,
        seconds: float,
        drafts: bool = False,
        fetch: tuple[FetchOffer, GpuMemory | None] | None = None,
    ) -> None:
        self.rank, self.world_size, self.stats = rank, world_size, ExchangeStats()
        self._memory = memory
        self._experts = shape.num_experts
        device, width = memory.own.device, -(-shape.num_experts // _ALIGNED) * _ALIGNED
        # [2, L, E, 2]: owner and local id of each layer's experts, by turn. Captured graphs read it in place.
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
        self._fetch = None if fetch is None else PeerFetch(fetch[1], fetch[0], window)
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
        """Have all ranks meet. From here on launches move rows. Raises ValueError for a placement on fewer ranks."""
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
        mesh.gather(b"")

    def _map_layers(self) -> None:
        """Make each layer's windows: one with its owners, and one for shared expert fetch if this rank takes part."""
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
