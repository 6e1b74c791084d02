"""Memory of a GPU that all ranks of its host map: this rank's own, and where it sees that of the others."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from moeyard_kernels.peers import Peers
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.meeting import MeshStore, gather
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks


class PeerMemory(Protocol):
    """What `NvlinkExchange` asks for memory."""

    own: torch.Tensor

    def drain(self) -> None:
        """Wait until everything that was launched on this device has run."""
        ...

    def mark(self) -> Callable[[], bool]:
        """What says, without waiting, whether what this thread has launched so far has run."""
        ...

    def meet(self, mesh: Mesh) -> Sequence[torch.Tensor]:
        """The memory of all ranks as this device sees it; all ranks call it, and none returns before all have.

        Raises ExchangeError with who cannot be reached, and why.
        """
        ...


class GpuMemory:
    """Of one GPU: torch's symmetric memory. `own` is uint8 [num_bytes], zero at first, and stays where it is. All
    ranks have it under one `name`.

    Raises RuntimeError where torch cannot share memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, name: str = "moeyard") -> None:
        self._peers = Peers(device)
        self.own = self._peers.own_memory(num_bytes)
        self._device, self._name = device, name

    def drain(self) -> None:
        """See `PeerMemory.drain`."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> Callable[[], bool]:
        """See `PeerMemory.mark`."""
        event = torch.cuda.Event()
        event.record()
        return event.query

    def meet(self, mesh: Mesh) -> list[torch.Tensor]:
        """See `PeerMemory.meet`."""
        if mesh.world_size == 1:
            return [self.own]
        self._check(mesh)
        # A name of its own for every epoch: torch maps nothing anew under one it knows.
        return self._peers.map_peers(
            self.own, rank=mesh.rank, world_size=mesh.world_size, store=MeshStore(mesh),
            name=f"{self._name}-{mesh.epoch}",
        )  # fmt: skip

    def _check(self, mesh: Mesh) -> None:
        """Raise ExchangeError where two ranks have one GPU: torch would say it in other words."""
        gpus = [
            word.decode() for word in gather(mesh, str(torch.cuda.get_device_properties(self._device).uuid).encode())
        ]
        for gpu in gpus:
            ranks = [rank for rank, each in enumerate(gpus) if each == gpu]
            if len(ranks) > 1:
                raise ExchangeError(
                    mesh.fail(f"{name_ranks(ranks)} share GPU {gpu}; the nvlink exchange wants one each")
                )
