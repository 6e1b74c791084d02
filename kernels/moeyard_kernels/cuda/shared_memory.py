"""Device memory of every rank of a host, mapped by all: torch's symmetric memory, found through a store.

No backend of collectives is started: torch finds ranks through a process group that is only a name and a store. Each
rank maps its peers' memory once, on its own device, and needs no context on theirs; it stays mapped while the tensors
live, whatever becomes of the peer. Every rank must see all GPUs and take one of its own.
"""

import torch
from torch._C import _distributed_c10d as c10d


def share_memory(
    num_bytes: int, *, rank: int, world_size: int, device: torch.device, store: c10d.Store, name: str
) -> list[torch.Tensor]:
    """uint8 [num_bytes] of each rank as `device` sees it, zero at first; every rank calls it with the same `name`.

    A name is used once. Raises RuntimeError where torch cannot share memory, or a peer does not come.
    """
    own = own_memory(num_bytes, device)
    return map_peers(own, rank=rank, world_size=world_size, store=store, name=name)


def own_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of this rank that peers can map, zero at first. Raises RuntimeError where torch has none."""
    own = c10d._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    own.zero_()
    torch.cuda.synchronize(device)
    return own


def map_peers(own: torch.Tensor, *, rank: int, world_size: int, store: c10d.Store, name: str) -> list[torch.Tensor]:
    """The memory of all ranks, this one's being `own`; again under another name when peers were replaced."""
    # Since torch 2.11 the rendezvous asks the registry of groups for rank, size and store, and nothing else of a group.
    group = c10d.ProcessGroup(store, rank, world_size)  # the registry does not keep it alive
    c10d._register_process_group(name, group)  # type: ignore[arg-type]
    try:
        handle = c10d._SymmetricMemory.rendezvous(own, name)
    finally:
        c10d._unregister_process_group(name)  # type: ignore[arg-type]
    return [own if peer == rank else handle.get_buffer(peer, own.shape, own.dtype) for peer in range(world_size)]
