"""Device memory of another process, mapped and unmapped at will, by the driver's own calls (CUDA driver API, 6.14).

torch maps memory of peers too, and keeps it mapped for as long as this process shares any of its own. Mapped memory is
held, whatever becomes of the process that it was of.
"""

import ctypes
import functools
import weakref

import torch

# As cuda.h has them: a handle that is a file, where memory is, who may do what.
_FILE, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
# What sizes and places are multiples of, on all GPUs of this generation.
_GRANULARITY = 2 << 20
# Behind what it is asked for torch keeps a few kilobytes of its own; less than this.
_TAIL = 1 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Raises RuntimeError with the driver's words."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def allocated(num_bytes: int) -> tuple[int, int]:
    """What is asked of torch for memory of `num_bytes` that is to be mapped by others, and what it then allocates."""
    whole = -(-(num_bytes + _TAIL) // _GRANULARITY) * _GRANULARITY
    return whole - _TAIL, whole


def export(memory: torch.Tensor) -> int:
    """A file that stands for the allocation which `memory` begins, for other processes to map; the caller closes it.

    Raises RuntimeError for memory that cannot be shared (`shared_memory.own_memory` can).
    """
    handle, file = ctypes.c_uint64(), ctypes.c_int(-1)
    _call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr()))
    try:
        _call("cuMemExportToShareableHandle", ctypes.byref(file), handle, ctypes.c_int(_FILE), ctypes.c_uint64(0))
    finally:
        _call("cuMemRelease", handle)
    return file.value


class Mapping:
    """The first `num_bytes` of what an exported `file` stands for, as `device` sees them, until `close`.

    It stands for as much as is `allocated` for these, and is mapped whole. The file may be closed at once. `memory`:
    uint8 [num_bytes]. Raises RuntimeError where it cannot be mapped.
    """

    def __init__(self, file: int, num_bytes: int, device: torch.device) -> None:
        size = ctypes.c_size_t(allocated(num_bytes)[1])
        address, handle, none = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(0)
        access = _Access(_Location(_ON_DEVICE, device.index), _READ_AND_WRITE)
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file), ctypes.c_int(_FILE))
        try:
            _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
            try:
                _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
            except RuntimeError:
                _call("cuMemAddressFree", address, size)
                raise
            self._end = weakref.finalize(self, _unmap, address, size)
            # When the process ends the driver does it.
            self._end.atexit = False
            _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        finally:
            # What is mapped is held by that.
            _call("cuMemRelease", handle)
        storage = torch._C._construct_storage_from_data_pointer(address.value, device, num_bytes)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def close(self) -> None:
        """Unmap it; nothing that was launched may use it any more. Safe to call twice."""
        self._end()


def _unmap(address: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
    _call("cuMemUnmap", address, size)
    _call("cuMemAddressFree", address, size)
