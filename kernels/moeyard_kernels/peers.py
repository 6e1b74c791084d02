"""Memory and rows that ranks of one host share: the part of a backend that exchanges use.

Device memory is torch's symmetric memory, found through a store. No collective backend starts: the process group that
torch needs is only a name and a store. Each rank maps its peers' memory once, on its own device, and needs no context
on theirs. The memory stays mapped while the tensors live, even if the peer dies. Every rank must see all GPUs and use a
different one.
"""

import torch
from torch._C import _distributed_c10d as c10d

from moeyard_kernels import ops


class Peers:
    """Memory and row copies between the ranks of a host, as `Backend.peers`."""

    dispatch_rows = staticmethod(ops.dispatch_rows)
    combine_rows = staticmethod(ops.combine_rows)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed uint8 [num_bytes] of this rank that peers can map. Raises RuntimeError if torch cannot allocate
        it."""
        own = c10d._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)
        own.zero_()
        torch.cuda.synchronize(self.device)
        return own

    def map_peers(
        self, own: torch.Tensor, *, rank: int, world_size: int, store: c10d.Store, name: str
    ) -> list[torch.Tensor]:
        """Return the memory of all ranks; this rank's is `own`. Every rank passes the same `name`, which is used once.
        Raises RuntimeError if torch cannot share memory, or if a peer does not arrive."""
        # Since torch 2.11 the rendezvous only asks the registry of groups for rank, size and store.
        group = c10d.ProcessGroup(store, rank, world_size)  # the registry does not keep it alive
        c10d._register_process_group(name, group)  # type: ignore[arg-type]
        try:
            handle = c10d._SymmetricMemory.rendezvous(own, name)
        finally:
            c10d._unregister_process_group(name)  # type: ignore[arg-type]
        return [own if peer == rank else handle.get_buffer(peer, own.shape, own.dtype) for peer in range(world_size)]
