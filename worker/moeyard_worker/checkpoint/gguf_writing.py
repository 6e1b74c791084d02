"""Write a checkpoint as a GGUF file of Q8_0 matrices, with the package of llama.cpp.

Names, types and the order of rows are those of llama.cpp's converter with `--outtype q8_0`: norms, biases and router
gates are F32, matrices whose rows are not whole blocks are F16, and all others are Q8_0. `gguf.quants` rounds: a block
of 32 values has the scale max(abs(x)) / 127 as fp16, and a code is x / scale, rounded to nearest and away from 0.

This file needs the package `gguf` (`moeyard[gguf]`). Reading GGUF files does not.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch

from moeyard_worker.checkpoint.check import check_checkpoint
from moeyard_worker.checkpoint.converting import is_quantized, separate_parts
from moeyard_worker.checkpoint.formats.gguf import PairedScheme, SplitKvScheme
from moeyard_worker.checkpoint.ggml_blocks import BLOCK_TYPES
from moeyard_worker.checkpoint.gguf_config import gguf_keys, sampling_keys
from moeyard_worker.checkpoint.gguf_index import gguf_names
from moeyard_worker.checkpoint.gguf_tokenizer import tokenizer_keys
from moeyard_worker.checkpoint.identity import CONFIG_NAME
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.checkpoint.reading import Reader
from moeyard_worker.checkpoint.writing import SHARD_BYTES, check_space, new_directory
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import Fields, read_json
from moeyard_worker.layers.weights import Part, num_elements
from moeyard_worker.models.families import gguf_format, load_model_config
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.tokenizer import TokenizerFiles

_KINDS = gguf.GGMLQuantizationType
_ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
# The file beside an unfinished one with the number of its bytes that are on the disk.
_WRITTEN = "written.json"
# The rows of a stored part, from the rows of the model.
Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the file: its type, its shape, and the parts it is made of. Several parts are stacked."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    parts: tuple[tuple[Part, Rows], ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape of the stored array: of bytes for Q8_0."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.kind) if self.kind == _KINDS.Q8_0 else self.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype({_KINDS.F32: np.float32, _KINDS.F16: np.float16}.get(self.kind, np.uint8))

    @property
    def num_bytes(self) -> int:
        return num_elements(self.stored) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGguf:
    """A GGUF file to be written: its metadata and its tensors by name. `identity` is that of the source.

    architecture: the key `general.architecture`, which the package adds.
    has_tokenizer: whether the tokenizer is part of the metadata.
    """

    identity: Mapping[str, tuple[str, str]]
    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, _Tensor]
    reader: Reader
    has_tokenizer: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors. The sum of `progress` reaches it."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def write(self, out: Path, progress: Callable[[int], None]) -> Path:
        """Write the file OUT/OUT.gguf, and return its path. `progress` is called with the bytes of every tensor.

        An interrupted run is continued behind its last whole tensor. Raises ValueError if `out` exists or cannot be
        written, and CheckpointError for values that have no codes.
        """
        with new_directory(out, {"source": self.identity, "to": "q8_0"}) as directory:
            path, record = directory / f"{out.name}.gguf", directory / _WRITTEN
            header = self._header(directory / "header", {**self.keys, "general.name": out.name})
            written = _written(path, record, header)
            with path.open("r+b" if written else "wb") as file:
                # Bytes of an interrupted run count as free.
                file.truncate(written)
                check_space(directory, self.num_bytes - written)
                file.write(header)
                self._write(file, len(header), written, record, progress)
            record.unlink()
        return out / path.name

    def _header(self, path: Path, keys: Mapping[str, Any]) -> bytes:
        """Return the bytes in front of the first tensor, by way of the file `path`, which is removed."""
        with closing(gguf.GGUFWriter(path, self.architecture)) as writer:
            for key, value in keys.items():
                # 32 bits, as in other files.
                kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}.get(type(value))
                writer.add_key_value(key, value, kind or gguf.GGUFValueType.get_type(value))
            for name, tensor in self.tensors.items():
                writer.add_tensor_info(name, tensor.stored, tensor.dtype, tensor.num_bytes, tensor.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        header = path.read_bytes()
        path.unlink()
        return header + bytes(-len(header) % _ALIGNMENT)

    def _write(self, file: BinaryIO, end: int, written: int, record: Path, progress: Callable[[int], None]) -> None:
        """Write all tensors behind byte `end`, except those whose last byte is below `written`.

        `record` gets the bytes that are on the disk, after every few gigabytes and if the run ends early.
        """
        marked = written
        try:
            for tensor in self.tensors.values():
                padding = -tensor.num_bytes % _ALIGNMENT
                behind = end + tensor.num_bytes + padding
                if behind > written:
                    file.seek(end)
                    # `GGUFWriter.write_tensor_data` loses the operating system's reasons for writing too little.
                    file.write(self._make(tensor).data)
                    file.write(bytes(padding))
                end = behind
                if end > marked + SHARD_BYTES:
                    marked = _mark(file, end, record)
                progress(tensor.num_bytes)
        finally:
            _mark(file, end, record)

    def _make(self, tensor: _Tensor) -> np.ndarray[Any, Any]:
        array = np.empty((len(tensor.parts), tensor.num_bytes // len(tensor.parts)), np.uint8)
        for row, (part, rows) in zip(array, tensor.parts, strict=True):
            values = torch.empty(part.shape)
            self.reader.copy(part.key, values, part.begin * num_elements(part.shape[1:]))
            row[:] = _encode(part.key, rows(values), tensor.kind)
        return array.reshape(-1).view(tensor.dtype).reshape(tensor.stored)


def _written(path: Path, record: Path, header: bytes) -> int:
    """Return the bytes of an earlier run's file that are on the disk, 0 unless the file begins with `header`."""
    found = record.read_text() if record.exists() and path.exists() else ""
    if not found.isdigit() or path.stat().st_size < int(found):
        return 0
    with path.open("rb") as file:
        return int(found) if file.read(len(header)) == header else 0


