"""Load a checkpoint's weights onto a backend: parameters that every rank holds, and experts on demand.

Peak memory is that of the loaded weights, one more parameter and one block. A few experts for a GPU are in
pinned host memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.types.matrix import ExpertViews, Matrix, blob_views
from moeyard_worker.checkpoint.check import CheckedCheckpoint, DummyCheckpoint, check_checkpoint, find_tensors
from moeyard_worker.checkpoint.decoding import Read, fill
from moeyard_worker.checkpoint.dummy import DummyWeights
from moeyard_worker.checkpoint.formats.plain import PlainScheme
from moeyard_worker.checkpoint.ggml_blocks import BLOCK_TYPES
from moeyard_worker.checkpoint.read_ahead import ReadAhead
from moeyard_worker.checkpoint.reading import PinnedBuffers, Reader
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.weights import Part, Weight
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import ModelSpec

_HOST = torch.device("cpu")


def open_checkpoint(directory: Path | str, config: ModelConfig, gguf: str | None = None) -> CheckedCheckpoint:
    """Read all headers and check that the checkpoint, or the GGUF file, is complete. Raises CheckpointError."""
    return check_checkpoint(find_tensors(directory, config, gguf), config)


def open_weights(
    checkpoint: CheckedCheckpoint | DummyCheckpoint,
    backend: Backend,
    dtype: torch.dtype,
    pinned: PinnedBuffers | None,
    progress: Callable[[int], None],
) -> "CheckpointWeights | DummyWeights":
    """Return the source of dense weights and experts. `progress` is called with the bytes of every block."""
    if isinstance(checkpoint, DummyCheckpoint):
        return DummyWeights(checkpoint.spec, backend=backend, dtype=dtype, progress=progress)
    return CheckpointWeights(checkpoint, backend=backend, dtype=dtype, progress=progress, pinned=pinned)


def read_through(
    checkpoint: CheckedCheckpoint,
    dtype: torch.dtype,
    experts: Iterable[tuple[int, int]],
    compare: Callable[[ModelSpec, Callable[[Weight], Any]], None] | None = None,
    *,
    decoder: torch.device = _HOST,
) -> None:
    """Read all dense weights and these experts, (layer, expert), in host memory, and keep nothing.

    decoder: the device that decodes codes, one matrix or expert at a time. A GPU is about a hundred times as fast.

    A rank without room for a second copy calls it before it overwrites its weights: files that cannot be read, damaged
    scales, and values that are not finite are found before the first byte changes. `compare` loads all dense weights
    and compares them with those in use (`Runner.compare`). Raises CheckpointError and OSError, and the errors of
    `compare`.
    """
    host = _HostBackend()
    weights = CheckpointWeights(
        checkpoint, backend=cast("Backend", host), dtype=dtype, refuses_nan=True, decoder=decoder
    )
    if compare is None:
        for weight in checkpoint.spec.dense():
            weights.load(weight)
    else:
        compare(checkpoint.spec, weights.load)
    weights.read_experts(experts)


class _HostBackend:
    """The part of a backend that loading needs, in host memory and without packing."""

    device = _HOST

    def matrix(self, weight: Matrix) -> Matrix:
        return weight


class CheckpointWeights:
    """Loads the weights of a checked checkpoint, served in `dtype`: parameters by `load`, experts by `fill`.

    `progress` is called with the bytes of each block read for parameters. A GPU needs `pinned`. With `read` the values
    come from it instead of the files. `refuses_nan`: raise CheckpointError for values that are not finite. `decoder`:
    the device that decodes codes, if it is not the backend's.
    """

    def __init__(
        self,
        checkpoint: CheckedCheckpoint,
        *,
        backend: Backend,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
        pinned: PinnedBuffers | None = None,
        read: Read | None = None,
        refuses_nan: bool = False,
        decoder: torch.device | None = None,
    ) -> None:
        self._spec, self._decoder = checkpoint.spec, decoder or backend.device
        self._backend, self._dtype = backend, str(dtype).removeprefix("torch.")
        self._reader = Reader(checkpoint.index.entries, pinned, refuses_nan=refuses_nan)
        self._ahead: ReadAhead | None = None
        self._read = partial(self._reader.copy, progress=progress) if read is None else read
        self._read_expert = self._reader.copy if read is None else read
        # Errors name the files that values come from.
        self._entries = checkpoint.index.entries if read is None else {}

    @property
    def read_rate(self) -> float | None:
        """Bytes/s that the files gave so far."""
        return self._reader.read_bytes / self._reader.read_seconds if self._reader.read_seconds else None

    def load(self, weight: Weight) -> Any:
        """Return the parameter that `weight` describes: a `Matrix` if `weight.matrix`, else a tensor.

        Raises CheckpointError for a table of experts that names one which does not exist.
        """
        form, device = self._spec.form(weight, self._dtype), self._backend.device
        out = Matrix.empty(form, weight.rows, weight.columns, self._decoder if self._coded(weight) else device)
        if sum(part.shape[0] for part in weight.parts) < weight.rows:
            for array in out.arrays:
                array.zero_()
        for part in weight.parts:
            fill(out.rows(part.row, part.shape[0]), part, self._spec.scheme(part), self._read, self._entries)
            if part.ids:
                self._check_table(part.key, out.data)
        out = replace(out, arrays=tuple(array.to(device) for array in out.arrays))
        if weight.plus:
            out.data.add_(weight.plus)
        return self._backend.matrix(out) if weight.matrix else out.data.view(weight.shape)

    def _coded(self, weight: Weight) -> bool:
        """Return whether any part of a weight is stored as codes."""
        return any(
            not isinstance(self._spec.scheme(part), PlainScheme)
            or (part.key in self._entries and self._entries[part.key].dtype in BLOCK_TYPES)
            for part in weight.parts
        )

    def _check_table(self, key: str, table: torch.Tensor) -> None:
        low, high, count = int(table.min()), int(table.max()), self._spec.config.num_experts
        if low < 0 or high >= count:
            at = f"{self._entries[key].file}: " if key in self._entries else ""
            raise CheckpointError(f"{at}{key} names experts {low} to {high}, of {count}")

    def expect(self, experts: Iterable[tuple[int, int]]) -> None:
        """Announce the next calls of `fill`, (layer, expert) in order. Those for a GPU are read ahead."""
        if self._reader.pinned is not None:
            self._ahead = ReadAhead(self._reader, ((each, self._keys(self._parts(*each))) for each in experts))

    def fill(self, layer: int, expert: int, out: ExpertViews) -> None:
        """Write an expert into `out`. Raises CheckpointError if a file has changed since it was checked."""
        ahead: AbstractContextManager[Mapping[str, torch.Tensor]] = nullcontext({})
        if self._ahead is not None:
            ahead = self._ahead.use((layer, expert))
        with ahead as stored:
            read = partial(self._copy_expert, stored) if stored else self._read_expert
            for part, target in zip(self._parts(layer, expert), (out.gate, out.up, out.down), strict=True):
                fill(target, part, self._spec.scheme(part), read, self._entries)

    def _parts(self, layer: int, expert: int) -> tuple[Part, Part, Part]:
        names = self._spec.layers[layer].experts
        assert names is not None, f"layer {layer} has no experts"
        assert 0 <= expert < self._spec.config.num_experts, expert
        return self._spec.expert_parts(names, expert)

    def _keys(self, parts: Sequence[Part]) -> Sequence[str]:
        """Return the keys of the tensors to read ahead: none for parts of fused tensors and for blocks of GGUF."""
        found = [] if any(part.whole for part in parts) else list(self._spec.stored(parts))
        return [key for key in found if self._entries[key].dtype not in BLOCK_TYPES]

    def _copy_expert(self, stored: Mapping[str, torch.Tensor], key: str, out: torch.Tensor, begin: int = 0) -> None:
        if key in stored:
            assert begin == 0, "a whole tensor is read ahead"
            self._reader.launch(key, stored[key], out)
        else:
            self._read_expert(key, out, begin)

    def read_experts(self, experts: Iterable[tuple[int, int]]) -> None:
        """Read these experts, (layer, expert), to find faults, and keep nothing. Raises CheckpointError."""
        form = self._spec.config.expert_form(self._dtype)
        views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8, device=self._decoder))
        for layer, expert in experts:
            self.fill(layer, expert, views)

    def trust(self) -> None:
        """Check the values no more, because all have been read once."""
        self._reader.refuses_nan = False
