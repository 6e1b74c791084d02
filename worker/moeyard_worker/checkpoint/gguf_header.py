"""The header of a GGUF file: its metadata, and every tensor's type, shape and offset. Reads headers only.

The format (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor descriptions, then
the data of each tensor at a multiple of the alignment. The reader of the `gguf` package is not used, because it trusts
the file: it maps the whole file, makes an array object of each token, and bounds no count. A file may be hostile or
cut short, so everything here is bounded and compared with the file's size.
"""

import io
import math
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from moeyard_worker.checkpoint.index import MAX_KEY, FileStamp, TensorEntry
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import MAX_VOCAB
from moeyard_worker.config.files import open_regular

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# The largest headers in use have 15 MB: 160,000 tokens and as many merges (2026-11).
MAX_HEADER_BYTES = 64_000_000
MAX_PAIRS = 1 << 12
MAX_TENSORS = 1 << 17
MAX_RANK = 4
# A value of the metadata that is kept. Chat templates are the longest, and have 20 KB.
MAX_TEXT_BYTES = 1 << 20
_MAX_ALIGNMENT = 1 << 16
# The struct code of each scalar type of the metadata, by its number.
_SCALARS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_TEXT, _ARRAY = 8, 9

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of ggml: `elements` values in a block of `num_bytes` bytes. Rows consist of whole blocks."""

    name: str
    elements: int
    num_bytes: int


# The types that are read, by their numbers in ggml.h.
TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        8: TensorType("Q8_0", 32, 34),
        12: TensorType("Q4_K", 256, 144),
        14: TensorType("Q6_K", 256, 210),
        30: TensorType("BF16", 1, 2),
    }
)
# The names of other types, for errors.
_OTHER_TYPES = MappingProxyType(
    {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS"}
    | {17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8"}
    | {25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, and the tensors by name. Shapes are row-major, as those of torch.

    arrays: the arrays of the metadata. Those that were not asked for are empty.
    """

    file: Path
    metadata: Mapping[str, Value]
    arrays: Mapping[str, tuple[Value, ...]]
    tensors: Mapping[str, TensorEntry]

    def error(self, key: str, message: str) -> CheckpointError:
        """Return the error to raise about one key or tensor."""
        return CheckpointError(f"{self.file}: {key} {message}")

    def integer(self, key: str) -> int | None:
        """Return an integer of the metadata, None if it is absent. Raises CheckpointError for another type."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not int:
            raise self.error(key, f"is {value!r:.80}, expected an integer")
        return value


def read_gguf_header(file: Path, arrays: Container[str] = ()) -> GgufHeader:
    """Return the header of one file, checked against its size, with the values of these arrays.

    Raises CheckpointError naming file and key.
    """
    with open_regular(file) as stream:
        stamp = FileStamp.of(stream.fileno())
        source = _Source(file, stream, min(stamp.size, MAX_HEADER_BYTES))
        if source.take(4, "the magic") != _MAGIC:
            raise CheckpointError(f"{file}: not a GGUF file, which begins with GGUF")
        version = source.number("I", "the version")
        if version not in _VERSIONS:
            raise CheckpointError(f"{file}: GGUF version {version} is not supported (supported: 2, 3; little-endian)")
        num_tensors = source.count(MAX_TENSORS, "tensors")
        metadata, found = _read_metadata(source, source.count(MAX_PAIRS, "key-value pairs"), arrays)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment.bit_count() != 1:
            raise CheckpointError(f"{file}: general.alignment is {alignment!r:.80}, expected a power of two")
        described = [_describe(source) for _ in range(num_tensors)]
    return GgufHeader(file, metadata, found, _place(described, source, alignment, stamp))


class _Source:
    """Reads an open file from its start, at most `limit` bytes."""

    def __init__(self, file: Path, stream: BinaryIO, limit: int) -> None:
        self.file, self.position = file, 0
        self._stream, self._limit = io.BufferedReader(stream, 1 << 20), limit  # type: ignore[type-var]

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes. Raises CheckpointError if the header ends in `what`."""
        if count > self._limit - self.position:
            raise self.cut(what)
        found = self._stream.read(count)
        if len(found) < count:
            raise self.cut(what)
        self.position += count
        return found

    def cut(self, what: str) -> CheckpointError:
        """Return the error for a header that is longer than the file or than the largest that is read."""
        return CheckpointError(
            f"{self.file}: truncated or damaged: {what!s:.200} ends after byte {self._limit}, where the header must end"
        )

    def number(self, code: str, what: str) -> int:
        """Return the next integer, of the struct type `code`."""
        value: int = struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]
        return value

    def count(self, most: int, what: str) -> int:
        """Return the next count, which is at most `most`."""
        value = self.number("Q", what)
        if value > most:
            raise CheckpointError(f"{self.file}: names {value} {what}, at most {most} are read")
        return value

    def name(self, what: str) -> str:
        """Return the next string, the name of a key or tensor."""
        length = self.number("Q", what)
        if length > MAX_KEY:
            raise CheckpointError(f"{self.file}: {what} has a name of {length} bytes, at most {MAX_KEY} are read")
        raw = self.take(length, what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text or not text.isprintable():
            raise CheckpointError(f"{self.file}: {what} is named {raw!r:.80}, expected printable text")
        return text

    def scalar(self, kind: int, key: str) -> int | float | bool:
        """Return the next value, of the scalar type `kind`."""
        code = _SCALARS[kind]
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code), key))[0]
        return value


