"""Ranks of a host that read for each other what they miss of their experts, as far as the host's side knows of it.

Each lends the memory in which it keeps all its experts. When ranks meet they tell each other where that is, and each
maps that of all others; if one cannot, or has nothing to lend, all read alone. What the device does with it is the
kernels' (`moeyard_kernels.types.fetch_window`).
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
from moeyard_worker.exchange.meeting import gather
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks
from moeyard_worker.exchange.peer_memory import PeerMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What a rank brings: `lent` is its memory, None where it `misses` no expert or cannot lend. With `required` an
    epoch in which ranks cannot read for each other ends."""

    shape: FetchShape
    lent: LentMemory | None
    misses: bool
    required: bool


class PeerFetch:
    """A rank's part in it, over the `window` of its rows; `memory` is what peers write to, None if it lends nothing.

    Until ranks have met, and in every epoch in which they cannot, `window` says that each reads alone: what was
    captured with it asks the device.
    """

    def __init__(self, memory: PeerMemory | None, lending: Lending, peer: PeerWindow) -> None:
        self._memory, self._lending, self._device = memory, lending, peer.state.device
        self.window: FetchWindow | None = None
        if memory is not None:
            self.window = open_fetch(lending.shape, [memory.own] * peer.shape.world_size, peer)
        self._borrowed: dict[int, BorrowedMemory] = {}

    def meet(self, mesh: Mesh) -> None:
        """All ranks call it when nothing runs on their devices: they agree whether they share, and are as new.

        Raises ExchangeError if a rank that has to share cannot.
        """
        own = self._lending
        word = (own.misses, None if own.lent is None else astuple(own.lent))
        words = [msgpack.unpackb(each) for each in gather(mesh, msgpack.packb(word))]
        if not any(misses for misses, _ in words):
            return
        failed = [rank for rank, (_, lent) in enumerate(words) if lent is None]
        why = "all experts have slots there"
        if any(words[rank][0] for rank in failed):
            why = "CUDA cannot pin memory there that others may map"
        if not failed:
            # By name, as fields are told in their order.
            names = LentMemory.__dataclass_fields__
            lent = [LentMemory(**dict(zip(names, each, strict=True))) for _, each in words]
            own_word = self._borrow(mesh.rank, lent)
            told = [each.decode() for each in gather(mesh, own_word.encode())]
            failed = [rank for rank, each in enumerate(told) if each]
            why = told[failed[0]] if failed else ""
        if failed:
            self._part(mesh, failed, why)
            return
        assert self._memory is not None
        assert self.window is not None
        mapped = self._memory.meet(mesh)
        self.window = replace(self.window, memory=tuple(mapped))
        self.window.table.copy_(torch.tensor([each.data_ptr() for each in mapped], dtype=torch.int64))
        # Its own it has as a tensor.
        stores = [self._borrowed[rank].address if rank in self._borrowed else 0 for rank in range(len(words))]
        self.window.stores.copy_(torch.tensor(stores, dtype=torch.int64))
        self.window.reset()
        self.window.share(True)
        log.info("rank %d: missed experts are read over the links of all %d ranks", mesh.rank, len(words))

    def forget(self, ranks: Iterable[int]) -> None:
        """Give back what these have lent, which nothing reads any more: a successor needs the room in the host."""
        for rank in ranks:
            if (borrowed := self._borrowed.pop(rank, None)) is not None:
                borrowed.close()

    def _borrow(self, own: int, lent: list[LentMemory]) -> str:
        """Map what others lend, if it is not mapped already; what keeps one from it, or nothing."""
        for rank, each in enumerate(lent):
            if rank == own or (rank in self._borrowed and self._borrowed[rank].lent == each):
                continue
            self.forget([rank])
            try:
                self._borrowed[rank] = BorrowedMemory(each, self._device)
            except ValueError as error:
                return str(error)
        return ""

    def _part(self, mesh: Mesh, ranks: list[int], why: str) -> None:
        """Read alone in this epoch, because of these."""
        reason = f"{name_ranks(ranks)}: {why}"
        if self._lending.required:
            words = f"--expert-fetch shared cannot be: {reason}; use --expert-fetch alone"
            raise ExchangeError(mesh.fail(words, ranks=ranks))
        log.warning("rank %d: every rank reads the experts that it misses alone: %s", mesh.rank, reason)
        self.forget(list(self._borrowed))
        if self.window is not None:
            self.window.share(False)
