"""Stored tensors copied from their files to where they are wanted.

Into memory of the host a tensor of the wanted dtype is read in place, another one block by block. To a GPU all go
through two pinned buffers: one is read into while the other is copied from. A copy from memory that is not pinned would
go through a buffer of the driver's and wait for it. What a GPU wants in another dtype is converted there.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from moeyard_worker.checkpoint.index import TensorEntry, check_unchanged, open_checked
from moeyard_worker.config.checkpoint_error import CheckpointError

_DTYPES = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
    | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
    | {"F8_E8M0": torch.uint8}
)
_BLOCK_BYTES, _STAGING_BYTES = 16 << 20, 32 << 20


class Event(Protocol):
    """The methods of `torch.cuda.Event` that staging needs."""

    def record(self) -> None:
        """Mark what has been launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait until that has run; at once if nothing was marked."""
        ...


class Staging:
    """Two buffers in turn, on the way to a GPU."""

    def __init__(self, *, event: Callable[[], Event], pin_memory: bool, num_bytes: int = _STAGING_BYTES) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory) for _ in range(2)]
        self._events = [event() for _ in range(2)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        """Return the buffer that was used before the last one, once copies from it have run.

        Copies from it must be launched before the next call, on the current stream.
        """
        self._events[self._turn].record()
        self._turn ^= 1
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]


class Reader:
    """Copies stored tensors. `read_seconds` and `read_bytes` say how fast the files gave what was read so far.

    A file stays open once it was read, so one that is replaced by renaming stays what it was. Several threads may read
    where there is no `staging`, which a GPU needs.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], staging: Staging | None = None) -> None:
        self._entries, self._staging = entries, staging
        self.read_seconds, self.read_bytes = 0.0, 0
        self._files: dict[Path, int] = {}
        # A block allocated per tensor would leave holes between the parameters that are kept.
        self._scratch = threading.local()

    def copy(
        self, key: str, out: torch.Tensor, begin: int = 0, *, progress: Callable[[int], None] | None = None
    ) -> None:
        """Fill the contiguous `out` with elements `begin`, `begin` + 1, ... of tensor `key`, converted to its dtype.

        On a GPU the last copies may still run when this returns. `progress` is called with the bytes of each block.
        Raises CheckpointError for a file that has changed since its header was read.
        """
        entry, flat = self._entries[key], out.view(-1)
        fd, stored = self._open(entry), _DTYPES[entry.dtype]
        check_unchanged(entry.file, fd, entry.stamp)
        direct = on_host(flat) and flat.dtype == stored
        end = begin + flat.numel()
        while begin < end:
            place = flat[flat.numel() - (end - begin) :][: _BLOCK_BYTES // stored.itemsize] if direct else self._block()
            place = place if direct else place.view(stored)[: end - begin]
            started = time.perf_counter()
            read_exactly(fd, entry, key, begin * stored.itemsize, place)
            self.read_seconds += time.perf_counter() - started
            self.read_bytes += place.nbytes
            if not direct:
                put(flat[flat.numel() - (end - begin) :][: len(place)], place)
            begin += len(place)
            if progress is not None:
                progress(place.nbytes)
        check_unchanged(entry.file, fd, entry.stamp)

    def _block(self) -> torch.Tensor:
        """Return memory to read into."""
        if self._staging is not None:
            return self._staging.next()
        if not hasattr(self._scratch, "block"):
            self._scratch.block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        block: torch.Tensor = self._scratch.block
        return block

    def _open(self, entry: TensorEntry) -> int:
        fd = self._files.get(entry.file)
        if fd is None:
            with open_checked(entry) as file:
                fd = self._files[entry.file] = os.dup(file.fileno())
            weakref.finalize(self, os.close, fd)
        return fd


def on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies in the host's memory."""
    return tensor.device.type == "cpu"


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Launch the copy of `source` into `target`, converted where that lies."""
    if source.dtype != target.dtype:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


def read_exactly(fd: int, entry: TensorEntry, key: str, offset: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous on the CPU, from byte `offset` of a tensor of the open file `fd`.

    Raises CheckpointError naming file and key where the file ends too soon.
    """
    buffer = out.view(torch.uint8).numpy().data
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], entry.start + offset + done)
        if count == 0:
            raise CheckpointError(f"{entry.file}: truncated while reading {key}")
        done += count
