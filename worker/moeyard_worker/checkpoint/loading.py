"""Loading: dense weights stream from disk into their final place, experts stay in the file as memory-mapped views.

To a GPU both stream through pinned memory (`staging.py`).

Peak memory is what a rank keeps plus one parameter: a stored tensor of the served dtype is read straight into the rows
of its parameter, another dtype goes through `_SCRATCH_BYTES` at a time; a matrix then gets the backend's form.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moeyard_kernels.backend import Backend
from moeyard_worker.checkpoint.check import CheckedCheckpoint, check_checkpoint
from moeyard_worker.checkpoint.index import TensorEntry, check_unchanged, open_checked, open_index
from moeyard_worker.checkpoint.reading import TORCH_DTYPES, read_exactly
from moeyard_worker.checkpoint.staging import Staging, pieces, put
from moeyard_worker.layers.weights import Weight, num_elements
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import ExpertNames, ModelSpec

_SCRATCH_BYTES = 16 << 20


def open_checkpoint(directory: Path | str, config: ModelConfig) -> CheckedCheckpoint:
    """Read all headers and prove the checkpoint complete; nothing is loaded. Raises CheckpointError."""
    return check_checkpoint(open_index(directory), config)


class DenseLoader:
    """Reads weights that every rank holds. `progress` is called with the bytes of each block read.

    `staging`: what blocks go through on their way to a GPU.
    """

    def __init__(
        self,
        checkpoint: CheckedCheckpoint,
        *,
        backend: Backend,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._staging = staging
        self._dtype = dtype
        self._backend = backend
        self._progress = progress
        # One for all parameters: a block allocated per parameter leaves holes between the parameters that are kept.
        self._scratch: torch.Tensor | None = None

    def load(self, weight: Weight) -> torch.Tensor:
        """The parameter `weight` describes, in the served dtype or float32 where it says so."""
        dtype = torch.float32 if weight.fp32 else self._dtype
        filled = sum(num_elements(part.shape) for part in weight.parts)
        allocate = torch.empty if filled == num_elements(weight.shape) else torch.zeros
        out = allocate(weight.shape, dtype=dtype, device=self._backend.device)
        for part in weight.parts:
            rows = out.view(-1, *part.shape[1:])[part.row : part.row + part.shape[0]]
            entry = self._checkpoint.index.entries[part.key]
            if self._staging is None:
                self._read(part.key, entry, rows.view(-1))
            else:
                self._stage(self._staging, part.key, entry, rows.view(-1))
            if part.regroup is not None:
                _regroup(rows, *part.regroup)
        if weight.plus:
            out += weight.plus
        return self._backend.matrix(out) if weight.matrix else out

    def _stage(self, staging: Staging, key: str, entry: TensorEntry, out: torch.Tensor) -> None:
        """The same through pinned memory; the last copies still run when this returns."""
        for piece in pieces(key, entry, staging.num_bytes):
            (place,) = staging.read(piece)
            put(out[piece.begin : piece.begin + piece.count], place)
            if self._progress is not None:
                self._progress(piece.num_bytes)

    def _read(self, key: str, entry: TensorEntry, out: torch.Tensor) -> None:
        """Fill the flat `out` from the file, block by block."""
        stored = TORCH_DTYPES[entry.dtype]
        direct = out.dtype == stored and out.device.type == "cpu"
        block = _SCRATCH_BYTES // stored.itemsize
        if self._scratch is None and not direct:
            self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
        scratch = None if direct or self._scratch is None else self._scratch.view(stored)
        with open_checked(entry) as stream:
            for begin in range(0, out.numel(), block):
                target = out[begin : begin + block]
                place = target if scratch is None else scratch[: target.numel()]
                read_exactly(stream.fileno(), entry, key, begin * stored.itemsize, place)
                if scratch is not None:
                    target.copy_(place)
                if self._progress is not None:
                    self._progress(place.numel() * stored.itemsize)


def _regroup(rows: torch.Tensor, groups: int, pieces: Sequence[tuple[int, int]]) -> None:
    """Put rows that are stored group by group into the order of `pieces`: see `Part.regroup`."""
    stored = rows.unflatten(0, (groups, -1)).clone()
    rows.copy_(torch.cat([stored[:, begin:end].flatten(0, 1) for begin, end in pieces]))


class MappedExperts:
    """`ExpertSource` over the checkpoint's files: views into memory maps, opened when first asked for.

    The maps live as long as this object or a tensor from it. A file that is written to meanwhile changes under them,
    one that is cut ends the process with SIGBUS where it is read: `tensors` and `check` raise CheckpointError instead,
    as far as they come before. A file that is replaced by renaming stays what it was.
    """

    def __init__(self, checkpoint: CheckedCheckpoint) -> None:
        self._spec: ModelSpec = checkpoint.spec
        self._entries = checkpoint.index.entries
        self._maps: dict[Path, _Mapped] = {}

    def tensors(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) as stored; treat them as read-only."""
        names = self._spec.layers[layer].experts
        assert names is not None, f"layer {layer} has no experts"
        assert 0 <= expert < self._spec.config.num_experts, expert
        if names.fused:
            return self._fused(names, expert)
        gate, up, down = (self._view(key) for key, _ in self._spec.expert_tensors(names, expert))
        return gate, up, down

    def check(self, layer: int, expert: int) -> None:
        """Raise CheckpointError if a file with this expert has changed. After its tensors were copied, before use."""
        names = self._spec.layers[layer].experts
        assert names is not None, f"layer {layer} has no experts"
        for file in {self._entries[key].file for key, _ in self._spec.expert_tensors(names, expert)}:
            self._maps[file].check(file)

    def _fused(self, names: ExpertNames, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate_up, down = self._view(names.fused_gate_up)[expert], self._view(names.fused_down)[expert]
        width = self._spec.config.moe_intermediate_size
        return gate_up[:width], gate_up[width:], down

    def _view(self, key: str) -> torch.Tensor:
        entry = self._entries[key]
        mapped = self._maps.get(entry.file)
        if mapped is None:
            mapped = self._maps[entry.file] = _Mapped(entry)
        mapped.check(entry.file)
        dtype = TORCH_DTYPES[entry.dtype]
        count = num_elements(entry.shape)
        return torch.frombuffer(mapped.memory, dtype=dtype, count=count, offset=entry.start).view(entry.shape)


class _Mapped:
    """A file in memory, and the open file that tells whether it was written to."""

    def __init__(self, entry: TensorEntry) -> None:
        # Private and writable in name only: torch wants a writable buffer, the pages stay the file's.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        with open_checked(entry) as file:
            self.memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._fd = os.dup(file.fileno())
        self._stamp = entry.stamp
        weakref.finalize(self, os.close, self._fd)

    def check(self, path: Path) -> None:
        """Raise CheckpointError if the file is not as it was."""
        check_unchanged(path, self._fd, self._stamp)
