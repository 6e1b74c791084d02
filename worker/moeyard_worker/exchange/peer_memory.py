"""Memory of a GPU that all ranks of its host map: this rank's own, and where it sees that of the others."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from moeyard_kernels.cuda.mapping import Mapping
from moeyard_kernels.cuda.shared_memory import map_peers, own_memory
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.leftovers import Folder
from moeyard_worker.exchange.meeting import gather
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.naming import name_ranks


class PeerMemory(Protocol):
    """What `NvlinkExchange` asks for memory."""

    own: torch.Tensor

    def drain(self) -> None:
        """Wait until everything that was launched on this device has run."""
        ...

    def meet(self, mesh: Mesh) -> Sequence[torch.Tensor]:
        """The memory of all ranks as this device sees it; all ranks call it, and none returns before all have.

        What was found at the meeting before is given up. Raises ExchangeError with who cannot be reached, and why.
        """
        ...

    def release(self) -> None:
        """Give up what was found of others; nothing that runs may use it."""
        ...


class GpuMemory:
    """Of one GPU: torch's symmetric memory. `own` is uint8 [num_bytes], zero at first, and stays where it is.

    Raises RuntimeError where memory cannot be shared.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.own = own_memory(num_bytes, device)
        self._device = device
        self._mapped: dict[int, Mapping] = {}

    def drain(self) -> None:
        """See `PeerMemory.drain`."""
        torch.cuda.synchronize(self._device)

    def meet(self, mesh: Mesh) -> list[torch.Tensor]:
        """See `PeerMemory.meet`."""
        self.release()
        if mesh.world_size > 1:
            self._check(mesh)
            folder = Folder()
            try:
                self._mapped = map_peers(
                    self.own, rank=mesh.rank, world_size=mesh.world_size, gather=partial(gather, mesh),
                    folder=folder.path, seconds=mesh.deadline,
                )  # fmt: skip
            except OSError as error:
                raise ExchangeError(
                    mesh.fail(f"rank {mesh.rank} was not given all memory of its peers: {error}")
                ) from error
            finally:
                folder.remove()
        return [self.own if peer == mesh.rank else self._mapped[peer].memory for peer in range(mesh.world_size)]

    def release(self) -> None:
        """See `PeerMemory.release`: of a peer that is gone these mappings are all that holds its memory."""
        while self._mapped:
            self._mapped.popitem()[1].close()

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
