"""Host memory that a GPU reads in place or writes a number to: private, or shared between processes of one host.

The memory is registered with CUDA directly, because torch rounds its pinned memory up to powers of 2. A registered
address is valid for the process and its GPUs; this holds on 64-bit Linux. Shared memory is an anonymous file that peers
open through /proc/PID/fd of its owner.
"""

import mmap
import os
import weakref
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from moeyard_kernels.types.peer_shape import LentMemory

# cudaHostRegister flags: valid in all contexts; and read-only for the GPU, as for memory that this process may not
# write.
_PORTABLE, _READ_ONLY = 1, 8
_WORD_BYTES = 8


class HostMemory:
    """`num_bytes` of zeroed memory of this process, as `bytes`. With `shared`, other processes may map it through
    `lent`; `lent` is None if CUDA cannot register shared memory.

    Raises ValueError when no memory can be registered.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, shared: bool = False) -> None:
        self.lent: LentMemory | None = None
        error = self._lend(num_bytes, device) if shared else 0
        if error:
            take_error(device)
        if self.lent is None:
            self.bytes = _as_bytes(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            error = _register(self.bytes.data_ptr(), num_bytes, _PORTABLE, device)
        if error:
            raise ValueError(
                f"{num_bytes >> 20} MiB of host memory for experts cannot be pinned (CUDA error {error}); raise the "
                "limit of locked memory (ulimit -l), or give this host's workers more memory or fewer experts"
            )
        if device.type == "cuda":
            weakref.finalize(self, _cudart().cudaHostUnregister, self.bytes.data_ptr())

    def _lend(self, num_bytes: int, device: torch.device) -> int:
        """Allocate memory that other processes may map; return CUDA's error, or 0."""
        fd = os.memfd_create("moeyard-experts")
        os.ftruncate(fd, num_bytes)
        memory = _as_bytes(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED))
        if error := _register(memory.data_ptr(), num_bytes, _PORTABLE, device):
            os.close(fd)
            return error
        weakref.finalize(self, os.close, fd)
        self.bytes = memory
        self.lent = LentMemory(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, num_bytes=num_bytes)
        return 0


class HostWord:
    """An integer, initially 0, that `device` writes and the host reads at any time. `there` and `here`, [1] int64, are
    the same bytes. Raises ValueError as `HostMemory`."""

    def __init__(self, device: torch.device) -> None:
        # Registered memory belongs to the device that is current during registration.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._memory = HostMemory(_WORD_BYTES, device)
            self.here = self.there = self._memory.bytes.view(torch.int64)
            if device.type == "cuda":
                self.there = torch.as_tensor(_OnDevice(self.here.data_ptr()), device=device)
        assert self.there.data_ptr() == self.here.data_ptr(), "the device sees a copy instead of the same memory"


class _OnDevice:
    """An integer at `address`, through the CUDA array interface, so that torch sees registered host memory as device
    memory."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (address, False), "version": 2}


class BorrowedMemory:
    """Memory of another process, mapped at `address` until `close`, even if that process exits.

    The mapping is read-only if CUDA can register it so. Raises ValueError with the reason when it cannot be mapped.
    """

    def __init__(self, lent: LentMemory, device: torch.device) -> None:
        self.lent = lent
        memory = _open(lent, os.O_RDONLY, mmap.PROT_READ)
        error = _register(_address(memory), lent.num_bytes, _PORTABLE | _READ_ONLY, device)
        if error:
            take_error(device)
            memory.close()
            memory = _open(lent, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)
            error = _register(_address(memory), lent.num_bytes, _PORTABLE, device)
        if error:
            take_error(device)
            memory.close()
            raise ValueError(f"{lent.num_bytes >> 20} MiB of process {lent.pid} cannot be pinned (CUDA error {error})")
        self.address = _address(memory)
        # Unregister at finalization, too: an unmapped but registered range would make a later mapping at its address
        # fail.
        self._give_back = weakref.finalize(self, _give_back, memory, device)

    def close(self) -> None:
        """Unmap it, once no launch reads it. Safe to call twice."""
        self._give_back()


def _give_back(memory: mmap.mmap, device: torch.device) -> None:
    if device.type == "cuda":
        _cudart().cudaHostUnregister(_address(memory))
    memory.close()


def _open(lent: LentMemory, flags: int, access: int) -> mmap.mmap:
    try:
        fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", flags)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (lent.inode, lent.num_bytes):
                raise ValueError(f"file {lent.fd} of process {lent.pid} has been replaced by another file")
            return mmap.mmap(fd, lent.num_bytes, flags=mmap.MAP_SHARED, prot=access)
        finally:
            os.close(fd)
    except OSError as error:
        raise ValueError(f"memory of process {lent.pid} cannot be mapped: {error}") from error


def _as_bytes(memory: mmap.mmap) -> torch.Tensor:
    """Return the mapping as a tensor, in huge pages where the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _address(memory: mmap.mmap) -> int:
    """Return the address of a mapping. torch would warn about read-only memory, so numpy finds it."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, num_bytes: int, flags: int, device: torch.device) -> int:
    """Pin memory for `device`; return CUDA's error, or 0."""
    if device.type != "cuda":
        return 0
    return int(_cudart().cudaHostRegister(address, num_bytes, flags))


def take_error(device: torch.device) -> None:
    """Clear the error of a failed CUDA call, which CUDA would otherwise report at a later, unrelated launch."""
    with suppress(RuntimeError):  # boundary: this is the error that was handled already
        torch.ones(1, device=device)
