"""Convert a checkpoint: to the bfloat16 checkpoint that a quantised one stands for, or to a quantised one.

Layers of multi-token prediction beyond the first are left out, because the server never reads them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import WeightForm, fp8_form, int4_form
from moeyard_worker.checkpoint.check import DRAFT_LAYER, CheckedCheckpoint, check_checkpoint, find_tensors
from moeyard_worker.checkpoint.decoding import fill
from moeyard_worker.checkpoint.formats.choose import choose_format, plain_config
from moeyard_worker.checkpoint.formats.compressed_tensors import PackedInt4Scheme
from moeyard_worker.checkpoint.formats.fp8 import Fp8Scheme
from moeyard_worker.checkpoint.formats.plain import PlainScheme
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat, QuantizedScheme
from moeyard_worker.checkpoint.identity import CONFIG_NAME
from moeyard_worker.checkpoint.quantizing import quantize
from moeyard_worker.checkpoint.reading import DTYPES, Reader
from moeyard_worker.checkpoint.writing import NewCheckpoint, Piece
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import Fields, read_json
from moeyard_worker.layers.weights import Part
from moeyard_worker.models.families import load_model_config
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import quantization_config
from moeyard_worker.models.spec import ModelSpec, model_spec

# Stored dtypes whose values are read as they are.
_FLOATS = ("F32", "BF16", "F16")


def is_quantized(config: ModelConfig) -> bool:
    """Return whether any weights of the checkpoint are stored as codes."""
    return isinstance(config.weights, QuantizedFormat)


def dequantized(directory: Path | str, gguf: str | None = None) -> NewCheckpoint:
    """Return the bfloat16 checkpoint that has the answers of the quantised one. Raises CheckpointError for another.

    Tensors that are not quantised keep their values: float16 becomes float32, because plain checkpoints have none.
    With `gguf` the weights are those of a GGUF file, and `directory` describes its model.
    """
    checkpoint = _open(directory, gguf)
    spec, entries = checkpoint.spec, checkpoint.index.entries
    if gguf is None and not is_quantized(spec.config):
        raise CheckpointError(f"{directory}: its weights are not quantised")
    reader = Reader(entries)
    slices: dict[str, list[Part]] = {}
    for part in spec.parts():
        slices.setdefault(part.key, []).append(part)
    pieces = []
    for key, parts in slices.items():
        coded = not parts[0].ids and any(entries[each].dtype not in _FLOATS for each in spec.stored(parts[:1]))
        if type(spec.scheme(parts[0])) is PlainScheme and not coded:
            pieces.append(_copy(checkpoint, reader, key))
            continue
        # Rows of plain values may be in another order than that of the checkpoint.
        dtype, shape = torch.bfloat16 if coded else torch.float32, parts[0].whole or parts[0].shape
        make = partial(_dequantize, checkpoint, reader, parts if parts[0].whole else parts[:1], dtype)
        pieces.append(Piece({key: (dtype, shape)}, make))
    if gguf is None:
        pieces += [_copy(checkpoint, reader, key) for key in _others(checkpoint)]
    return _new(checkpoint, plain_config(_config(directory)), pieces)


def _dequantize(
    checkpoint: CheckedCheckpoint, reader: Reader, parts: list[Part], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    first, spec, entries = parts[0], checkpoint.spec, checkpoint.index.entries
    values = torch.empty(first.whole or first.shape, dtype=dtype)
    out = Matrix.plain(values.flatten(0, -2))
    for part in parts:
        # The rows keep the order in which they are stored.
        part = replace(part, regroup=None)
        fill(out.rows(part.begin, part.shape[0]), part, spec.scheme(part), reader.copy, entries)
    return {first.key: values}


def quantized(directory: Path | str, name: str) -> NewCheckpoint:
    """Return the checkpoint of bfloat16 or float32 weights, rounded to the nearest codes of a form of `QUANTIZATIONS`.

    Only projections are quantised, with "int4-..." only those of experts. Each expert gets its own tensors. All other
    tensors are copied. Raises CheckpointError for a model that the form does not fit.
    """
    checkpoint = _open(directory)
    if is_quantized(checkpoint.spec.config):
        raise CheckpointError(f"{directory}: is quantised already; give its bfloat16 checkpoint (moeyard dequantize)")
    settings = quantization_config(name)
    config = {**plain_config(_config(directory)), "quantization_config": settings}
    target = choose_format(Fields(str(Path(directory) / CONFIG_NAME), config))
    assert isinstance(target, QuantizedFormat)
    reader = Reader(checkpoint.index.entries)
    pieces, plain = [], []
    for source, key in separate_parts(checkpoint.spec):
        part = Part(key, source.shape)
        scheme = target.written(part)
        if scheme is None:
            plain.append(key)
            continue
        why = scheme.refusal(part)
        if why is not None:
            raise CheckpointError(f"{directory}: {key} cannot be written as {name}: {why}")
        stored = scheme.stored(part)
        tensors = {each: (DTYPES[tensor.dtypes[0]], tensor.shape) for each, tensor in stored.items()}
        pieces.append(Piece(tensors, partial(_quantize, reader, source, _form(scheme), tuple(stored))))
    plain += _others(checkpoint)
    pieces += [_copy(checkpoint, reader, key) for key in dict.fromkeys(plain)]
    # Other software quantises every linear layer that is not listed.
    modules = [key.removesuffix(".weight") for key in plain if len(checkpoint.index.entries[key].shape) == 2]
    listed = "modules_to_not_convert" if name == "fp8" else "ignore"
    unnamed = [module for module in dict.fromkeys(modules) if target.promised(module) is not None]
    settings[listed] = [*settings.get(listed, ()), *unnamed]
    return _new(checkpoint, config, pieces)


def _quantize(reader: Reader, source: Part, form: WeightForm, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    values = torch.empty(source.shape)
    fill(Matrix.plain(values), replace(source, regroup=None), PlainScheme(), reader.copy)
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{source.key} holds values that are not finite, which cannot be quantised")
    # The shape is stored only with int4 codes, which are packed.
    return dict(zip(keys, (*quantize(values, form).arrays, torch.tensor(source.shape)), strict=False))


def _form(scheme: QuantizedScheme) -> WeightForm:
    match scheme:
        case Fp8Scheme():
            return fp8_form(scheme.rows, scheme.columns, scales="bfloat16")
        case PackedInt4Scheme():
            return int4_form(scheme.group, scales=scheme.scales, zeros=False)
    raise AssertionError(f"{scheme} is only read")


def separate_parts(spec: ModelSpec) -> Iterator[tuple[Part, str]]:
    """Yield all parts, and the keys to write them under. A tensor of all experts becomes tensors of one expert."""
    layers = (replace(each, experts=each.experts and replace(each.experts, fused=False)) for each in spec.layers)
    for source, part in zip(spec.parts(), replace(spec, layers=tuple(layers)).parts(), strict=True):
        yield source, part.key


def _config(directory: Path | str) -> dict[str, object]:
    return read_json(Path(directory) / CONFIG_NAME)


def _open(directory: Path | str, gguf: str | None = None) -> CheckedCheckpoint:
    """Check a checkpoint. Its layer of multi-token prediction counts as read if it has one."""
    config = load_model_config(directory, gguf=gguf is not None)
    index = find_tensors(directory, config, gguf)
    names = model_spec(config, index.entries).names
    drafts = names.draft_layer.format(i=names.first_draft(config.num_layers))
    if config.num_mtp_layers and any(key.startswith(drafts) for key in index.entries):
        config = config.with_drafts()
    return check_checkpoint(index, config)


def _new(checkpoint: CheckedCheckpoint, config: dict[str, object], pieces: list[Piece]) -> NewCheckpoint:
    source = checkpoint.index.directory
    return NewCheckpoint(source=source, identity=checkpoint.identity, config=config, pieces=tuple(pieces))


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
