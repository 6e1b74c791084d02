"""Reads the tensors of coming experts into pinned memory while the caller launches copies and decoding.

A host needs about as long for an expert's launches as a disk for its bytes. Only reads run in other threads. Launches
of several threads wait for each other: on the host of an H200, 4 threads that did both took longer than one.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice

import torch

from moeyard_worker.checkpoint.reading import CopyEvent, Reader

# Experts that are read at once, the most pinned memory for them, and the alignment of their tensors.
_EXPERTS, _BYTES, _ALIGNED = 4, 256 << 20, 64


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory, and the event of its last copies."""

    memory: torch.Tensor
    copied: CopyEvent


@dataclass(frozen=True, slots=True)
class _Group:
    """The tensors of an expert, uint8. They lie in `buffer` when `read` is done."""

    expert: tuple[int, int]
    tensors: Mapping[str, torch.Tensor]
    buffer: _Buffer
    read: Future[None]


class ReadAhead:
    """Reads `groups` in this order: an expert, (layer, expert), and the keys of its tensors. Each takes one buffer.

    The first expert decides the size of the buffers. Tensors that do not fit are not read ahead. `reader` must have
    pinned buffers.
    """

    def __init__(self, reader: Reader, groups: Iterable[tuple[tuple[int, int], Sequence[str]]]) -> None:
        pinned = reader.pinned
        assert pinned is not None, "tensors of host memory are read in place"
        remaining = iter(groups)
        first = list(islice(remaining, 1))
        self._reader, self._groups = reader, chain(first, remaining)
        self._next = deque[_Group]()
        size = sum(_aligned(reader.size(key)) for _, keys in first for key in keys)
        count = min(_EXPERTS, _BYTES // max(size, 1))
        if not size or not count:
            return
        self._pool = ThreadPoolExecutor(count)
        for _ in range(count):
            self._begin(_Buffer(pinned.allocate(size), pinned.event()))

    @contextmanager
    def use(self, expert: tuple[int, int]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield an expert's tensors, uint8, for copies that are launched in the context. Yield none unless it is next.

        Raises CheckpointError as `Reader.copy`.
        """
        if not self._next or self._next[0].expert != expert:
            yield {}
            return
        group = self._next.popleft()
        group.read.result()
        yield group.tensors
        group.buffer.copied.record()
        self._begin(group.buffer)

    def _begin(self, buffer: _Buffer) -> None:
        """Read the next group into a buffer, behind the last copies from it."""
        group = next(self._groups, None)
        if group is None:
            if not self._next:
                self._pool.shutdown(wait=False)
            return
        expert, keys = group
        tensors, end = dict[str, torch.Tensor](), 0
        for key in keys:
            size = self._reader.size(key)
            if end + size <= len(buffer.memory):
                tensors[key] = buffer.memory[end : end + size]
                end += _aligned(size)
        self._next.append(_Group(expert, tensors, buffer, self._pool.submit(self._read, tensors, buffer.copied)))

    def _read(self, tensors: Mapping[str, torch.Tensor], copied: CopyEvent) -> None:
        copied.synchronize()
        for key, memory in tensors.items():
            self._reader.read(key, memory)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED
