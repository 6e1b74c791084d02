"""Convert a checkpoint: to the bfloat16 checkpoint that a quantised one stands for, or to a quantised one.

Layers of multi-token prediction beyond the first are left out, because the server never reads them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moeyard_kernels.types.matrix import Matrix
from moeyard_worker.checkpoint.check import DRAFT_LAYER, CheckedCheckpoint, check_checkpoint
from moeyard_worker.checkpoint.decoding import fill
from moeyard_worker.checkpoint.formats.choose import plain_config
from moeyard_worker.checkpoint.formats.plain import PlainScheme
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.checkpoint.identity import CONFIG_NAME
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.checkpoint.reading import DTYPES, Reader
from moeyard_worker.checkpoint.writing import NewCheckpoint, Piece
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import read_json
from moeyard_worker.layers.weights import Part
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.spec import ModelSpec, model_spec


def dequantized(directory: Path | str) -> NewCheckpoint:
    """Return the bfloat16 checkpoint that has the answers of the quantised one. Raises CheckpointError for another.

    Tensors that are not quantised keep their dtype, but float16 becomes float32, because plain checkpoints have none.
    """
    checkpoint = _open(directory)
    spec = checkpoint.spec
    if not isinstance(spec.config.weights, QuantizedFormat):
        raise CheckpointError(f"{directory}: its weights are not quantised")
    reader = Reader(checkpoint.index.entries)
    slices: dict[str, list[Part]] = {}
    for part in _parts(spec):
        slices.setdefault(part.key, []).append(part)
    pieces = []
    for key, parts in slices.items():
        if isinstance(spec.scheme(parts[0]), PlainScheme):
            pieces.append(_copy(checkpoint, reader, key))
            continue
        shape = parts[0].whole or parts[0].shape
        make = partial(_dequantize, spec, reader, parts if parts[0].whole else parts[:1])
        pieces.append(Piece({key: (torch.bfloat16, shape)}, make))
    pieces += [_copy(checkpoint, reader, key) for key in _others(checkpoint)]
    return _new(checkpoint, plain_config(_config(directory)), pieces)


def _dequantize(spec: ModelSpec, reader: Reader, parts: list[Part]) -> dict[str, torch.Tensor]:
    first = parts[0]
    values = torch.empty(first.whole or first.shape, dtype=torch.bfloat16)
    out = Matrix.plain(values.flatten(0, -2))
    for part in parts:
        # The rows keep the order in which they are stored.
        part = replace(part, regroup=None)
        fill(out.rows(part.begin, part.shape[0]), part, spec.scheme(part), reader.copy)
    return {first.key: values}


def _config(directory: Path | str) -> dict[str, object]:
    return read_json(Path(directory) / CONFIG_NAME)


def _open(directory: Path | str) -> CheckedCheckpoint:
    """Check a checkpoint. Its layer of multi-token prediction counts as read if it has one."""
    config, index = load_model_config(directory), open_index(directory)
    names = model_spec(config, index.entries).names
    drafts = names.draft_layer.format(i=names.first_draft(config.num_layers))
    if config.num_mtp_layers and any(key.startswith(drafts) for key in index.entries):
        config = config.with_drafts()
    return check_checkpoint(index, config)


def _new(checkpoint: CheckedCheckpoint, config: dict[str, object], pieces: list[Piece]) -> NewCheckpoint:
    source = checkpoint.index.directory
    return NewCheckpoint(source=source, identity=checkpoint.identity, config=config, pieces=tuple(pieces))


def _parts(spec: ModelSpec) -> Iterator[Part]:
    """Yield all parts of all weights, including every expert."""
    for weight in spec.dense():
        yield from weight.parts
    for layer in spec.layers:
        if layer.experts is not None:
            for expert in range(spec.config.num_experts):
                yield from spec.expert_parts(layer.experts, expert)


def _others(checkpoint: CheckedCheckpoint) -> Iterator[str]:
    """Yield the keys that the server does not read and that belong to a plain checkpoint too."""
    for key, reason in checkpoint.skipped.items():
        if reason != DRAFT_LAYER and checkpoint.spec.config.weights.skips(key) is None:
            yield key


def _copy(checkpoint: CheckedCheckpoint, reader: Reader, key: str) -> Piece:
    entry = checkpoint.index.entries[key]
    dtype = torch.float32 if entry.dtype == "F16" else DTYPES[entry.dtype]
    return Piece({key: (dtype, entry.shape)}, partial(_read, reader, key, entry.shape, dtype))


def _read(reader: Reader, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    out = torch.empty(shape, dtype=dtype)
    reader.copy(key, out)
    return {key: out}
