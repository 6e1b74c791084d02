"""Copies stored tensors from their files to host or GPU memory.

A tensor for host memory is read in place if its dtype is the wanted one, and otherwise block by block. Tensors for a
GPU go through two pinned buffers: a block is read into one while the other is copied from. A copy from pageable memory
would go through a buffer of the driver and would make the host wait. The GPU itself converts dtypes, and dequantises
the block types of GGUF files.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from moeyard_worker.checkpoint.ggml_blocks import BLOCK_TYPES, BlockType
from moeyard_worker.checkpoint.index import TensorEntry, check_unchanged, open_checked
from moeyard_worker.config.checkpoint_error import CheckpointError

# The torch dtype of each safetensors dtype.
DTYPES = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
    | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
    | {"F8_E8M0": torch.float8_e8m0fnu, "F8_E5M2": torch.float8_e5m2, "F64": torch.float64, "BOOL": torch.bool}
    | {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
)
_BLOCK_BYTES, _PINNED_BYTES = 16 << 20, 32 << 20
# Stored bytes that are dequantised together. Their values in fp32 take up to 8 times as much memory.
_QUANTISED_BYTES = 1 << 20


class CopyEvent(Protocol):
    """The methods of `torch.cuda.Event` that `PinnedBuffers` needs."""

    def record(self) -> None:
        """Mark the work that has been launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait for the marked work. Return at once if none was marked."""
        ...


class PinnedBuffers:
    """Two host buffers that are used in turn for copies to a GPU. `allocate` and `event` make more of their parts."""

    def __init__(self, *, event: Callable[[], CopyEvent], pin_memory: bool, num_bytes: int = _PINNED_BYTES) -> None:
        self.event, self.allocate = event, partial(torch.empty, dtype=torch.uint8, pin_memory=pin_memory)
        self._buffers = [self.allocate(num_bytes) for _ in range(2)]
        self._events = [event() for _ in range(2)]
        self._current = 0

    def next(self) -> torch.Tensor:
        """Return the other buffer, after the copies from it have finished.

        Launch copies from the returned buffer on the current stream before the next call.
        """
        self._events[self._current].record()
        self._current ^= 1
        self._events[self._current].synchronize()
        return self._buffers[self._current]


class Reader:
    """Copies stored tensors. `read_bytes` were read in `read_seconds`, in which at least one thread was reading.

    A file stays open after its first read, so replacing it by renaming does not change what is read. Several threads
    may `read` at once, and also `copy` if there is no `pinned`, which a GPU needs. While `refuses_nan`, NaN and
    infinity in copied tensors are errors.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], pinned: PinnedBuffers | None = None, *, refuses_nan: bool = False
    ) -> None:
        self._entries, self.pinned, self.refuses_nan = entries, pinned, refuses_nan
        self.read_seconds, self.read_bytes = 0.0, 0
        self._lock, self._num_reading, self._begun = threading.Lock(), 0, 0.0
        self._files: dict[Path, int] = {}
        # One block per thread is reused: a block per tensor would fragment the memory between the parameters.
        self._scratch = threading.local()

    def copy(
        self, key: str, out: torch.Tensor, begin: int = 0, *, progress: Callable[[int], None] | None = None
    ) -> None:
        """Fill the contiguous `out` from element `begin` of tensor `key` on, converted to the dtype of `out`.

        On a GPU the last copies may still run on return. `progress` is called with the stored bytes of each block.
        Raises CheckpointError if the file has changed since its header was read, and for values that are not finite
        while `refuses_nan`.
        """
        entry, out = self._entries[key], out.view(-1)
        blocks = BLOCK_TYPES.get(entry.dtype)
        with self._unchanged(entry) as fd:
            if blocks is None:
                sizes = self._copy_values(fd, key, out, begin)
            else:
                sizes = self._dequantise(fd, key, out, begin, blocks)
            for num_bytes in sizes:
                if progress is not None:
                    progress(num_bytes)

    def _copy_values(self, fd: int, key: str, out: torch.Tensor, begin: int) -> Iterator[int]:
        """Copy a tensor of values block by block. Yield the bytes of each block."""
        stored = DTYPES[self._entries[key].dtype]
        in_place = on_host(out) and out.dtype == stored
        done = 0
        while done < len(out):
            if in_place:
                block = out[done:][: _BLOCK_BYTES // stored.itemsize]
            else:
                block = self._block().view(stored)[: len(out) - done]
            self._read(fd, key, (begin + done) * stored.itemsize, block)
            if not in_place:
                launch_copy(out[done : done + len(block)], block)
            self._check_finite(key, out[done : done + len(block)])
            done += len(block)
            yield block.nbytes

    def _check_finite(self, key: str, values: torch.Tensor) -> None:
        if self.refuses_nan and not all_finite(values):
            raise CheckpointError(f"{self._entries[key].file}: {key} holds values that are not finite")

    def size(self, key: str) -> int:
        """Return the stored bytes of a tensor."""
        return self._entries[key].num_bytes

    def read(self, key: str, out: torch.Tensor) -> None:
        """Fill `out`, uint8 in host memory, with the bytes of tensor `key`. Raises CheckpointError as `copy`."""
        with self._unchanged(self._entries[key]) as fd:
            self._read(fd, key, 0, out)

    def launch(self, key: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the bytes of a tensor, as `read` gives them, as `copy` does. The copy may still run on return."""
        out = out.view(-1)
        launch_copy(out, stored.view(DTYPES[self._entries[key].dtype]))
        self._check_finite(key, out)

    def _dequantise(self, fd: int, key: str, out: torch.Tensor, begin: int, kind: BlockType) -> Iterator[int]:
        """Write the bfloat16 of a tensor of quantised blocks. Yield the bytes of each read.

        Raises CheckpointError for a scale that is not finite.
        """
        assert begin % kind.elements == len(out) % kind.elements == 0, "rows consist of whole blocks"
        for rows in out.view(-1, kind.elements).split(_QUANTISED_BYTES // kind.num_bytes):
            stored = self._block()[: len(rows) * kind.num_bytes].view(-1, kind.num_bytes)
            self._read(fd, key, begin // kind.elements * kind.num_bytes, stored)
            if not kind.finite(stored):
                file = self._entries[key].file
                raise CheckpointError(f"{file}: {key} holds a scale that is not finite; the file is damaged")
            rows.copy_(kind.dequantize(stored.to(out.device, non_blocking=True)).bfloat16())
            begin += rows.numel()
            yield stored.nbytes

    def _read(self, fd: int, key: str, offset: int, out: torch.Tensor) -> None:
        with self._lock:
            self._num_reading += 1
            if self._num_reading == 1:
                self._begun = time.perf_counter()
        try:
            read_exactly(fd, self._entries[key], key, offset, out)
        finally:
            with self._lock:
                self._num_reading -= 1
                self.read_bytes += out.nbytes
                if not self._num_reading:
                    self.read_seconds += time.perf_counter() - self._begun

    def _block(self) -> torch.Tensor:
        if self.pinned is not None:
            return self.pinned.next()
        if not hasattr(self._scratch, "block"):
            self._scratch.block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        block: torch.Tensor = self._scratch.block
        return block

    @contextmanager
    def _unchanged(self, entry: TensorEntry) -> Iterator[int]:
        """Yield the open file of a tensor. Raises CheckpointError if it changed before or while it is read."""
        fd = self._open(entry)
        check_unchanged(entry.file, fd, entry.stamp)
        yield fd
        check_unchanged(entry.file, fd, entry.stamp)

    def _open(self, entry: TensorEntry) -> int:
        with self._lock:
            fd = self._files.get(entry.file)
            if fd is None:
                with open_checked(entry) as file:
                    fd = self._files[entry.file] = os.dup(file.fileno())
                weakref.finalize(self, os.close, fd)
            return fd


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is in host memory."""
    return tensor.device.type == "cpu"


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite. Integers are finite, and `decoding` refuses e4m3 codes of NaN."""
    if not values.is_floating_point() or values.dtype == torch.float8_e4m3fn:
        return True
    # aminmax takes one pass without temporaries, and propagates NaN. `isfinite` takes 20 times as long.
    return all(bool(each.isfinite()) for each in torch.aminmax(values if values.itemsize > 1 else values.float()))


def launch_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Launch a copy of `source` into `target`. The device of `target` converts the dtype."""
    if source.dtype != target.dtype:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


def read_exactly(fd: int, entry: TensorEntry, key: str, offset: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous in host memory, from byte `offset` of the tensor `key` of the open file `fd`.

    Raises CheckpointError naming file and key if the file ends too early or cannot be read.
    """
    buffer = out.view(torch.uint8).numpy().data
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], entry.start + offset + done)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: {error.strerror} while reading {key}") from error
        if count == 0:
            raise CheckpointError(f"{entry.file}: truncated while reading {key}")
        done += count
