"""Shared expert fetch, the host's side: ranks of a host read missed experts for each other.

Each rank shares the host memory that holds all its experts. When ranks meet, they exchange its location, and each maps
the memory of all others. If one cannot, or has nothing to share, every rank reads alone. The kernels do the rest
(`moeyard_kernels.types.fetch_window`).
"""

import logging
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import msgpack
import torch

from moeyard_kernels.host_memory import BorrowedMemory
from moeyard_kernels.types.fetch_window import FetchWindow, open_fetch
from moeyard_kernels.types.peer_shape import FetchShape, LentMemory
from moeyard_kernels.types.peer_window import PeerWindow
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.agreement import name_ranks
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.nvlink.memory import GpuMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOffer:
    """A rank's offer to its peers.

    memory: host memory that holds all its experts; None if it misses none or cannot share it.
    misses: whether this rank misses experts.
    required: whether an epoch ends if ranks cannot read for each other.
    """

    shape: FetchShape
    memory: LentMemory | None
    misses: bool
    required: bool


class PeerFetch:
    """A rank's side of shared fetch.

    memory: where peers write; None if this rank lends nothing.
    peer: this rank's row window.
    window: None without `memory`. Until ranks have met, and in every epoch in which they cannot share, it tells the
        kernels that each rank reads alone. Captured graphs read that from the device.
    """

    def __init__(self, memory: GpuMemory | None, offer: FetchOffer, peer: PeerWindow) -> None:
        self._memory, self._offer, self._device = memory, offer, peer.state.device
        self.window: FetchWindow | None = None
        if memory is not None:
            self.window = open_fetch(offer.shape, [memory.own] * peer.shape.world_size, peer)
        self._borrowed: dict[int, BorrowedMemory] = {}

    def meet(self, mesh: Mesh) -> None:
        """Agree with all ranks whether to share, and reset the window; nothing may run on the devices.

        Raises ExchangeError if a rank that has to share cannot.
        """
        own = self._offer
        sizes = (own.shape.up_bytes, own.shape.down_bytes)
        payload = msgpack.packb((own.misses, None if own.memory is None else astuple(own.memory), sizes))
        offers = [msgpack.unpackb(each) for each in mesh.gather(payload)]
        if not any(misses for misses, *_ in offers):
            return
        failed = [rank for rank, (_, memory, _) in enumerate(offers) if memory is None]
        why = "all experts have slots there"
        if any(offers[rank][0] for rank in failed):
            why = "CUDA cannot pin memory there that others may map"
        if not failed:
            # A rank that begins after files have changed may hold the scales of fp8 codes in another dtype.
            failed = [rank for rank, (*_, sizes) in enumerate(offers) if sizes != offers[0][2]]
            why = "experts take other bytes there"
        if not failed:
            # Fields were sent in their order.
            names = LentMemory.__dataclass_fields__
            memories = [LentMemory(**dict(zip(names, each, strict=True))) for _, each, _ in offers]
            own_error = self._borrow(mesh.rank, memories)
            errors = [each.decode() for each in mesh.gather(own_error.encode())]
            failed = [rank for rank, error in enumerate(errors) if error]
            why = errors[failed[0]] if failed else ""
        if failed:
            self._part(mesh, failed, why)
            return
        assert self._memory is not None
        assert self.window is not None
        mapped = self._memory.meet(mesh)
        self.window = replace(self.window, memory=tuple(mapped))
        self.window.table.copy_(torch.tensor([each.data_ptr() for each in mapped], dtype=torch.int64))
        # A rank reads its own store by a tensor, not by address.
        stores = [self._borrowed[rank].address if rank in self._borrowed else 0 for rank in range(len(offers))]
        self.window.stores.copy_(torch.tensor(stores, dtype=torch.int64))
        self.window.reset()
        self.window.share(True)
        log.info("rank %d: missed experts are read over the links of all %d ranks", mesh.rank, len(offers))

    def forget(self, ranks: Iterable[int]) -> None:
        """Unmap the memory of lost ranks. Nothing reads it any more, and a successor needs the host's memory."""
        for rank in ranks:
            if (borrowed := self._borrowed.pop(rank, None)) is not None:
                borrowed.close()

    def _borrow(self, own: int, memories: list[LentMemory]) -> str:
        """Map the memory that others lend, unless it is mapped already. Return the error that prevents it, or ""."""
        for rank, each in enumerate(memories):
            if rank == own or (rank in self._borrowed and self._borrowed[rank].lent == each):
                continue
            self.forget([rank])
            try:
                self._borrowed[rank] = BorrowedMemory(each, self._device)
            except ValueError as error:
                return str(error)
        return ""

    def _part(self, mesh: Mesh, ranks: list[int], why: str) -> None:
        """Read alone in this epoch, because of `ranks`."""
        reason = f"{name_ranks(ranks)}: {why}"
        if self._offer.required:
            text = f"--expert-fetch shared cannot be: {reason}; use --expert-fetch alone"
            raise ExchangeError(mesh.fail(text, ranks=ranks))
        log.warning("rank %d: every rank reads the experts that it misses alone: %s", mesh.rank, reason)
        self.forget(list(self._borrowed))
        if self.window is not None:
            self.window.share(False)
