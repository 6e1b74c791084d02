"""Device memory of every rank of a host, mapped by all: each hands the others a file that stands for its own.

No backend of collectives is started. Each rank maps its peers' memory on its own device and needs no context on theirs;
it stays mapped, and held, until it is given up, whatever becomes of the peer. Every rank must see all GPUs and take one
of its own.
"""

import os
import socket
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d

from moeyard_kernels.cuda.mapping import Mapping, allocated, export

# Every rank's word to all, by rank, when all have said theirs.
Gather = Callable[[bytes], Sequence[bytes]]


def own_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of this rank that peers can map, zero at first. Raises RuntimeError where torch has none."""
    own = c10d._SymmetricMemory.empty_strided_p2p((allocated(num_bytes)[0],), (1,), torch.uint8, device)
    own.zero_()
    torch.cuda.synchronize(device)
    return own[:num_bytes]


def map_peers(
    own: torch.Tensor, *, rank: int, world_size: int, gather: Gather, folder: str, seconds: float
) -> dict[int, Mapping]:
    """The memory of each other rank, which is as large as `own`; every rank calls it, and closes what it is given.

    `folder` is one of this rank's, that peers may enter. Raises RuntimeError where memory cannot be shared, OSError
    (TimeoutError) for a peer that hands nothing over within `seconds`.
    """
    file = export(own)
    try:
        files = swap_files(file, rank=rank, world_size=world_size, gather=gather, folder=folder, seconds=seconds)
    finally:
        os.close(file)
    mapped: dict[int, Mapping] = {}
    try:
        for peer, theirs in files.items():
            mapped[peer] = Mapping(theirs, own.nbytes, own.device)
    except RuntimeError:
        for mapping in mapped.values():
            mapping.close()
        raise
    finally:
        for theirs in files.values():
            os.close(theirs)
    return mapped


def swap_files(file: int, *, rank: int, world_size: int, gather: Gather, folder: str, seconds: float) -> dict[int, int]:
    """Give every other rank this open file and get one of each, by rank; whoever calls closes them. As `map_peers`."""
    found: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(str(Path(folder) / "files"))
        door.settimeout(seconds)
        doors = [word.decode() for word in gather(door.getsockname().encode())]
        try:
            # One is sent, one is taken: of what waits at a door Linux keeps ten.
            for turn in range(1, world_size):
                peer = (rank + turn) % world_size
                # Not `socket.send_fds`, which leaves out the address up to Python 3.12.
                files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))]
                door.sendmsg([rank.to_bytes(2, "little")], files, 0, doors[peer])
                word, (theirs,), _, _ = socket.recv_fds(door, 2, 1, socket.MSG_CMSG_CLOEXEC)
                found[int.from_bytes(word, "little")] = theirs
        except BaseException:
            for theirs in found.values():
                os.close(theirs)
            raise
    return found