def _read_metadata(
    source: _Source, count: int, kept: Container[str]
) -> tuple[Mapping[str, Value], Mapping[str, tuple[Value, ...]]]:
    """Return the next key-value pairs: scalars and texts, and arrays."""
    found: dict[str, Value] = {}
    arrays: dict[str, tuple[Value, ...]] = {}
    for index in range(count):
        key = source.name(f"key-value pair {index}")
        if key in found or key in arrays:
            raise CheckpointError(f"{source.file}: {key} occurs twice")
        kind = source.number("I", key)
        if kind in _SCALARS:
            found[key] = source.scalar(kind, key)
        elif kind == _TEXT:
            length = source.number("Q", key)
            if length > MAX_TEXT_BYTES:
                raise CheckpointError(f"{source.file}: {key} has {length} bytes, at most {MAX_TEXT_BYTES} are read")
            found[key] = source.take(length, key).decode("utf-8", "replace")
        elif kind == _ARRAY:
            arrays[key] = _read_array(source, key, keep=key in kept)
        else:
            raise CheckpointError(f"{source.file}: {key} has type {kind}, which GGUF does not define")
    return MappingProxyType(found), MappingProxyType(arrays)


def _read_array(source: _Source, key: str, *, keep: bool) -> tuple[Value, ...]:
    """Return the values of the next array. Without `keep` read past them, and return none."""
    kind, count = source.number("I", key), source.number("Q", key)
    if count > MAX_VOCAB:
        raise CheckpointError(f"{source.file}: {key} has {count} entries, at most {MAX_VOCAB} are read")
    if kind in _SCALARS:
        code = _SCALARS[kind]
        raw = source.take(count * struct.calcsize(code), key)
        return struct.unpack(f"<{count}{code}", raw) if keep else ()
    if kind != _TEXT:
        raise CheckpointError(f"{source.file}: {key} is an array of type {kind}, expected numbers or strings")
    texts = []
    for _ in range(count):
        raw = source.take(source.number("Q", key), key)
        if keep:
            texts.append(raw)
    try:
        return tuple(raw.decode("utf-8") for raw in texts)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source.file}: {key} holds a string that is not UTF-8") from error


def _describe(source: _Source) -> tuple[str, TensorType, tuple[int, ...], int]:
    """Return (name, type, shape, offset) of the next tensor."""
    name = source.name("a tensor")
    rank = source.number("I", name)
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{source.file}: {name} has {rank} dimensions, expected 1 to {MAX_RANK}")
    # The fastest dimension is first in the file.
    shape = tuple(reversed([source.number("Q", name) for _ in range(rank)]))
    kind, offset = source.number("I", name), source.number("Q", name)
    found = TENSOR_TYPES.get(kind)
    if found is None:
        supported = ", ".join(each.name for each in TENSOR_TYPES.values())
        shown = _OTHER_TYPES.get(kind, f"type {kind}")
        raise CheckpointError(f"{source.file}: {name} is {shown}, which is not supported (supported: {supported})")
    if min(shape) == 0 or math.prod(shape) >= 1 << 62 or shape[-1] % found.elements:
        raise CheckpointError(f"{source.file}: {name} has shape {list(shape)}, which {found.name} cannot have")
    return name, found, shape, offset


def _place(
    described: list[tuple[str, TensorType, tuple[int, ...], int]], source: _Source, alignment: int, stamp: FileStamp
) -> Mapping[str, TensorEntry]:
    """Return the entries of tensors. Each begins where the one before it ends, rounded up to the alignment."""

    def aligned(position: int) -> int:
        return -(-position // alignment) * alignment

    data_start = aligned(source.position)
    found: dict[str, TensorEntry] = {}
    end = data_start
    for name, kind, shape, offset in described:
        if name in found:
            raise CheckpointError(f"{source.file}: {name} occurs twice")
        start = aligned(end)
        if data_start + offset != start:
            raise CheckpointError(f"{source.file}: {name} starts at byte {data_start + offset}, expected {start}")
        num_bytes = math.prod(shape) // kind.elements * kind.num_bytes
        end = start + num_bytes
        if end > stamp.size:
            raise CheckpointError(
                f"{source.file}: truncated: {name} ends at byte {end}, the file has {stamp.size}; download it again"
            )
        found[name] = TensorEntry(source.file, kind.name, shape, start, num_bytes, stamp)
    if stamp.size > aligned(end):
        raise CheckpointError(f"{source.file}: {stamp.size - end} bytes follow the last tensor")
    return MappingProxyType(found)
