"""From files to a GPU through two pinned buffers: one is read into while the other is being copied from.

A copy from memory that is not pinned goes through a buffer of the driver's and waits for it: reading and copying would
take turns. What is read is converted on the GPU, if it is converted at all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.index import TensorEntry, open_checked
from moeyard_worker.checkpoint.reading import TORCH_DTYPES, read_exactly
from moeyard_worker.layers.weights import num_elements

_BUFFER_BYTES = 32 << 20


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark what has been launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait until that has run; at once if nothing was marked."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` elements of a stored tensor, from its element `begin` on."""

    key: str
    entry: TensorEntry
    begin: int
    count: int

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return self.count * TORCH_DTYPES[self.entry.dtype].itemsize


class Staging:
    """Two buffers in turn. `read_seconds` and `read_bytes` say how fast the files gave what was read so far."""

    def __init__(self, *, event: Callable[[], Event], pin_memory: bool, num_bytes: int = _BUFFER_BYTES) -> None:
        self.num_bytes = num_bytes
        self.read_seconds = 0.0
        self.read_bytes = 0
        self._pin_memory = pin_memory
        self._buffers = [self._allocate(num_bytes) for _ in range(2)]
        self._events = [event() for _ in range(2)]
        self._turn = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)

    def read(self, *pieces: Piece) -> list[torch.Tensor]:
        """[count] of each piece, as stored, in one buffer: valid until the next but one call.

        Copies from them must be launched before the next call, on the current stream. Raises CheckpointError for a file
        that has become too short.
        """
        self._events[self._turn].record()
        self._turn ^= 1
        self._events[self._turn].synchronize()
        # 64: whatever comes next begins where every dtype may.
        sizes = [-(-piece.num_bytes // 64) * 64 for piece in pieces]
        if sum(sizes) > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._allocate(sum(sizes))
        begun, out = time.perf_counter(), []
        for piece, room in zip(pieces, self._buffers[self._turn][: sum(sizes)].split(sizes), strict=True):
            place = room[: piece.num_bytes].view(TORCH_DTYPES[piece.entry.dtype])
            with open_checked(piece.entry) as file:
                read_exactly(file.fileno(), piece.entry, piece.key, piece.begin * place.itemsize, place)
            out.append(place)
            self.read_bytes += piece.num_bytes
        self.read_seconds += time.perf_counter() - begun
        return out


class StagedExperts:
    """`ExpertSource` over the checkpoint's files, read into pinned memory: tensors are valid until the next but one."""

    def __init__(self, checkpoint: CheckedCheckpoint, staging: Staging) -> None:
        self._spec = checkpoint.spec
        self._entries = checkpoint.index.entries
        self._staging = staging

    def tensors(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) as stored."""
        names = self._spec.layers[layer].experts
        assert names is not None, f"layer {layer} has no experts"
        hidden, width = self._spec.config.hidden_size, self._spec.config.moe_intermediate_size
        stored = [(key, self._entries[key]) for key, _ in self._spec.expert_tensors(names, expert)]
        if names.fused:
            (up_key, up_entry), (down_key, down_entry) = stored
            both, down = self._staging.read(
                Piece(up_key, up_entry, expert * 2 * width * hidden, 2 * width * hidden),
                Piece(down_key, down_entry, expert * hidden * width, hidden * width),
            )
            gate, up = both.view(2, width * hidden)
        else:
            gate, up, down = self._staging.read(*(Piece(key, e, 0, num_elements(e.shape)) for key, e in stored))
        return gate.view(width, hidden), up.view(width, hidden), down.view(hidden, width)

    def check(self, layer: int, expert: int) -> None:
        """What was read is a copy."""


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Launch the copy of `source` into `target`, converted where that lies."""
    if source.dtype != target.dtype:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


def pieces(key: str, entry: TensorEntry, num_bytes: int) -> Sequence[Piece]:
    """A stored tensor in pieces of at most so many bytes."""
    total, most = num_elements(entry.shape), num_bytes // TORCH_DTYPES[entry.dtype].itemsize
    return [Piece(key, entry, begin, min(most, total - begin)) for begin in range(0, total, most)]
