"""GPU memory that all ranks of a host map: this rank's own memory, and its views of the peers' memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store

from moeyard_kernels.peers import Peers
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.agreement import name_ranks
from moeyard_worker.exchange.membership.mesh import Mesh


class MeshStore(Store):
    """A store over the mesh: every rank sets keys that end in "/" and its number, and reads those of the same round.

    torch's own stores need a port or a file and wait for minutes. Also, torch numbers its keys by the meetings of a
    process, so a replaced rank would wait for keys that no rank sets. The caller keeps the store alive.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Wait until every rank has set its key of this round."""
        name, _, rank = key.rpartition("/")
        assert rank == str(self._mesh.rank), f"rank {self._mesh.rank} sets {key}"
        values = self._mesh.gather(value.encode() if isinstance(value, str) else bytes(value))
        self._values.update({f"{name}/{peer}": each for peer, each in enumerate(values)})

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Assert that the keys exist. After a round all its keys do."""
        missing = [key for key in keys if key not in self._values]
        assert not missing, f"{missing} were never set"

    def get(self, key: str) -> bytes:
        return self._values[key]


class GpuMemory:
    """Symmetric memory of one GPU. `own` is uint8 [num_bytes], zero at first, at a constant address.

    All ranks use the same `name`. Raises RuntimeError where torch cannot share memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, name: str = "moeyard") -> None:
        self._peers = Peers(device)
        self.own = self._peers.own_memory(num_bytes)
        self._device, self._name = device, name

    def drain(self) -> None:
        """Wait until everything that was launched on this device has run."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> Callable[[], bool]:
        """Return a check, without waiting, of whether this thread's launches so far have run."""
        event = torch.cuda.Event()
        event.record()
        return event.query

    def meet(self, mesh: Mesh) -> list[torch.Tensor]:
        """Return the memory of all ranks as this device sees it, once all ranks have called it.

        Raises ExchangeError naming ranks that cannot be reached, and why.
        """
        if mesh.world_size == 1:
            return [self.own]
        self._check(mesh)
        # Every epoch has its own name: torch does not map memory again under a known name.
        return self._peers.map_peers(
            self.own,
            rank=mesh.rank,
            world_size=mesh.world_size,
            store=MeshStore(mesh),
            name=f"{self._name}-{mesh.epoch}",
        )

    def _check(self, mesh: Mesh) -> None:
        """Raise ExchangeError if two ranks share a GPU."""
        own = str(torch.cuda.get_device_properties(self._device).uuid)
        gpus = [each.decode() for each in mesh.gather(own.encode())]
        for gpu in gpus:
            ranks = [rank for rank, each in enumerate(gpus) if each == gpu]
            if len(ranks) > 1:
                raise ExchangeError(
                    mesh.fail(f"{name_ranks(ranks)} share GPU {gpu}; the nvlink exchange wants one each")
                )