def _mark(file: BinaryIO, end: int, record: Path) -> int:
    """Bring `file` to the disk, and record that its bytes below `end` are there. Return `end`."""
    file.flush()
    os.fsync(file.fileno())
    record.write_text(str(end))
    return end


def q8_0(directory: Path | str, files: TokenizerFiles | None, templates: Mapping[str, str]) -> NewGguf:
    """Return the GGUF file of a checkpoint of bfloat16 or float32 weights, with its tokenizer and chat templates.

    Layers of multi-token prediction are left out. Raises CheckpointError for a model that has no such file.
    """
    directory = Path(directory)
    model, index = load_model_config(directory), open_index(directory)
    checkpoint = check_checkpoint(index, model)
    if is_quantized(model):
        raise CheckpointError(f"{directory}: is quantised already; give its bfloat16 checkpoint (moeyard dequantize)")
    stored = None if files is None else tokenizer_keys(files, model.vocab_size, templates)
    # The first end token is the tokenizer's.
    first = None if stored is None else stored.get("tokenizer.ggml.eos_token_id")
    ordered = replace(model, eos_token_ids=tuple(sorted(model.eos_token_ids, key=lambda number: number != first)))
    config = read_json(directory / CONFIG_NAME)
    settings = Fields(str(directory / CONFIG_NAME), config.get("text_config", config))
    generation = directory / "generation_config.json"
    keys: dict[str, Any] = {
        **gguf_keys(ordered, settings),
        "general.type": "model",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q8_0),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **(sampling_keys(read_json(generation)) if generation.exists() else {}),
        **(stored or {}),
    }
    return NewGguf(
        identity=checkpoint.identity,
        architecture=keys.pop("general.architecture"),
        keys=keys,
        tensors=_tensors(checkpoint.spec),
        reader=Reader(index.entries),
        has_tokenizer=stored is not None,
    )


def _tensors(spec: ModelSpec) -> dict[str, _Tensor]:
    """Return the tensors of the file by name."""
    names = gguf_names(spec.config, spec.names)
    stacks: dict[str, list[tuple[Part, Rows]]] = {}
    for source, key in separate_parts(spec):
        for stored, rows in _stored(spec, Part(key, source.shape)):
            name = names[re.sub(r"\.experts\.\d+\.", ".experts.{e}.", stored)]
            stacks.setdefault(name, []).append((replace(source, regroup=None), rows))
    found = {}
    for name, parts in stacks.items():
        first, rows = parts[0]
        shape = tuple(rows(torch.empty(first.shape, device="meta")).shape)
        if len(shape) == 1 or "ffn_gate_inp." in name:
            kind = _KINDS.F32
        else:
            kind = _KINDS.F16 if shape[-1] % BLOCK_TYPES["Q8_0"].elements else _KINDS.Q8_0
        found[name] = _Tensor(kind, (len(parts), *shape) if "_exps." in name else shape, tuple(parts))
    return found


def _stored(spec: ModelSpec, part: Part) -> Iterator[tuple[str, Rows]]:
    """Yield the keys under which a GGUF file stores a part, and the rows of each. The inverse of `decoding.fill`."""
    match gguf_format(spec.config).scheme(part, ()):
        case PairedScheme(dim=dim):
            yield part.key, lambda values: values.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)
        case SplitKvScheme(heads=heads, nope=nope) as scheme:
            k_b, v_b = scheme.keys(part)
            yield k_b, lambda values: values.unflatten(0, (heads, -1))[:, :nope].transpose(1, 2)
            yield v_b, lambda values: values.unflatten(0, (heads, -1))[:, nope:]
        case _:
            yield part.key, lambda values: values


def _encode(key: str, values: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return the bytes of values. Raises CheckpointError naming the tensor for values that the type cannot hold."""
    with np.errstate(all="ignore"):
        stored = gguf.quants.quantize(values.contiguous().numpy(), kind)
    finite = np.isfinite(stored).all()
    if kind == _KINDS.Q8_0:
        blocks = BLOCK_TYPES["Q8_0"]
        finite = blocks.finite(torch.from_numpy(stored).view(-1, blocks.num_bytes))
    if not finite:
        raise CheckpointError(
            f"{key} holds values that are not finite or too large, which cannot be written as {kind.name}"
        )
    return stored.reshape(-1).view(np.uint8)
