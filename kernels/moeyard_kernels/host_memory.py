"""Memory of the host that a GPU reads where it lies, or writes a number to: of this process, or of another of the host
that lends it its own.

It is registered with CUDA as it is (torch's own pinned memory comes in powers of 2), and then has one address for the
process and for its GPUs: that holds for 64 bit Linux, of which all GPUs are that serve here. What is lent is a file
without a name, found among the open files of the process that made it.
"""

import mmap
import os
import weakref
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from moeyard_kernels.types.peer_shape import LentMemory

# Of cudaHostRegister: for all contexts; and the GPU only reads it, as of memory that this process may not write.
_PORTABLE, _READ_ONLY = 1, 8
_WORD_BYTES = 8


class HostMemory:
    """`num_bytes` of this process, zero at first, as `bytes`. With `shared` others may map it as `lent` says, or, where
    CUDA registers no such memory, nobody: `lent` is None.

    Raises ValueError when none can be registered.
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
        """Take memory that others may map; CUDA's error, or 0."""
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
    """A number, 0 at first, that `device` writes and the host reads at any time: `there` and `here`, [1] int64, are the
    same bytes. Raises ValueError as `HostMemory`."""

    def __init__(self, device: torch.device) -> None:
        # What is registered counts as memory of the device that is current then.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._memory = HostMemory(_WORD_BYTES, device)
            self.here = self.there = self._memory.bytes.view(torch.int64)
            if device.type == "cuda":
                self.there = torch.as_tensor(_OnDevice(self.here.data_ptr()), device=device)
        assert self.there.data_ptr() == self.here.data_ptr(), "a copy is no place that both know"


class _OnDevice:
    """A number at `address`, by the protocol of arrays on GPUs: torch knows memory of the host that CUDA knows, too."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (address, False), "version": 2}


class BorrowedMemory:
    """Memory that another process has lent, from `address` on, until `close`, whatever becomes of that process.

    Mapped to be read only, where CUDA can register that. Raises ValueError with why it cannot be had.
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
        # Also where nobody closes it: what is unmapped and still registered keeps its address from whoever maps next.
        self._give_back = weakref.finalize(self, _give_back, memory, device)

    def close(self) -> None:
        """Give it back, once no launch reads it. Safe to call twice."""
        self._give_back()


def _give_back(memory: mmap.mmap, device: torch.device) -> None:
    if device.type == "cuda":
        _cudart().cudaHostUnregister(_address(memory))
    memory.close()


def _open(lent: LentMemory, flags: int, access: int) -> mmap.mmap:
    """The mapping of a file that another process holds open."""
    try:
        fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", flags)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (lent.inode, lent.num_bytes):
                raise ValueError(f"file {lent.fd} of process {lent.pid} is another one by now")
            return mmap.mmap(fd, lent.num_bytes, flags=mmap.MAP_SHARED, prot=access)
        finally:
            os.close(fd)
    except OSError as error:
        raise ValueError(f"memory of process {lent.pid} cannot be mapped: {error}") from error


def _as_bytes(memory: mmap.mmap) -> torch.Tensor:
    """In large pages, where there are such."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _address(memory: mmap.mmap) -> int:
    """Where it lies; torch would warn of what cannot be written."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, num_bytes: int, flags: int, device: torch.device) -> int:
    """Pin memory for `device`; CUDA's error, or 0."""
    if device.type != "cuda":
        return 0
    return int(_cudart().cudaHostRegister(address, num_bytes, flags))


def take_error(device: torch.device) -> None:
    """CUDA keeps a call's error for whoever asks next, the check of some launch. Let that be one of no consequence."""
    with suppress(RuntimeError):  # boundary: it is the error that was seen already
        torch.ones(1, device=device)
